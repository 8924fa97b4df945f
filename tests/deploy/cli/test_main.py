"""The command line short of serving: exit codes and single lines."""

import contextlib
import errno
import importlib.metadata
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest
import yaml

from dashboards.discovery import DiscoveryServer, ReplicaRegistry
from dashboards.page_server import Page
from deploy import environment, launcher
from deploy.cli import serve_command
from deploy.cli.main import main
from deploy.settings import Settings
from engine.errors import ConfigError, EngineDead
from tests.support.loopback import stop
from tests.support.repo_rules import ROOT
from tests.support.stack.serve_process import free_port

pytestmark = pytest.mark.pure

NANO = ROOT / "deploy" / "nano.yaml"


def test_a_missing_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """For every command that takes one."""
    for command in ("check-config", "serve"):
        assert main([command, "/no/such.yaml"]) == 2
        assert capsys.readouterr().err == "quartet: [Errno 2] No such file or directory: '/no/such.yaml'\n"


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_a_drain_of_no_seconds_is_one_line(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    """It would cut what is open at once. None at all may be asked for."""
    assert [main(["serve", "/no/such.yaml", "--drain", drain]) for drain in (seconds, "0")] == [2, 2]
    assert capsys.readouterr().err.splitlines()[0] == "quartet: --drain: expected seconds, 0 or more"


def test_a_taken_port_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Said before Ray starts; nothing is left in /tmp."""
    monkeypatch.setattr(launcher, "_TMP", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(NANO), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taken", [True, False], ids=["a taken port", "another machine's address"])
def test_where_no_exporter_can_listen_is_one_line(taken: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before Ray starts, with the settings' names."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        host, port = ("127.0.0.1", other.getsockname()[1]) if taken else ("192.0.2.1", 0)
        said = refused(tmp_path, capsys, metrics={"host": host, "port": port})
    why = "Address already in use" if taken else "Cannot assign requested address"
    assert said == f"quartet: cannot listen on {host}:{port}: {why} (metrics.host and metrics.port choose another)\n"


def test_a_folder_of_logs_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor made: said before Ray starts. One that can be made is, and is left empty."""
    (tmp_path / "file").touch()
    for folder, why in ((tmp_path / "file" / "logs", "Not a directory"), (Path("/proc/logs"), "No such file or directory")):
        said = refused(tmp_path, capsys, logs={"folder": str(folder)})
        assert said == f"quartet: logs.folder: {folder} cannot be written: {why}\n"
    launcher.check_log_folder(str(tmp_path / "new" / "logs"))
    assert list((tmp_path / "new" / "logs").iterdir()) == []


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], **args: object) -> str:
    """What `serve` says of nano.yaml with such args, and a free port."""
    config = yaml.safe_load(NANO.read_text())
    config["applications"][0]["args"] |= args | {"attention": "triton"}  # so that it is refused in any case
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["serve", str(path), "--port", str(free_port())]) == 2
    return capsys.readouterr().err


def test_no_room_in_tmp_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where nothing can be written."""

    def fails(path: str) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system", path)

    usage = types.SimpleNamespace(free=3 << 20)
    full, unwritten = "/tmp has 3 MiB free: Ray's session needs", "[Errno 30] Read-only file system: '/tmp'"
    for found, why in ((lambda path: usage, full), (fails, unwritten)):
        monkeypatch.setattr(shutil, "disk_usage", found)
        assert main(["serve", str(NANO)]) == 2
        assert capsys.readouterr().err.startswith(f"quartet: {why}")


def test_the_distribution_named_kernels_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its package would stand in the place of ours."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    assert main(["serve", str(NANO)]) == 2
    assert "pip uninstall kernels" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("planted", [False, True])
def test_both_signals_interrupt_and_the_handlers_come_back(
    number: signal.Signals, planted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Inside the block they raise, after it they are what they were; also while Ray starts, which has a handler of its own for
    SIGTERM. Planted: were that one there, the command would end with its code."""
    import ray
    from ray._private import utils

    own = utils.set_sigterm_handler

    def starts(**_options: object) -> None:
        (own if planted else utils.set_sigterm_handler)(lambda number, frame: sys.exit(number))
        signal.raise_signal(number)

    monkeypatch.setattr(ray, "init", starts)
    monkeypatch.setattr(utils, "set_sigterm_handler", own)
    before = signal.getsignal(number)
    launch = launcher.Launch({"applications": []}, Settings(model="nano:31b"), print, folder=tmp_path)
    ends = SystemExit if planted and number == signal.SIGTERM else KeyboardInterrupt
    with pytest.raises(ends), launcher.handling(launcher.interrupt):
        launch._init_ray()
    assert signal.getsignal(number) is before
    ended = []
    monkeypatch.setattr(launcher, "_shut_ray", lambda: ended.append(True))
    assert not launch.end()  # Ray that is half there is killed
    assert ended == []


