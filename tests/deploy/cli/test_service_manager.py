"""What `quartet serve` tells systemd: a datagram a state, to a file's socket or to an abstract one, and nothing without one."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cli import serve_command
from deploy.cli.main import main
from deploy.cli.service_manager import READY, notify
from deploy.launcher import Launch

pytestmark = pytest.mark.cpu


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket in systemd's place, whose name is in the environment."""
    name = f"@quartet-{os.getpid()}-{time.monotonic_ns()}" if request.param == "abstract" else str(tmp_path / "notify")
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    channel.bind(name.replace("@", "\0", 1))
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    with channel:
        yield channel
    Path(name).unlink(missing_ok=True)


def received(channel: socket.socket) -> list[str]:
    """All states that have come so far."""
    states: list[str] = []
    while True:
        try:
            states += channel.recv(1 << 16).decode().split("\n")
        except BlockingIOError:
            return states


def test_states_come_in_one_datagram(manager: socket.socket) -> None:
    """Every state of a call is in it."""
    notify(READY, "STATUS=serving")
    assert received(manager) == ["READY=1", "STATUS=serving"]
    assert received(manager) == []


def test_without_a_manager_nothing_is_sent(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by hand there is no NOTIFY_SOCKET, or an empty one."""
    monkeypatch.setenv("NOTIFY_SOCKET", "")
    notify(READY)
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify(READY)
    assert received(manager) == []


def test_a_manager_that_is_gone_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Serving goes on, and a line says what systemd was not told."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify(READY)
    assert capsys.readouterr().err == "quartet: systemd was not told READY=1: No such file or directory\n"


class _QuickLaunch(Launch):
    """Starts nothing, is ready at once, and gets SIGTERM when it is watched."""

    def check(self) -> None:  # type: ignore[override]
        pass

    def start(self) -> None:
        self.drains = True

    def watch(self) -> None:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    def drain(self, bound_s: float) -> None:
        pass

    def end(self) -> bool:
        self.folder.rmdir()
        return True


def test_serve_says_when_it_serves_and_when_it_stops(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """READY comes after the start, once, with the line that the terminal has; STOPPING after the signal. A start that breaks says
    neither."""
    monkeypatch.setattr(serve_command, "Launch", _QuickLaunch)
    monkeypatch.setattr(serve_command, "check_drafter", lambda settings: None)
    monkeypatch.setattr(serve_command, "check_files", lambda config, template: None)
    assert main(["serve", "deploy/nano.yaml"]) == 0
    states = [state.partition(".")[0] for state in received(manager)]
    assert states == ["STATUS=ready", "READY=1", "STOPPING=1", "STATUS=no new requests; open ones may finish"]
    monkeypatch.setattr(_QuickLaunch, "start", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["serve", "deploy/nano.yaml"]) == 0
    assert READY not in received(manager)
