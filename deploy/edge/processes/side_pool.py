"""The edge's end of its side processes: each task has its own process."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from deploy.edge.processes.side_process import BEGUN
from engine.errors import Overloaded

ROOT = Path(__file__).resolve().parents[3]
TAKE_S = 60.0  # until a process has a task; starting takes seconds
ANSWER_S = 120.0  # for a task, more than `media.fetch_timeout_s` may be; the bound of CPU time ends no process that is stopped
_CHUNK = 1 << 20
_KEPT = ("LD_LIBRARY_PATH", "LANG", "LC_ALL")
_ENDED = "The side process has ended; please try again shortly."


class SidePool:
    """Its side process starts with the first task, or by `start`, and again after its end."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._lock = threading.RLock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, *task: bytes) -> bytes | None:
        """None if the task was killed at its limits. Blocks for at most TAKE_S + ANSWER_S.
        Overloaded: no process."""
        parent_end, child_end = socket.socketpair()
        with parent_end:
            with child_end:
                side_process = self._hand_over(child_end)
            try:
                parent_end.settimeout(TAKE_S)
                taken, descriptors, _, _ = socket.recv_fds(parent_end, 1, 1)
            except TimeoutError:
                self._end(side_process)
                taken = b""
            if not taken:
                raise Overloaded(_ENDED)
            try:
                answer = _answer(parent_end, task)
            except TimeoutError:
                signal.pidfd_send_signal(descriptors[0], signal.SIGKILL)
                return None
            finally:
                os.close(descriptors[0])
        if not answer.startswith(BEGUN):
            raise Overloaded(_ENDED)
        return answer.removeprefix(BEGUN) or None

    def start(self) -> socket.socket:
        """Returns its control socket. Starting takes seconds."""
        with self._lock:
            if self._control is None:
                self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with child_end:
                    # without huge pages half of a process' time is page faults
                    # nothing of this process' environment, which may hold secrets, but where libraries are
                    environ = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
                    environ |= {name: os.environ[name] for name in _KEPT if name in os.environ}
                    command = [sys.executable, "-m", self._command[0], str(child_end.fileno()), *self._command[1:]]
                    self._process = subprocess.Popen(  # by its folder it finds our packages
                        command, stdin=subprocess.DEVNULL, pass_fds=(child_end.fileno(),), cwd=ROOT, env=environ
                    )
            return self._control

    def close(self) -> None:
        with self._lock:
            if self._control is None or self._process is None:
                return
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._control = self._process = None

    def _end(self, side_process: subprocess.Popen[bytes] | None) -> None:
        with self._lock:
            if self._process is side_process:
                self.close()

    def _hand_over(self, connection: socket.socket) -> subprocess.Popen[bytes] | None:
        with self._lock:
            for _ in range(2):
                try:
                    socket.send_fds(self.start(), [b"t"], [connection.fileno()])
                except ConnectionError:
                    self.close()
                else:
                    return self._process
        raise Overloaded("The side process cannot be started.")


def _answer(connection: socket.socket, task: Sequence[bytes]) -> bytes:
    """A broken connection is no answer. TimeoutError after ANSWER_S."""
    ends = monotonic() + ANSWER_S
    pieces = list[bytes]()
    try:
        for part in task:
            connection.settimeout(_left(ends))
            connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        while not pieces or pieces[-1]:
            connection.settimeout(_left(ends))
            pieces.append(connection.recv(_CHUNK))
    except ConnectionError:
        return b""
    return b"".join(pieces)


def _left(ends: float) -> float:
    left = ends - monotonic()
    if left <= 0:
        raise TimeoutError
    return left
