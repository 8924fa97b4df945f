"""The other commands of `quartet`: what they print, what they refuse, how they end, and what they do not import."""

import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import quartet
from cluster import capability
from cluster.capability import Capability, Gpu
from dashboards import metrics as table
from deploy import environment
from deploy.cli import bench_command as bench
from deploy.cli import dashboards_command as dashboards
from deploy.cli import machine_checks as checks
from deploy.cli import metrics_command as metrics
from deploy.cli.main import main
from deploy.cli.output import Table, gib, plain
from deploy.cli.scrape import Snapshot, quantile
from engine.errors import ConfigError
from tests.support.edge.http_edge import Edge
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

Captured = pytest.CaptureFixture[str]
NANO = ROOT / "deploy" / "nano.yaml"
H200 = Gpu(0, "NVIDIA H200", "GPU-a", (9, 0), 143771 << 20)

HELP = """
import sys
from deploy.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "ray", "transformers", "numpy", "httpx", "matplotlib", "fastapi"} & set(sys.modules)
    print("heavy:", sorted(heavy))
"""


def python(*arguments: str, folder: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter's output; `environ` on top of ours, which says nothing of a checkout."""
    clean = {name: value for name, value in os.environ.items() if name not in ("QUARTET_HOME", "PYTHONPATH")} | environ
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=60, check=False)


