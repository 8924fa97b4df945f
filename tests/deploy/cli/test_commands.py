"""The other commands of `quartet`: what they print, what they refuse, how they end, and what they do not import."""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

import quartet
from cluster import capability
from cluster.capability import Capability, Gpu
from deploy import environment
from deploy.cli import machine_checks as checks
from deploy.cli.main import main
from deploy.cli.output import Table, gib, plain
from deploy.scaling import POLICY
from deploy.settings import read_config, read_settings
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

Captured = pytest.CaptureFixture[str]
NANO = ROOT / "deploy" / "nano.yaml"
OURS = {"policy_function": POLICY}
H200 = Gpu(0, "NVIDIA H200", "GPU-a", (9, 0), 143771 << 20)

HELP = """
import sys
from deploy.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "ray", "transformers", "numpy", "httpx", "fastapi"} & set(sys.modules)
    print("heavy:", sorted(heavy))
"""


def python(*arguments: str, folder: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter's output; `environ` on top of ours, which says nothing of a checkout."""
    clean = {name: value for name, value in os.environ.items() if name not in ("QUARTET_HOME", "PYTHONPATH")} | environ
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=60, check=False)


# ---- the parser


@pytest.mark.parametrize("command", ["", "plan", "doctor", "check-config", "env", "key"])
def test_help_imports_nothing_heavy(command: str) -> None:
    """Help is printed, with examples and exit codes, and neither torch nor ray nor another large library was imported for it."""
    done = python("-c", HELP, *command.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert "exit codes:" in done.stdout
    assert f"  quartet {command}" in done.stdout
    assert done.stdout.endswith("heavy: []\n")


def test_the_import_check_sees_a_heavy_import() -> None:
    """Planted: the same script says so when numpy was imported before."""
    done = python("-c", "import numpy\n" + HELP, "--help")
    assert done.stdout.endswith("heavy: ['numpy']\n")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    """`quartet doctor | head -1` ends quietly."""
    command = f"{sys.executable} -m deploy.cli doctor --json | head -c 1"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("{", "")


def test_an_output_that_cannot_be_written_is_one_line() -> None:
    """A full disk's: `/dev/full`."""
    command = f"{sys.executable} -m deploy.cli doctor > /dev/full"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "quartet: stdout: No space left on device\n")


