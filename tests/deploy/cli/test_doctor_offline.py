"""What `quartet doctor --offline` says of a start without a network: what is here, and what would be fetched."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import offline_checks
from deploy.cli.main import main
from deploy.models.nano import TRAINED
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.cpu

NANO = ROOT / "deploy" / "nano.yaml"
Captured = pytest.CaptureFixture[str]


def offline(capsys: Captured, path: Path) -> dict[str, dict[str, Any]]:
    """The findings of `--offline` alone, by name."""
    main(["doctor", "--offline", "--json", str(path)])
    findings = json.loads(capsys.readouterr().out)["findings"]
    prefix = "offline: "
    return {each["name"].removeprefix(prefix): each for each in findings if each["name"].startswith(prefix)}


def changed(folder: Path, **args: Any) -> Path:
    """deploy/nano.yaml with these args, in `folder`."""
    config = yaml.safe_load(NANO.read_text())
    config["applications"][0]["args"] |= args
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_the_nano_model_needs_no_network(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and drafter lie beside the code. HF_HUB_OFFLINE is asked for where it is not set."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert {name: each["state"] for name, each in offline(capsys, NANO).items()} == {
        "model": "ok", "mtp.model": "ok", "flashinfer": "ok", "HF_HUB_OFFLINE": "ok",
    }  # fmt: skip
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert offline(capsys, NANO)["HF_HUB_OFFLINE"]["state"] == "warn"


def test_models_of_the_hub_are_named_with_the_command_that_fetches_them(capsys: Captured, tmp_path: Path) -> None:
    """A model and a drafter that no cache has are two failures, with the revision that the config names."""
    path = changed(tmp_path, model="some/model", revision="v2", mtp={"model": "some/model-assistant"})
    found = offline(capsys, path)
    assert found["model"]["state"] == found["mtp.model"]["state"] == "fail"
    assert "its cache lacks config.json" in found["model"]["found"]
    assert "hf download some/model --revision v2" in found["model"]["advice"]
    assert "hf download some/model-assistant;" in found["mtp.model"]["advice"]


def test_a_cache_that_lacks_a_shard_is_named(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of the index must be there, and the tokenizer: each missing one is named."""
    cached = shutil.copytree(TRAINED / "31b", tmp_path / "cached")
    monkeypatch.setattr(offline_checks, "folder_here", lambda name, revision: cached)
    path = changed(tmp_path, model="some/model", mtp={})
    assert offline(capsys, path)["model"]["state"] == "ok"
    for name in ("tokenizer.json", "model-00002-of-00003.safetensors"):
        (cached / name).unlink()
        found = offline(capsys, path)["model"]
        assert found["state"] == "fail"
        assert name in found["found"]


def test_kernels_that_flashinfer_would_fetch_fail(capsys: Captured, tmp_path: Path) -> None:
    """Where the config lets FlashInfer download, and the kernels are not on disk."""
    found = offline(capsys, changed(tmp_path, flashinfer_download=True))["flashinfer"]
    assert found["state"] == "fail"
    assert "flashinfer-cubin" in found["advice"]


def test_it_needs_a_config(capsys: Captured) -> None:
    """Without one nobody knows which model would be fetched: exit code 2."""
    assert main(["doctor", "--offline"]) == 2
    assert "--offline needs a config" in capsys.readouterr().err
