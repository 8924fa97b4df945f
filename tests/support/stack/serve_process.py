"""The whole stack as a user starts it: `python -m deploy.cli serve` as a subprocess, and what its process tree holds."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.repo_rules import ROOT

READY = "quartet: ready."


class Stack:
    """A serving CLI on a free port: `cli` is its module. `lines` is what it has printed so far."""

    def __init__(
        self,
        folder: Path,
        *,
        args: dict[str, Any] | None = None,
        deployment: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        cli: str = "deploy.cli",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = yaml.safe_load((ROOT / "deploy" / "nano.yaml").read_text())
        config["applications"][0]["args"].update(args or {})
        config["applications"][0]["deployments"][0].update(deployment or {})
        self.config = folder / "stack.yaml"
        self.config.write_text(yaml.safe_dump(config))
        self.lines: list[str] = []
        self._cli = cli
        self._environ = {**os.environ, **(environ or {})}
        self.tree: set[int] = set()

    def start(self, *extra: str, timeout_s: float = 120.0, until: str = READY) -> float:
        """Seconds until the line that has `until`."""
        begun = time.monotonic()
        command = [sys.executable, "-m", self._cli, "serve", str(self.config), "--port", str(self.port), *extra]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=self._environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait(lambda: self.process.poll() is not None or any(until in line for line in self.lines), timeout_s, self.said)
        assert self.process.poll() is None, self.said()
        return time.monotonic() - begun

    def chat(self, body: dict[str, Any], timeout_s: float = 60) -> httpx.Response:
        """The reply to the body of a chat."""
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout_s)

    @property
    def folder(self) -> Path:
        """The private one of its launcher, while Ray runs."""
        return Path(self._raylet(r"/tmp/q-\w+")[0])

    def _raylet(self, words: str) -> re.Match[str]:
        """`words` in the command line of the raylet, whose forks have the same until they have one of their own."""
        found = re.search(words, command_line(self.find("raylet/raylet")[0]))
        assert found is not None
        return found

    def redeploy(self, **args: Any) -> None:
        """Hand the running Serve this config with other `args`, as `serve deploy` would."""
        config = yaml.safe_load(self.config.read_text())
        config["applications"][0]["args"].update(args)
        changed = self.config.with_name("changed.yaml")
        changed.write_text(yaml.safe_dump(config))
        raylet, gcs = self.find("raylet/raylet")[0], self._raylet(r"--gcs-address=(\S+)")[1]
        environ = [entry.partition("=")[::2] for entry in Path(f"/proc/{raylet}/environ").read_text().split("\0") if entry]
        command = [sys.executable, "-m", "tests.support.stack.redeploy", gcs, str(changed)]
        subprocess.run(command, cwd=ROOT, env=dict(environ), check=True, timeout=60)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.lines.extend(output)

    def said(self) -> str:
        return "".join(self.lines)

    def grow(self) -> set[int]:
        """Every process below the CLI, now and at earlier calls."""
        self.tree |= descendants(self.process.pid)
        return self.tree

    def find(self, words: str) -> list[int]:
        """Living processes below the CLI whose command line has `words`."""
        return [pid for pid in sorted(descendants(self.process.pid)) if words in command_line(pid)]

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal, wait, return the exit code."""
        self.grow()
        self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def clean_up(self) -> None:
        """Whatever a failed test left."""
        if self.process.poll() is None:
            self.grow()
            self.process.kill()
            self.process.wait(10)
        for pid in filter(command_line, self.tree):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def wait(condition: Callable[[], bool], timeout_s: float, why: Callable[[], str] = lambda: "") -> float:
    """Seconds that `condition` took to become true; AssertionError with `why` when it does not."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < timeout_s, f"not within {timeout_s} s\n{why()}"
        time.sleep(0.02)
    return time.monotonic() - begun


def serves_again(stack: Stack, body: dict[str, Any], headers: dict[str, str] | None = None) -> float:
    """Seconds until a new chat is answered. Until then others are refused with Retry-After: the one answered has not waited."""
    took = []

    def answered() -> bool:
        begun = time.monotonic()
        reply = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=30)
        took.append(time.monotonic() - begun)
        assert reply.status_code == 200 or (reply.status_code, reply.headers["retry-after"]) == (503, "5"), reply.text
        return reply.status_code == 200

    back = wait(answered, 90, stack.said)
    print(f"\n{len(took)} requests in {back:.1f} s, the longest took {max(took):.1f} s")
    assert took[-1] < back / 2, took
    return back


def ready(stack: Stack) -> dict[str, Any]:
    return dict(httpx.get(f"{stack.url}/health/ready").raise_for_status().json())


def figures(stack: Stack) -> dict[str, float]:
    text = httpx.get(ready(stack)["metrics"]).text
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)}


def memory_mb(stack: Stack) -> float:
    """What the replica's process holds."""
    (pid,) = stack.find("ServeReplica")
    return process_mb(pid, "VmRSS")


def process_mb(pid: int | str, figure: str) -> float:
    """A figure of the kernel's about a process's memory, in MiB."""
    found = re.search(rf"{figure}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, figure
    return int(found[1]) / 1024


def build_info(stack: Stack) -> set[str]:
    return {name for name in figures(stack) if "build_info" in name}


def open_streams(stack: Stack, body: dict[str, Any], count: int = 8) -> "list[Reader]":
    """Streams of which each has begun and none is near its end."""
    readers = [Reader(stack.url, body) for _ in range(count)]
    wait(lambda: all(reader.text.count("data:") > 3 for reader in readers), 90, stack.said)
    assert not any(reader.ended for reader in readers)
    return readers


_given: set[int] = set()


def free_port() -> int:
    """A port that is free, and stays so while a server boots: the kernel chooses none of these for connections, nor does another
    call in this process."""
    for port in random.SystemRandom().sample(sorted({*range(30_000, 32_768)} - _given), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.add(port)
            return port
    raise AssertionError("100 ports are taken")


def is_free(port: int) -> bool:
    """Whether nobody listens there. A probe of the kernel's range may get that very port, and then answers itself."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) != 0 or probe.getsockname() == probe.getpeername()


def folders() -> set[Path]:
    """What launchers that have ended have left of their private folders: other stacks of this machine keep theirs."""
    return {folder for folder in Path("/tmp").glob("q-*") if not _owner_lives(folder)}


def _owner_lives(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return bool(command_line(int((folder / "launcher.pid").read_text() or "0")))
    return False


def descendants(ancestor: int) -> set[int]:
    parents = dict(filter(None, map(_parent, _pids())))
    below, grown = {ancestor}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    return below - {ancestor}


def command_line(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _parent(pid: int) -> tuple[int, int] | None:
    try:
        return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def listeners(pids: Sequence[int]) -> list[tuple[str, int, str]]:
    """(address, port, command) of every TCP socket that these processes listen on; the address as the kernel prints it."""
    owners = {inode: pid for pid in pids for inode in _inodes(pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A" and fields[9] in owners:
                found.append((address, int(port, 16), command_line(owners[fields[9]])[:40]))
    return found


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def _inodes(pid: int) -> list[str]:
    out = []
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                target = str(fd.readlink())
                out += [target[8:-1]] if target.startswith("socket:[") else []
    return out


class Reader:
    """One stream read in a thread: its text, the moment it ended, and how (None: properly)."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.text = ""
        self.error: Exception | None = None
        self.status = 0
        self.ended: float | None = None
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=90) as reply:
                self.status = reply.status_code
                for part in reply.iter_text():
                    self.text += part
        except httpx.HTTPError as error:
            self.error = error
        self.ended = time.monotonic()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "a stream is still open"