# ---- the parser


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["plan", "--help"], ["doctor", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help is printed, with examples and exit codes, and neither torch nor ray nor another large library was imported for it."""
    done = python("-c", HELP, *arguments)
    assert done.returncode == 0, done.stderr
    assert "exit codes:" in done.stdout
    assert "  quartet " in done.stdout
    assert done.stdout.endswith("heavy: []\n")


def test_the_import_check_sees_a_heavy_import() -> None:
    """Planted: the same script says so when numpy was imported before."""
    done = python("-c", "import numpy\n" + HELP, "--help")
    assert done.stdout.endswith("heavy: ['numpy']\n")


def test_every_command_speaks_json() -> None:
    """All but serve take --json; every command teaches by example."""
    for command in ("doctor", "check-config", "plan", "bench", "metrics", "dashboards"):
        done = python("-m", "deploy.cli", command, "--help")
        assert "--json" in done.stdout, command
        assert f"  quartet {command}" in done.stdout, command


def test_a_reader_that_leaves_is_no_traceback() -> None:
    """`quartet doctor | head -1` ends quietly."""
    command = f"{sys.executable} -m deploy.cli dashboards --json | head -c 1"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("{", "")


def test_tables_are_plain_lines() -> None:
    """Columns two blanks apart, flush right where asked, with no border and nothing behind the last cell."""
    lines = list(plain(["first", Table("title", ("name", ">count"), [("a", "7"), ("longer", "12")])]))
    assert lines == ["first", "title", "name    count", "a           7", "longer     12"]
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
    """Software against pyproject.toml, devices, machine, ports, ingress, Ray's settings, hub and configs: each has a finding."""
    found = doctor(capsys)
    named = "python torch triton ray flashinfer-python packages capability attention gpus cores niceness memory haproxy hub"
    assert not {*named.split(), "/dev/shm"} - set(found)
    assert {"open files", "port 8000", "ray settings", "hub cache", "quartet cache", "nano.yaml", "gemma4.yaml"} <= set(found)
    assert ">=2.11" in found["torch"]["found"]
    assert all(each["advice"] or each["name"].endswith(".yaml") for each in found.values() if each["state"] != "ok")


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
    assert "msgspec is missing" in doctor(capsys, code=1)["packages"]["found"]


def test_strict_makes_warnings_count(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of Ray's that stands against ours is a warning: 0, and 1 under --strict."""
    monkeypatch.setenv("RAY_worker_niceness", "15")
    assert doctor(capsys)["ray settings"]["found"] == "RAY_worker_niceness=15"
    doctor(capsys, "--strict", code=1)


def test_a_config_that_this_machine_cannot_hold_fails(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, gemma4.yaml fails without GPUs and is fine with four; unnamed it is a warning."""
    monkeypatch.setattr(capability, "node_gpus", tuple)
    gemma = str(ROOT / "deploy" / "gemma4.yaml")
    assert "tp 4 needs 4 GPUs" in doctor(capsys, gemma, code=1)["gemma4.yaml"]["found"]
    assert doctor(capsys)["gemma4.yaml"]["state"] == "warn"
    assert checks.config(Path(gemma), 4, asked=True).state == "ok"


def fake_nvml(monkeypatch: pytest.MonkeyPatch, linked: set[tuple[int, int]], readable: set[tuple[int, int]]) -> None:
    """NVML with these pairs linked by NVLink, and these readable at all."""
    ways = {"link": linked, "read": readable}
    fake = types.SimpleNamespace(
        NVML_P2P_CAPS_INDEX_NVLINK="link", NVML_P2P_CAPS_INDEX_READ="read", NVML_P2P_STATUS_OK=0, nvmlInit=lambda: None,
        nvmlShutdown=lambda: None, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetP2PStatus=lambda first, second, way: 0 if (first, second) in ways[way] else 1,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)


def test_links_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """All linked is ok, PCIe is a warning, a pair that cannot reach each other is a failure that names it."""
    every = {(0, 1), (0, 2), (1, 2)}
    fake_nvml(monkeypatch, every, every)
    assert checks.links([0, 1, 2]).state == "ok"
    fake_nvml(monkeypatch, every - {(1, 2)}, every)
    assert (checks.links([0, 1, 2]).state, "1-2" in checks.links([0, 1, 2]).found) == ("warn", True)
    fake_nvml(monkeypatch, every - {(1, 2)}, every - {(1, 2)})
    assert (checks.links([0, 1, 2]).state, "1-2" in checks.links([0, 1, 2]).found) == ("fail", True)
    assert checks.links([0]).state == "ok"


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
    """nano.yaml with other args; `_deployment`, `_top` change the rest."""
    document = yaml.safe_load(NANO.read_text())
    document |= changes.pop("_top", {})
    document["applications"][0]["deployments"][0] |= changes.pop("_deployment", {})
    document["applications"][0]["args"] |= changes
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tp": "four"}, "args of quartet: tp: input should be a valid integer"),
        ({"limits": {"body": 1}}, "args of quartet: limits.body: unknown setting"),
        ({"max_len": 9999}, "max_len 9999 exceeds the model's 4096 positions"),
        ({"tp": 3}, "does not divide by tensor-parallel size 3"),
        ({"model": "nano:70b"}, "model: nano:70b is not one of nano:26b-a4b"),
        ({"model": "dummy:e2b", "pages": [3, 99]}, "pages: the sliding group needs at least"),
        ({"_deployment": {"max_ongoing_request": 3}}, "applications.0.deployments.0.max_ongoing_request: unknown key"),
        ({"_deployment": {"autoscaling_config": {"min_replica": 1}}}, "deployments.0.autoscaling_config.min_replica: unknown key"),
        ({"_top": {"proxy_locations": "HeadOnly"}}, "proxy_locations: unknown key, which Serve would ignore"),
        ({"_deployment": {"name": "Quintet"}}, "deployments: 'Quintet' is not 'Quartet'"),
        ({"_top": {"http_options": {"port": "eighty"}}}, "http_options.port: Input should be a valid integer"),
    ],
)
def test_check_config_names_what_is_wrong(changes: dict[str, Any], why: str, tmp_path: Path, capsys: Captured) -> None:
    """A bad value, an unknown key of ours or of Serve's, and what the model's shape forbids: code 2, one line, file and key."""
    path = changed(tmp_path, **changes)
    assert main(["check-config", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"quartet: {path}: ") or changes.get("model") == "nano:70b"
    assert why in said.err
    assert said.err.count("\n") == 1


def test_check_config_starts_nothing_and_says_what_it_could_not_check(tmp_path: Path, capsys: Captured) -> None:
    """No Ray runs afterwards; an unknown hub id and GPUs that do not match tp are notes, and the rest is fine."""
    path = changed(tmp_path, model="someone/finetune", device="cuda", _deployment={"ray_actor_options": {"num_gpus": 2}})
    assert main(["check-config", str(path), "--json"]) == 0
    (application,) = json.loads(capsys.readouterr().out)["applications"]
    assert [note.partition(" ")[0] for note in application["notes"]] == ["num_gpus", "model:"]
    assert (application["settings"]["tp"], application["settings"]["max_queue"]) == (4, None)
    import ray

    assert not ray.is_initialized()


def test_check_config_knows_whose_answers_would_be_cut(tmp_path: Path, capsys: Captured) -> None:
    """A replica that goes needs as long as an answer may take."""
    for drain, notes in ((610, 0), (599, 1)):
        path = changed(tmp_path, _deployment={"graceful_shutdown_timeout_s": drain})
        assert main(["check-config", str(path), "--json"]) == 0
        (application,) = json.loads(capsys.readouterr().out)["applications"]
        assert sum("graceful_shutdown_timeout_s" in note for note in application["notes"]) == notes


def test_check_config_knows_who_would_wait_for_ever(tmp_path: Path, capsys: Captured) -> None:
    """Scaled to zero a request needs a bound to its wait, which must not be below the bound of an answer."""
    path = changed(tmp_path, _deployment={"autoscaling_config": {"min_replicas": 0, "max_replicas": 1}})
    whole = yaml.safe_load(path.read_text())
    for bound, note in ((1200, None), (None, "request_timeout_s is not in"), (30, "request_timeout_s 30 in http_options")):
        whole["http_options"]["request_timeout_s"] = bound
        path.write_text(yaml.safe_dump(whole))
        assert main(["check-config", str(path), "--json"]) == 0
        (application,) = json.loads(capsys.readouterr().out)["applications"]
        said = [each for each in application["notes"] if "request_timeout_s" in each]
        assert len(said) == (note is not None)
        assert all(each.startswith(note or "") for each in said)


# ---- metrics

EXPOSED = """\
# TYPE quartet_time_to_first_token_seconds histogram
quartet_time_to_first_token_seconds_bucket{le="0.1"} 50
quartet_time_to_first_token_seconds_bucket{le="0.2"} 90
quartet_time_to_first_token_seconds_bucket{le="+Inf"} 100
quartet_time_to_first_token_seconds_count 100
quartet_time_to_first_token_seconds_sum 11
# TYPE quartet_requests_received counter
quartet_requests_received_total 100
# TYPE quartet_generation_tokens counter
quartet_generation_tokens_total 640
# TYPE quartet_requests counter
quartet_requests_total{outcome="stop"} 90
quartet_requests_total{outcome="error"} 3
# TYPE quartet_requests_running gauge
quartet_requests_running 7
# TYPE quartet_kv_pages gauge
quartet_kv_pages{group="full"} 200
# TYPE quartet_kv_pages_used gauge
quartet_kv_pages_used{group="full"} 50
# TYPE quartet_engine_up gauge
quartet_engine_up 1
"""


class Pages(ThreadingHTTPServer):
    """Serves `pages` (path -> text) on a free port."""

    def __init__(self, pages: dict[str, str]) -> None:
        self.pages = pages
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Pages

    def do_GET(self) -> None:
        text = self.server.pages.get(self.path)
        self.send_response(200 if text is not None else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def pages() -> Iterator[Pages]:
    server = Pages({"/metrics": EXPOSED, "/dead": EXPOSED.replace("engine_up 1", "engine_up 0")})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def once(capsys: Captured, url: str, code: int = 0) -> dict[str, Any]:
    assert main(["metrics", url, "--once", "--json"]) == code
    return dict(json.loads(capsys.readouterr().out))


def test_one_scrape(pages: Pages, capsys: Captured) -> None:
    """ScrapeGauges, totals, outcomes, pools, and quantiles as Prometheus would compute them."""
    found = once(capsys, f"{pages.url}/metrics")
    assert (found["requests_running"], found["groups_up"], found["totals"]["generated_tokens"]) == (7, 1, 640)
    assert found["outcomes"] == {"stop": 90, "error": 3}
    assert found["pools"] == {"full": {"pages": 200, "used": 50}}
    latency = found["latencies"]["time to first token"]
    assert latency == {"p50": pytest.approx(0.1), "p90": pytest.approx(0.2), "p99": 0.2}
    assert main(["metrics", f"{pages.url}/metrics", "--once"]) == 0
    said = capsys.readouterr().out
    assert "50 of 200 (25 %)" in said
    assert "100.0 ms" in said


def test_all_targets_of_a_list_are_added_up(pages: Pages, capsys: Captured) -> None:
    """An http_sd document: figures are sums, and a target that does not answer is named, with code 1."""
    host = pages.url.removeprefix("http://")
    entry = {"targets": [host, host], "labels": {"replica": "a"}}
    pages.pages["/sd"] = json.dumps([entry])
    found = once(capsys, f"{pages.url}/sd")
    assert (found["targets"], found["groups_up"], found["requests_running"]) == (2, 2, 14)
    pages.pages["/sd"] = json.dumps([entry, {"targets": [host], "labels": {"__metrics_path__": "/gone"}}])
    found = once(capsys, f"{pages.url}/sd", code=1)
    assert (found["targets"], found["groups_up"]) == (3, 2)
    assert "/gone answers 404" in found["down"][0]


def test_a_dead_group_exits_with_1(pages: Pages, capsys: Captured) -> None:
    """engine_up 0 is exit code 1; an address where nothing is, 2."""
    pages.pages["/sd"] = json.dumps([{"targets": [pages.url.removeprefix("http://")], "labels": {"__metrics_path__": "/dead"}}])
    assert once(capsys, f"{pages.url}/sd", code=1)["groups_up"] == 0
    assert main(["metrics", f"{pages.url}/nowhere", "--once"]) == 2
    assert main(["metrics", "http://127.0.0.1:9", "--once"]) == 2
    assert "does not answer" in capsys.readouterr().err


def test_the_api_names_its_exporter(pages: Pages, edge: Edge, capsys: Captured) -> None:
    """The real edge's /health/ready leads to the exporter."""
    edge.service.about["metrics"] = f"{pages.url}/metrics"
    assert once(capsys, edge.url)["requests_running"] == 7
    del edge.service.about["metrics"]
    assert main(["metrics", edge.url, "--once"]) == 2
    assert "names no exporter at /health/ready" in capsys.readouterr().err


def test_live_rates_are_of_the_last_interval(pages: Pages, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second line is of what came meanwhile: 60 tokens in the measured time, and quantiles of the new observations alone."""
    moved = EXPOSED.replace("_total 640", "_total 700")
    moved = moved.replace('le="0.2"} 90', 'le="0.2"} 100').replace('"+Inf"} 100', '"+Inf"} 110')
    turns = iter([lambda: pages.pages.update({"/metrics": moved}), lambda: (_ for _ in ()).throw(KeyboardInterrupt)])
    monkeypatch.setattr(metrics.time, "sleep", lambda seconds: next(turns)())
    assert main(["metrics", f"{pages.url}/metrics", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["generated_tokens_per_s"] is None
    assert second["generated_tokens_per_s"] * second["seconds"] == pytest.approx(60)
    assert second["latencies"]["time to first token"]["p50"] == pytest.approx(0.15)


def test_a_restart_is_not_a_negative_rate() -> None:
    """Counters that fell began anew: the increase is what they are now, and quantiles are of all there is."""

    def at(count: float) -> Snapshot:
        return Snapshot({"c_total": [({}, count)], "h_bucket": [({"le": "1"}, count), ({"le": "+Inf"}, count)]}, 0.0)

    before, now = at(50.0), at(4.0)
    assert now.increase("c_total", before) == 4.0
    assert now.quantile("h", 0.5, before) == pytest.approx(0.5)
    assert now.quantile("nothing", 0.5) is None


def test_quantiles_are_prometheus_ones() -> None:
    """Linear inside the bucket; in the last one its lower bound; of nothing, none."""
    buckets = [(1.0, 10.0), (2.0, 30.0), (math.inf, 40.0)]
    assert [quantile(buckets, share) for share in (0.125, 0.5, 0.75, 0.9)] == [0.5, 1.5, 2.0, 2.0]
    assert quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5) is None


def test_every_name_stands_in_the_table() -> None:
    """What the commands read from an exporter is what the table of metrics has, by its exposed name and kind."""
    rows = {row.name.removesuffix("_total") if row.kind == "counter" else row.name: row for row in table.METRICS}
    exposed = {name + ("_total" if row.kind == "counter" else ""): row for name, row in rows.items()}
    assert {exposed[name].kind for name in metrics.LATENCIES.values()} == {"histogram"}
    counters = (*metrics.RATES.values(), metrics.OUTCOMES, bench.RECEIVED, bench.GENERATED)
    assert {exposed[name].kind for name in counters} == {"counter"}
    assert not set(metrics.LEVELS.values()) - set(exposed)
    assert exposed[metrics.OUTCOMES].labels == ("outcome",)
    assert exposed[metrics.PAGES].labels == exposed[metrics.PAGES_USED].labels == ("group",)


# ---- dashboards


def test_dashboards_lists_what_there_is(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boards with their panels, rows aside, and rules by kind; without boards the code is 1."""
    monkeypatch.setattr(dashboards, "FOLDER", tmp_path)
    assert main(["dashboards"]) == 1
    panels = [{"type": "timeseries"}, {"type": "row", "panels": [{"type": "stat"}, {"type": "stat"}]}]
    (tmp_path / "one.json").write_text(json.dumps({"title": "One", "panels": panels}))
    rules = {"groups": [{"rules": [{"alert": "a"}, {"record": "b"}, {"record": "c"}]}]}
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    capsys.readouterr()
    assert main(["dashboards", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    found = [(each["kind"], each["what"]) for each in files]
    assert found == [("board", "One: 3 panels"), ("rules", "1 alerts, 2 recording rules")]


def test_a_builder_that_is_absent_or_fails_exits_with_2(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, with the last thing that it said; one that works writes its file."""
    monkeypatch.setattr(dashboards, "FOLDER", tmp_path / "dashboards")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "dashboards").mkdir()
    with pytest.raises(ConfigError, match="this checkout has no no_such_builder"):
        dashboards.build("no_such_builder")
    (tmp_path / "bad_builder.py").write_text("raise SystemExit('the grafana sdk is missing')\n")
    with pytest.raises(ConfigError, match="bad_builder failed: the grafana sdk is missing"):
        dashboards.build("bad_builder")
    (tmp_path / "good_builder.py").write_text("open('dashboards/one.json', 'w').write('{}')\n")
    dashboards.build("good_builder")
    assert (tmp_path / "dashboards" / "one.json").exists()