def test_a_signal_that_is_dropped_while_ray_starts_comes_behind_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The handler is ours again by then, and the alarm is still set."""
    import ray

    def starts(**_options: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    monkeypatch.setattr(ray, "init", starts)
    monkeypatch.setattr("ray._private.utils.set_sigterm_handler", None)  # comes back behind the test
    launch = launcher.Launch({"applications": []}, Settings(model="nano:31b"), print, folder=tmp_path)

    def start() -> None:
        launch._init_ray()
        assert signal.getsignal(signal.SIGTERM) is launcher.interrupt
        time.sleep(1.5 * launcher._CUT_S)

    with pytest.raises(KeyboardInterrupt), launcher.handling(launcher.interrupt):
        start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_dropped_comes_again(number: signal.Signals) -> None:
    """Python only prints what is raised in a finalizer. Planted: a handler that raises once is not heard of any more."""

    def heard(handler: Any) -> bool:
        with launcher.handling(handler), contextlib.suppress(KeyboardInterrupt):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(number)
            time.sleep(1.5 * launcher._CUT_S)
            return False
        return True

    assert (heard(launcher.interrupt), heard(signal.default_int_handler)) == (True, False)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class FullDisk(io.StringIO):
    def write(self, text: str) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("out", [io.StringIO, FullDisk, lambda: None])
def test_the_end_is_not_broken_off(monkeypatch: pytest.MonkeyPatch, out: Callable[[], io.StringIO | None]) -> None:
    """A first signal ends the start, a second one the drain; no more of them stop what takes the processes down, nor does an output
    that cannot be written, or was closed (`>&-`)."""
    passed = []

    class Signalled(launcher.Launch):
        def _signal(self, name: str) -> None:
            signal.raise_signal(signal.SIGINT)
            passed.append(name)

        def check(self) -> NoReturn:
            self._signal("check")
            raise AssertionError

        def drain(self, bound_s: float) -> None:
            self._signal("drain")

        def cut(self) -> None:
            self._signal("cut")

        def end(self) -> bool:
            self._signal("end")
            return super().end()

    monkeypatch.setattr(serve_command, "Launch", Signalled)
    monkeypatch.setattr(sys, "stdout", out())
    assert main(["serve", str(NANO)]) == 0
    assert passed == ["cut", "end"]
    sys.stdout.flush()
    if out() is None:
        sys.stdout.close()


def test_of_a_traceback_the_error_is_said() -> None:
    """Of what Ray puts around a task's failure, what names it, to its end; of a message without any, its last line."""
    ray = "ray::Manager.ready()\n  File x\n    await it\nRuntimeError: HAProxy crashed: [NOTICE] 2.8\n[ALERT] no port\n\n"
    assert launcher.last_error(ray) == "RuntimeError: HAProxy crashed: [NOTICE] 2.8 [ALERT] no port"
    assert (launcher.last_error("one\ntwo\n"), launcher.last_error("")) == ("two", "no reason given")


def test_a_dead_launchers_folder_is_swept_and_a_living_ones_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the process id that it wrote down; so is what was started with its files in the environment, but nothing of a folder whose
    name begins alike."""
    monkeypatch.setattr(launcher, "Path", lambda path: tmp_path if path == "/tmp" else Path(path))
    started = {}
    for name, pid in (("q-dead", 2**22 + 1), ("q-dead-not", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "launcher.pid").write_text(str(pid))
        environ = dict(os.environ)
        environment.prepare(environ, tmp_path / name, {})
        started[name] = subprocess.Popen(["sleep", "60"], env=environ)
    (tmp_path / "q-someone-elses").mkdir()
    (tmp_path / "q-pipe").mkdir()
    os.mkfifo(tmp_path / "q-pipe" / "launcher.pid")  # whoever reads it without looking waits for ever
    try:
        launcher._sweep()
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["q-dead-not", "q-pipe", "q-someone-elses"]
        assert started["q-dead"].wait(5) == -signal.SIGKILL
        assert started["q-dead-not"].poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def test_without_a_look_a_pipe_hangs(tmp_path: Path) -> None:
    """The planted fault of the test before: nobody writes, and the read does not end."""
    os.mkfifo(tmp_path / "pipe")
    reading = threading.Thread(target=(tmp_path / "pipe").read_text)
    reading.start()
    reading.join(0.3)
    assert reading.is_alive()
    (tmp_path / "pipe").write_text("")
    reading.join(5)
    assert not reading.is_alive()


@pytest.mark.parametrize("said", ["The current node timed out.\nTraceback (most recent call last):\nError: it did", ""])
def test_ray_that_does_not_start_is_one_line(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray raises of a time-out is a plain Exception; here it is an EngineDead of one line."""
    import ray

    def fails(**_: object) -> NoReturn:
        raise Exception(said)  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "init", fails)
    launch = launcher.Launch({"applications": []}, Settings(model="nano:31b"), print, tmp_path)
    with pytest.raises(EngineDead, match=r"^Ray could not start: .+$") as raised:
        launch._init_ray()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "url"), [("::1", "http://[::1]:8123"), ("10.0.0.7", "http://10.0.0.7:8123"), ("0.0.0.0", "http://127.0.0.1:8123")]
)
def test_a_stack_is_found_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, url: str) -> None:
    """An address of IPv6 stands in brackets. Planted: without them the port is read as a part of it."""
    config = {"http_options": {"host": host, "port": 8123}, "applications": []}
    launch = launcher.Launch(config, Settings(model="nano:31b"), lambda line: None, folder=tmp_path)
    assert launch.url == url
    assert urlsplit(launch.url).port == 8123
    monkeypatch.setattr(launcher, "url_host", lambda host: host)
    if ":" in host:
        with pytest.raises(ValueError, match="Port could not be cast"):
            urlsplit(launch.url).port  # noqa: B018 - it raises


