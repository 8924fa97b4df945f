"""A group's child processes: spawn, boot messages, kill, and the exit that caused the end.

No preexec_fn, which would run Python in a threaded process's fork, and no new session, so that Ray's kill of a process group
reaches them. PR_SET_PDEATHSIG fires when the spawning *thread* ends.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.lifeline import BootArgs, BootMessage, BootSocket, Failed

ROOT = Path(__file__).resolve().parents[1]
KILL_WAIT_S = 30.0
_MODULES = ("engine.rank.worker", "engine.core.loop")

# by default glibc returns large blocks at every free and faults them in again: an attention op took 54 ms, 10 ms with these
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "1073741824"}

Command = Callable[[BootArgs], Sequence[str]]


class ExitStatus(NamedTuple):
    """`code` as in Popen (negative: signal; None: it runs)."""

    name: str
    code: int | None
    last_error: Failed | None = None

    @property
    def killed(self) -> bool:
        return self.code is not None and self.code < 0

    def __str__(self) -> str:
        if self.killed:
            number = -(self.code or 0)
            names = {entry.value: entry.name for entry in signal.Signals}  # a real-time signal has none
            return f"{self.name} was killed by {names.get(number, f'signal {number}')}"
        if self.last_error is not None:
            return f"{self.name} failed: {self.last_error.error}"
        return f"{self.name} ended with exit code {self.code}"


def root_cause(exits: Iterable[ExitStatus | None]) -> ExitStatus | None:
    """An exit by signal, else an error (user errors first), else any."""
    return min(filter(None, exits), key=_less_telling, default=None)


def _less_telling(exit_status: ExitStatus) -> tuple[bool, ...]:
    error = exit_status.last_error
    return not exit_status.killed, error is None, error is not None and not error.user, not exit_status.code


class Child:
    """Only `kill` and `wait` are thread-safe."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], lifeline: socket.socket) -> None:
        self.name = name
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.lifeline = BootSocket(lifeline)
        self._last_error: Failed | None = None

    def send(self, message: BootMessage) -> None:
        """Ignores a child that is gone: its pidfd reports the end."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.lifeline.send(message)

    def receive(self, timeout_s: float = 1.0) -> BootMessage | None:
        """The next message, within `timeout_s` of its first byte; None at the end of the lifeline."""
        self.lifeline.sock.settimeout(timeout_s)
        message = self.lifeline.receive()
        if isinstance(message, Failed):
            self._last_error = message
        return message

    def exit_status(self) -> ExitStatus | None:
        code = self.process.poll()
        if self.lifeline.sock.fileno() >= 0:  # messages that it may have sent before it ended, up to an error
            with contextlib.suppress(BlockingIOError):
                while self._last_error is None and self.receive(timeout_s=0.0) is not None:
                    continue
        if code is None and self._last_error is None:
            return None
        return ExitStatus(self.name, code, self._last_error)

    def wait(self, timeout_s: float) -> bool:
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Call it once, after the child's end."""
        self.lifeline.sock.close()
        os.close(self.pidfd)


def child_name(index: int, tp: int) -> str:
    if index == tp:
        return "the core"
    return f"rank {index}"


def child_command(args: BootArgs) -> list[str]:
    return [sys.executable, "-m", _MODULES[args.index == args.tp], msgspec.json.encode(args).decode()]


def spawn(args: BootArgs, lifeline: socket.socket, descriptors: Iterable[int], device: str, command: Command) -> Child:
    """The child ends with the calling thread."""
    process = subprocess.Popen(
        command(args),
        stdin=subprocess.DEVNULL,
        pass_fds=tuple(descriptors),
        cwd=ROOT,
        env=environment(dict(os.environ), device),
    )
    return Child(child_name(args.index, args.tp), process, lifeline)


def environment(inherited: dict[str, str], device: str) -> dict[str, str]:
    usual = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if device == "cpu":
        cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **_KEEP_MEMORY}
    else:
        cpu = {}
    kept = {name: value for name, value in inherited.items() if name != "PYTHONBREAKPOINT"}  # Ray's would wait for a debugger
    return {**usual, **kept, **cpu, "PYTHONPATH": python_path(inherited)}


def python_path(inherited: Mapping[str, str]) -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])


def kill(children: Sequence[Child]) -> list[str]:
    """SIGKILL all and wait at most KILL_WAIT_S; returns those still running."""
    for child in children:
        child.process.kill()
    deadline = time.monotonic() + KILL_WAIT_S
    still_running = [child.name for child in children if not child.wait(deadline - time.monotonic())]
    for child in children:
        child.close()
    return still_running