def test_letters_that_the_terminal_lacks_are_escaped(tmp_path: Path) -> None:
    """A model's name is shown all the same."""
    path = tmp_path / "mine.yaml"
    path.write_text(NANO.read_text(encoding="utf-8").replace("nano-31b", "näno"), encoding="utf-8")
    done = python("-m", "deploy.cli", "check-config", str(path), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "n\\xe4no: " in done.stdout


def test_tables_are_plain_lines() -> None:
    """Columns two blanks apart, flush right where asked, with no border and nothing behind the last cell."""
    lines = list(plain(["first", Table(("name", ">count"), [("a", "7"), ("longer", "12")])]))
    assert lines == ["first", "name    count", "a           7", "longer     12"]
    assert (gib(3 << 29), gib(1 << 20)) == ("1.50 GiB", "1.00 MiB")


# ---- the installed command


def test_the_installed_command_finds_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By QUARTET_HOME, the virtual environment's folder, or the working folder; where there is none it says so, with code 2."""
    shutil.copy(ROOT / "quartet.py", tmp_path)  # as in site-packages: nothing of the checkout lies beside it
    script = f"import sys; sys.path[:1] = [{str(tmp_path)!r}]; import quartet; sys.exit(quartet.main())"
    (tmp_path / "elsewhere").mkdir()
    for environ, folder, code in (
        ({"QUARTET_HOME": str(ROOT)}, tmp_path / "elsewhere", 0),
        ({}, ROOT / "deploy", 0),
        ({"QUARTET_HOME": str(tmp_path)}, tmp_path / "elsewhere", 2),
    ):
        done = python("-c", script, "check-config", "--help", folder=folder, **environ)
        assert done.returncode == code, done.stderr
        assert ("usage: quartet check-config" in done.stdout) == (code == 0)
        assert ("no checkout found" in done.stderr) == (code == 2)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.delenv("QUARTET_HOME", raising=False)
    assert next(quartet.candidates()) == tmp_path


# ---- doctor


def doctor(capsys: Captured, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """Findings by name."""
    assert main(["doctor", "--json", *arguments]) == code
    return {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_doctor_looks_at_everything(capsys: Captured) -> None:
    """Software against pyproject.toml, devices, machine, port, ingress, Ray's settings, hub and config: each has a finding."""
    found = doctor(capsys, str(NANO))
    named = "python torch triton ray flashinfer-python attention gpus cores memory haproxy hub"
    assert not {*named.split(), "/dev/shm"} - set(found)
    assert {"open files", "port 8000", "ray settings", "hub cache", "nano.yaml"} <= set(found)
    assert ">=2.11" in found["torch"]["found"]
    assert all(each["advice"] or each["name"] == "port 8000" for each in found.values() if each["state"] != "ok")


def test_a_version_out_of_range_fails(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: another ray than pyproject.toml allows is a fail with the range, and code 1; so is a package that is missing."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.3" if name == "ray" else real(name))
    ray = doctor(capsys, code=1)["ray"]
    assert (ray["state"], ray["advice"]) == ("fail", "pip install 'ray<2.61,>=2.60'")

    def missing(name: str) -> str:
        if name == "msgspec":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "not installed" in doctor(capsys, code=1)["msgspec"]["found"]


def test_a_warning_is_no_failure(capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable of Ray's that stands against ours, and a port where somebody listens, at the address of the config."""
    monkeypatch.setenv("RAY_worker_niceness", "15")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = doctor(capsys, str(changed(tmp_path, _top={"http_options": {"host": "127.0.0.1", "port": port}})))
        assert found[f"port {port}"]["found"].startswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")
    assert (found["ray settings"]["state"], found["ray settings"]["found"]) == ("warn", "RAY_worker_niceness=15")


def test_a_config_that_this_machine_cannot_hold_fails(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """gemma4.yaml fails without GPUs and is fine with four."""
    monkeypatch.setattr(capability, "node_gpus", tuple)
    gemma = str(ROOT / "deploy" / "gemma4.yaml")
    assert "tp 4 needs 4 GPUs" in doctor(capsys, gemma, code=1)["gemma4.yaml"]["found"]
    settings = read_settings(read_config(Path(gemma)), gemma)
    assert checks.config("gemma4.yaml", settings, 4).state == "ok"


def fake_nvml(monkeypatch: pytest.MonkeyPatch, linked: set[tuple[int, int]], readable: set[tuple[int, int]]) -> None:
    """NVML with these pairs linked by NVLink, and these readable at all."""
    ways = {"link": linked, "read": readable}
    fake = types.SimpleNamespace(
        NVML_P2P_CAPS_INDEX_NVLINK="link", NVML_P2P_CAPS_INDEX_READ="read", NVML_P2P_STATUS_OK=0, nvmlInit=lambda: None,
        nvmlShutdown=lambda: None, nvmlDeviceGetHandleByIndex=lambda index: index,
        NVMLError=ZeroDivisionError, nvmlDeviceGetP2PStatus=lambda first, second, way: 0 if (first, second) in ways[way] else 1,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)


def test_links_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """All linked is ok, PCIe is a warning, as is a driver that does not say; a pair that cannot reach each other is a failure that
    names it."""
    every = {(0, 1), (0, 2), (1, 2)}
    fake_nvml(monkeypatch, every, every)
    assert checks.links([0, 1, 2]).state == "ok"
    fake_nvml(monkeypatch, every - {(1, 2)}, every)
    assert (checks.links([0, 1, 2]).state, "1-2" in checks.links([0, 1, 2]).found) == ("warn", True)
    fake_nvml(monkeypatch, every - {(1, 2)}, every - {(1, 2)})
    assert (checks.links([0, 1, 2]).state, "1-2" in checks.links([0, 1, 2]).found) == ("fail", True)
    assert checks.links([0]).state == "ok"
    ways = sys.modules["pynvml"]
    monkeypatch.setattr(ways, "nvmlDeviceGetP2PStatus", lambda *_: 1 // 0)
    assert (checks.links([0, 1]).state, "by zero" in checks.links([0, 1]).found) == ("warn", True)


def test_gpus_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch beside GPUs fails; two kinds of GPU are a warning; the right build alone is fine."""
    monkeypatch.setattr(checks, "links", lambda indices: checks.Finding("nvlink", "ok", ""))
    for build, bad in (("2.13.0+cpu", True), ("2.13.0+cu130", False)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, build=build: build)
        found = {each.name: each for each in checks.devices(Capability((H200,)))}
        assert ("torch-cuda" in found) is bad
        assert found["gpus"].found == "1 x NVIDIA H200 (SM90, 140 GiB)"
    other = Gpu(1, "NVIDIA L40S", "GPU-b", (8, 9), 46068 << 20)
    assert {each.name: each.state for each in checks.devices(Capability((H200, other)))}["gpus"] == "warn"


def test_a_compiler_is_needed_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles its launchers with one: without it, or Python.h, no replica starts on GPUs. CC names another."""
    assert checks.compiler(Capability((H200,))).state == "ok"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert [checks.compiler(Capability(gpus)).state for gpus in ((H200,), ())] == ["fail", "warn"]
    assert "there is no no-such-compiler" in checks.compiler(Capability((H200,))).found
    monkeypatch.delenv("CC")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    found = checks.compiler(Capability((H200,)))
    assert (found.state, found.found) == ("fail", "there is no /nowhere/Python.h")
    assert "apt-get install gcc" in found.advice


def test_haproxy_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one in the wheel runs; none is a warning; one that cannot run is a failure."""
    assert checks.ingress().state == "ok"
    broken = tmp_path / "haproxy"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    for binary, state in ((None, "warn"), (str(broken), "fail"), (str(tmp_path / "none"), "fail")):
        monkeypatch.setattr(environment, "haproxy_binary", lambda binary=binary: binary)
        assert checks.ingress().state == state


def test_little_room_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Docker container's 64 MB of /dev/shm is said, with the option that gives more."""
    monkeypatch.setattr(checks, "_free", lambda folder: 64 << 20)
    found = {each.name: each for each in checks.machine()}
    assert (found["/dev/shm"].state, "--shm-size" in found["/dev/shm"].advice) == ("warn", True)
    assert {each.name: each.state for each in checks.hub()}["hub cache"] == "warn"


# ---- check-config


def changed(tmp_path: Path, **changes: Any) -> Path:
    """nano.yaml with other args; `_deployment`, its `_scaling`, `_app` and `_top` change the rest."""
    document = yaml.safe_load(NANO.read_text())
    document |= changes.pop("_top", {})
    if scaling := changes.pop("_scaling", None):
        changes["_deployment"] = {"autoscaling_config": scaling}
    document["applications"][0]["deployments"][0] |= changes.pop("_deployment", {})
    document["applications"][0] |= changes.pop("_app", {})
    document["applications"][0]["args"] |= changes
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def checked(path: Path, capsys: Captured) -> dict[str, Any]:
    """What check-config says of the application of a config that is right."""
    assert main(["check-config", str(path), "--json"]) == 0
    (application,) = json.loads(capsys.readouterr().out)["applications"]
    return dict(application)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tp": "four"}, "args of quartet: tp: expected int, not"),
        ({"limits": {"body": 1}}, "args of quartet: limits.body: unknown setting"),
        ({"max_len": 9999}, "max_len 9999 exceeds the model's 4096 positions"),
        ({"max_queue": 10**15}, "args of quartet: max_queue: expected int <= 4398046511104, not 1000000000000000"),
        ({"encoder_host_bytes": 10**15}, "args of quartet: encoder_host_bytes: expected int <= 4398046511104"),
        ({"limits": {"upload_bytes": 2**43}}, "args of quartet: limits.upload_bytes: expected int <= 4398046511104"),
        ({"step_timeout_s": float("nan")}, "args of quartet: step_timeout_s: expected float > 0.0, not nan"),
        ({"step_timeout_s": float("inf")}, "args of quartet: step_timeout_s: expected float <= 2147483, not inf"),
        ({"tp": 3}, "does not divide by tensor-parallel size 3"),
        ({"model": "dummy:e2b", "mtp": {}, "pages": [3, 99]}, "pages: the sliding group needs at least"),
        ({"pages": [2**31, 99]}, "pages: expected int <= 2147483647 - at $[0]"),
        ({"_deployment": {"max_ongoing_request": 3}}, "applications.0.deployments.0.max_ongoing_request: unknown key"),
        ({"_deployment": {"autoscaling_config": {"min_replica": 1}}}, "deployments.0.autoscaling_config.min_replica: unknown key"),
        ({"_top": {"proxy_locations": "HeadOnly"}}, "proxy_locations: unknown key, which Serve would ignore"),
        ({"_deployment": {"name": "Quintet"}}, "deployments: expected a list of mappings named Quartet"),
        ({"_app": {"route_prefix": "/x"}}, "route_prefix: one application has /, and each other one"),
        ({"_app": {"deployments": [1]}}, "deployments: expected a list of mappings named Quartet"),
        ({"_scaling": {"min_replicas": "x"}}, "autoscaling_config.min_replicas: Input should be a valid integer"),
        ({"_scaling": {"min_replicas": 3}}, "autoscaling_config.all: Value error, max_replicas (1) must be"),
        ({"_scaling": {"policy": "x"}}, "autoscaling_config.policy: Input should be a valid dictionary"),
        ({"_scaling": {"policy": {"policy_function": "no.such:policy"}}}, "autoscaling_config.policy: No module named 'no'"),
        ({"_scaling": {"policy": OURS | {"policy_kwarg": {}}}}, "autoscaling_config.policy: policy_kwarg: unknown key"),
        ({"_scaling": {"policy": OURS | {"policy_kwargs": {"slots": 2}}}}, "autoscaling_config.policy: policy_kwargs.slots: 2"),
        ({"_scaling": {"policy": OURS | {"policy_kwargs": {"slot": 0.5}}}}, "autoscaling_config.policy: Scaling.__init__()"),
        ({"mtp": {"drafts": 3}}, "mtp.drafts 3: mtp.model must name the assistant"),
        ({"model": "x" * 300}, f"[Errno 36] File name too long: '{'x' * 300}'"),
        ({"mtp": {"model": "nano:70b-assistant"}}, "mtp.model: nano:70b-assistant is not one of nano:26b-a4b"),
        ({"mtp": {"model": "nano:e2b-assistant"}}, "is no drafter of this model: KV heads of layer 0 1, not 4"),
        ({"_top": {"http_options": {"port": "eighty"}}}, "http_options.port: Input should be a valid integer"),
        ({"_top": {"http_options": {"port": 65536}}}, "http_options.port: 65536 is not from 1 to 65535"),
        ({"_top": {"http_options": {"keep_alive_timeout_s": 2147484}}}, "keep_alive_timeout_s: 2147484 is not from 0 to 2147483"),
        ({"_top": {"http_options": {"request_timeout_s": -1}}}, "http_options.request_timeout_s: -1.0 is not from 0 to 2147483"),
        ({"_top": {"http_options": {"request_timeout_s": float("nan")}}}, "http_options.request_timeout_s: nan is not from 0"),
    ],
)
def test_check_config_names_what_is_wrong(changes: dict[str, Any], why: str, tmp_path: Path, capsys: Captured) -> None:
    """A bad value, an unknown key of ours or of Serve's, and what the model's shape forbids: code 2, one line, file and key."""
    path = changed(tmp_path, **changes)
    assert main(["check-config", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"quartet: {path}: ") or changes.get("model") == "x" * 300
    assert why in said.err
    assert said.err.count("\n") == 1


def test_check_config_starts_nothing_and_says_what_it_could_not_check(tmp_path: Path, capsys: Captured) -> None:
    """No Ray runs afterwards; an unknown hub id and GPUs that do not match tp are notes, and the rest is fine."""
    for options in ({"num_gpus": 4}, {"num_cpus": 8}, {}, {"num_gpus": None}, {"num_gpus": 2}):  # ours are not beside any
        path = changed(tmp_path, model="someone/finetune", device="cuda", _deployment={"ray_actor_options": options})
        application = checked(path, capsys)
        found = [note.partition(",")[0] for note in application["notes"][:-1]]
        assert found == ([] if options == {"num_gpus": 4} else [f"num_gpus is {options.get('num_gpus') or 0}"])
        assert application["notes"][-1].startswith("model:")
    (note,) = checked(changed(tmp_path, mtp={"model": "someone/assistant"}), capsys)["notes"]
    assert note.startswith("mtp.model: someone/assistant is not all on this machine: its files were not checked")
    drafted = changed(tmp_path, model="google/gemma-4-31B-it", device="cuda", mtp={"model": "google/gemma-4-31B-it-assistant"})
    notes = checked(drafted, capsys)["notes"]
    absent = ["mtp.model: google/gemma-4-31B-it-assistant", "model: google/gemma-4-31B-it"]
    assert [note.partition(" is not all")[0] for note in notes[-2:]] == absent
    assert (application["settings"]["tp"], application["settings"]["max_queue"]) == (4, None)
    import ray

    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("http", "metrics", "where", "notes"),
    [
        ("127.0.0.1", {}, "EveryNode", ["http_options.host is on loopback"]),
        ("127.0.0.1", {}, "HeadOnly", []),
        ("0.0.0.0", {}, "EveryNode", ["no keys, and http_options.host is 0.0.0.0"]),
        ("127.0.0.1", {"host": "::1"}, "EveryNode", ["http_options.host is on loopback", "metrics.host ::1"]),
    ],
)
def test_check_config_knows_what_several_machines_need(
    http: str, metrics: dict[str, Any], where: str, notes: list[str], tmp_path: Path, capsys: Captured
) -> None:
    """Addresses on loopback, where every node has an ingress."""
    path = changed(tmp_path, metrics=metrics)
    whole = yaml.safe_load(path.read_text())
    whole |= {"proxy_location": where, "http_options": {**whole["http_options"], "host": http}}
    path.write_text(yaml.safe_dump(whole))
    found = checked(path, capsys)["notes"]
    assert [note[: len(start)] for note, start in zip(found, notes, strict=True)] == notes


def test_check_config_knows_whose_answers_would_be_cut(tmp_path: Path, capsys: Captured) -> None:
    """A replica that goes needs as long as an answer may take."""
    for drain, notes in ((610, 0), (0, 1)):
        path = changed(tmp_path, _deployment={"graceful_shutdown_timeout_s": drain})
        application = checked(path, capsys)
        assert sum("graceful_shutdown_timeout_s" in note for note in application["notes"]) == notes


def test_check_config_knows_who_would_wait_for_ever(tmp_path: Path, capsys: Captured) -> None:
    """Scaled to zero a request needs a bound to its wait, which must not be below the bound of an answer."""
    path = changed(tmp_path, _deployment={"autoscaling_config": {"min_replicas": 0, "max_replicas": 1}})
    whole = yaml.safe_load(path.read_text())
    for bound, note in ((1200, None), (None, "request_timeout_s is not in"), (30, "request_timeout_s 30 in http_options")):
        whole["http_options"]["request_timeout_s"] = bound
        path.write_text(yaml.safe_dump(whole))
        application = checked(path, capsys)
        said = [each for each in application["notes"] if "request_timeout_s" in each]
        assert len(said) == (note is not None)
        assert all(each.startswith(note or "") for each in said)
