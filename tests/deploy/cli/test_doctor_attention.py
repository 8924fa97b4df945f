"""What `quartet doctor` says of attention: which backend, why, and what would change it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import capability
from cluster.capability import Capability, Gpu
from deploy.cli import doctor_command
from deploy.cli import machine_checks as checks
from deploy.cli.doctor_command import architecture
from deploy.cli.main import main
from deploy.settings import Settings
from engine.attention.flashinfer_files import FlashInferFiles

pytestmark = pytest.mark.pure

B200 = Gpu(0, "NVIDIA B200", "GPU-0", (10, 0), 180 << 30)
WHOLE = FlashInferFiles("0.7.2.post1", "/kernels", "nvcc")
ANY = Settings(model="any")


def test_doctor_says_which_attention_runs_and_why() -> None:
    """On a GPU with all of FlashInfer, without its kernels, and on none: the choice, its reason, and what would change it."""
    here, files = checks.attention(Capability((B200,), WHOLE), ANY, None)
    assert (here.state, here.found) == ("ok", "trtllm_mha: SM100 with FlashInfer 0.7.2.post1, kernels in /kernels")
    assert (files.state, files.found) == ("ok", "0.7.2.post1: kernels in /kernels, launchers built by nvcc")
    here, files = checks.attention(Capability((B200,), WHOLE._replace(cubins=None)), ANY, None)
    assert (here.state, here.found.partition(":")[0]) == ("warn", "triton")
    assert "flashinfer download-cubin" in here.advice
    assert "no kernels of trtllm-gen on disk" in files.found
    (here,) = checks.attention(Capability(), ANY, None)
    assert (here.state, here.found) == ("ok", "reference: no GPU")


def test_doctor_as_another_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--as sm100` answers for that GPU with what this machine has of FlashInfer; what is no compute capability is refused."""
    monkeypatch.setattr(capability, "flashinfer_files", FlashInferFiles)
    monkeypatch.setattr(capability, "node_gpus", tuple)

    def doctor(*arguments: str, code: int = 0) -> dict[str, str]:
        assert main(["doctor", "--json", *arguments]) == code
        return next(each for each in json.loads(capsys.readouterr().out)["findings"] if each["name"] == "attention")

    found = doctor("--as", "sm100")
    assert (found["state"], found["found"], found["advice"]) == ("warn", "triton: SM100 without FlashInfer", "make install-gpu")
    assert doctor("--as", "9.0")["found"].startswith("triton: SM90 is not of the SM100 family")
    assert doctor("--as", "sm75", code=1)["state"] == "fail"
    assert doctor()["found"] == "reference: no GPU"
    assert [architecture(text) for text in ("sm100", "SM_103a", "12.0", "sm89")] == [(10, 0), (10, 3), (12, 0), (8, 9)]
    with pytest.raises(SystemExit):
        main(["doctor", "--as", "hopper"])


def test_doctor_reads_the_config_for_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that asks for trtllm_mha where it cannot be fails, with the reason; the same that asks for decode rows does not."""
    config = "applications: [{import_path: 'deploy.app:build', args: {model: 'dummy:31b', tp: 4, %s: trtllm_mha}}]\n"
    path = tmp_path / "asked.yaml"
    monkeypatch.setattr(doctor_command, "probe", lambda: Capability((replace(B200, capability=(9, 0)),), WHOLE))
    monkeypatch.setattr(checks, "devices", lambda node: [])

    def attention() -> checks.Finding:
        return next(finding for finding in doctor_command.look(path, None, kernels=False) if finding.name == "attention")

    path.write_text(config % "attention")
    assert attention().state == "fail"
    path.write_text(config % "attention_decode")
    assert attention().found.startswith("trtllm_mha decode, triton extend: SM90")
