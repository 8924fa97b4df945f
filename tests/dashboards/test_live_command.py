"""`quartet dashboards --live`: one command, and the boards are on a page, drawn from a Prometheus that finds the groups itself."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.monitoring.scripted_exporters import ServedExporters, scripted_load, serve_exporters
from tests.support.repo_rules import ROOT
from tests.support.stack.serve_process import command_line, descendants, wait

pytestmark = [pytest.mark.cpu, pytest.mark.alone]
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not here: apt-get install prometheus"
)

GROUPS = 2
COMMAND = (sys.executable, "-m", "deploy.cli", "dashboards", "--live")


@pytest.fixture(scope="module")
def ready() -> Iterator[ServedExporters]:
    """Two groups that nobody asks anything, and their discovery endpoint."""
    with serve_exporters(scripted_load(groups=GROUPS, seconds=5.0).scripts) as ready:
        yield ready


def values(document: object, title: str) -> dict[str, float]:
    """A panel's figures by line, of a board's data."""
    assert isinstance(document, dict)
    panel = next(panel for panel in document["panels"] if panel["title"] == title)
    return {each["name"]: each["value"] for each in panel["values"]}


def fetched(url: str) -> object:
    with urllib.request.urlopen(url, timeout=20) as reply:
        return json.load(reply)


@needs_prometheus
def test_one_command_shows_the_boards(ready: ServedExporters) -> None:
    """It says where the page is; the page has the groups' figures; Ctrl-C ends page and Prometheus, with code 0."""
    command = [*COMMAND, "--url", ready.discovery, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("the boards: ").strip()
        assert url.startswith("http://127.0.0.1:")
        status = f"{url}quartet-status/json"
        took = wait(lambda: values(fetched(status), "Groups alive") == {"groups": GROUPS}, 30)
        took += wait(lambda: len(values(fetched(status), "Engines over time")) == GROUPS, 30)
        print(f"the groups are on the page {took:.1f} s after its address")
        assert values(fetched(status), "Engines over time") == dict.fromkeys(ready.exporters, 1)
        with urllib.request.urlopen(url, timeout=20) as reply:
            assert b"Quartet / Operator" in reply.read()
        below = descendants(process.pid)
        assert len(below) == 1, "the Prometheus"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 5)
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(url.rstrip("/").rpartition(":")[2]))) != 0
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]


@needs_prometheus
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not here: apt-get install util-linux")
def test_a_killed_command_leaves_no_prometheus(ready: ServedExporters) -> None:
    """SIGKILL gives it no time to end anything: Prometheus ends all the same."""
    process = subprocess.Popen([*COMMAND, "--url", ready.discovery, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    (below,) = descendants(process.pid)
    folder = Path(command_line(below).partition("--config.file=")[2].split()[0]).parent
    process.kill()
    process.wait(10)
    process.stdout.close()
    wait(lambda: not command_line(below), 10)
    shutil.rmtree(folder)  # what a killed process cannot remove


@needs_prometheus
def test_the_figures_once_as_json(ready: ServedExporters) -> None:
    """Every board with all of its panels, and then it ends."""
    command = [*COMMAND, "--json", "--url", ready.discovery]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    boards = json.loads(done.stdout)
    assert [board["board"] for board in boards] == ["quartet-operator", "quartet-latency", "quartet-status"]
    assert values(boards[0], "Running and waiting") == {"running": 0, "waiting": 0, "slots": 64 * GROUPS}


@pytest.mark.parametrize(
    ("extra", "path", "line"),
    [
        ((), "", "apt-get install prometheus"),
        (("--prometheus", "http://127.0.0.1:9", "--json"), None, "no Prometheus answers at http://127.0.0.1:9"),
    ],
)
def test_what_is_missing_is_one_line(ready: ServedExporters, extra: tuple[str, ...], path: str | None, line: str) -> None:
    """No binary, or no Prometheus: code 2, and a line that says what to do."""
    environ = {**os.environ, "PATH": os.environ["PATH"] if path is None else path}
    command = [*COMMAND, "--url", ready.discovery, *extra]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert line in done.stderr


def test_no_deployment_is_one_line() -> None:
    """Nobody at the address, nor where the list is by default: code 2, and the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    done = subprocess.run([*COMMAND, "--url", f"{url}/targets"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert url in done.stderr