@pytest.mark.parametrize("host", ["127.0.0.2", "10.0.0.7", "::1"])
def test_an_address_where_no_replica_is_found_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Behind HAProxy, which looks for replicas on loopback while they listen at the API's host: it would start, and answer nobody.
    Planted: with Serve's own proxy there is nothing to refuse."""
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    with pytest.raises(ConfigError, match=re.escape(f"http_options.host: {host}: ")):
        launcher.check_host(host)
    for found in ("127.0.0.1", "localhost", "0.0.0.0", "::"):
        launcher.check_host(found)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    launcher.check_host(host)


def test_ray_that_ends_at_the_same_signal_is_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A signal to all processes leaves nothing to drain, and nothing to say of it."""
    from ray import serve
    from ray.exceptions import RayError

    def ends() -> NoReturn:
        raise RayError("RPC error: CANCELLED")

    monkeypatch.setattr(serve, "status", ends)
    launch = launcher.Launch({"applications": []}, Settings(model="nano:31b"), print, tmp_path, drains=True, _servers=[os.getpid()])
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    launch.drain(5.0)
    assert printed == []


def test_the_ingress_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the environment names, for downloads, knows no loopback of ours. Planted: what urllib makes by itself asks it."""
    server = DiscoveryServer(ReplicaRegistry(), "127.0.0.1", 0)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    try:
        assert launcher._answers(server.url)
        with pytest.raises(urllib.error.URLError, match="Connection refused"):
            urllib.request.build_opener().open(server.url, timeout=5)
    finally:
        stop(server)


def test_an_ingress_that_never_answers_is_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher says so after its bound, and waits no longer."""
    monkeypatch.setattr(launcher, "ROUTED_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it accepts, and says nothing
        config = {"http_options": {"host": "127.0.0.1", "port": taken.getsockname()[1]}, "applications": []}
        launch = launcher.Launch(config, Settings(model="nano:31b"), lambda line: None, folder=tmp_path)
        with pytest.raises(EngineDead, match="did not answer within"):
            launch._wait_answering()


def test_readiness_starts_no_replica_and_needs_no_host_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ingress itself is asked: a replica would have to start for /health/ready, and could refuse 127.0.0.1 by limits.hosts."""
    server = DiscoveryServer(ReplicaRegistry(), "127.0.0.1", 0)  # 404 to /health/ready
    server.pages["/-/healthz"] = Page("text/plain", lambda: b"success")
    monkeypatch.setattr(launcher, "_all_routed", lambda: True)
    monkeypatch.setattr(launcher, "ROUTED_S", 0.2)
    config = {"http_options": {"port": server.server_port}, "applications": []}
    try:
        launcher.Launch(config, Settings(model="nano:31b"), lambda line: None, folder=tmp_path)._wait_answering()
    finally:
        stop(server)


def test_the_end_of_rays_servers_is_an_end(tmp_path: Path) -> None:
    """Whoever started the launcher hears of it."""
    with subprocess.Popen(["true"]) as server:
        pass
    launch = launcher.Launch({"applications": []}, Settings(model="nano:31b"), print, tmp_path, _servers=[os.getpid(), server.pid])
    with pytest.raises(EngineDead, match="a server of Ray has ended"):
        launch.watch()
