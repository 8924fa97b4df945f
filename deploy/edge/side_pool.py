"""The edge's end of its side processes: a task goes to a process of its own, and an answer comes, or the process is gone."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from deploy.edge.side_process import BEGUN
from engine.errors import Overloaded

ROOT = Path(__file__).resolve().parents[2]
_CHUNK = 1 << 20


class SidePool:
    """Its side process, a module and its arguments, starts with the first task, or by `start`, and again where it has ended."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._lock = threading.RLock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, *task: bytes) -> bytes | None:
        """What a process answers to it; None: it was ended at its limits. Blocks. Overloaded: there is no process."""
        parent_end, child_end = socket.socketpair()
        with parent_end:
            with child_end:
                self._hand_over(child_end)
            try:
                for part in task:
                    parent_end.sendall(part)
                parent_end.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: parent_end.recv(_CHUNK), b""))
            except ConnectionError:
                answer = b""
        if not answer.startswith(BEGUN):
            raise Overloaded("The side process has ended; please try again shortly.")
        return answer.removeprefix(BEGUN) or None

    def start(self) -> socket.socket:
        """Start the process, which takes seconds, unless it runs; return the socket that controls it."""
        with self._lock:
            if self._control is None:
                self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with child_end:
                    # without huge pages half of a process' time is page faults
                    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
                    command = [sys.executable, "-m", self._command[0], str(child_end.fileno()), *self._command[1:]]
                    self._process = subprocess.Popen(  # by its folder it finds our packages
                        command, stdin=subprocess.DEVNULL, pass_fds=(child_end.fileno(),), cwd=ROOT, env=os.environ | settings
                    )
            return self._control

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._control is None or self._process is None:
                return
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._control = self._process = None

    def _hand_over(self, connection: socket.socket) -> None:
        with self._lock:
            for _ in range(2):
                try:
                    socket.send_fds(self.start(), [b"t"], [connection.fileno()])
                except ConnectionError:
                    self.close()
                else:
                    return
        raise Overloaded("The side process cannot be started.")
