"""Python processes forked from one that has imported torch: the rank of a test starts in a tenth of a second, not in three.

`Popen` is subprocess's where the command is this Python's: the process is a child of ours, has the arguments, environment and
descriptors that it was given, and ends as it would by itself. What forks it has no thread. It ends when we do.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import F_DUPFD, fcntl
from functools import cache
from pathlib import Path
from typing import Any

from cluster.children import environment

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = ("engine.rank.worker", "engine.core.loop")
FIRST_FREE = 512  # above any descriptor that a test names
_PR_SET_CHILD_SUBREAPER = 36


class Popen(subprocess.Popen[bytes]):
    """`subprocess.Popen` of `[sys.executable, "-m", module, ...]` or `[sys.executable, "-c", script, ...]`, for the CPU."""

    def _execute_child(self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: bool, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, _, stdin, *others = rest
        if args[0] != sys.executable:
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]  # not in typeshed
            return
        standard = (stdin, others[2], others[4])
        numbers = {number: number if fd == -1 else fd for number, fd in enumerate(standard)} | {fd: fd for fd in pass_fds}
        request = {"args": args[1:], "cwd": str(cwd), "env": env, "numbers": list(numbers)}
        self.pid = _fork(request, list(numbers.values()))
        self._child_created = True
        self._close_pipe_fds(*rest[6:12])  # type: ignore[attr-defined]  # not in typeshed


@contextmanager
def forked_by(module: Any) -> Iterator[None]:
    """Has `module` start its processes like that."""
    _server()
    module.subprocess = type(subprocess)("subprocess")
    vars(module.subprocess).update(vars(subprocess), Popen=Popen)
    try:
        yield
    finally:
        module.subprocess = subprocess


def _fork(request: dict[str, Any], descriptors: list[int]) -> int:
    """The id of a process that is our child: its own parent ends, and meanwhile we are next of kin."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)  # torch may have to be imported first
    libc = ctypes.CDLL(None)
    with ours, theirs:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(_server(), [json.dumps(request).encode()], [theirs.fileno(), *descriptors])
            theirs.close()
            return int(ours.recv(32))
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


@cache
def _server() -> socket.socket:
    """Starts the process that is forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.support.forked", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(dict(os.environ), "cpu"), pass_fds=[theirs.fileno()])
    atexit.register(process.wait)
    atexit.register(ours.close)  # before that
    return ours


def serve(requests: socket.socket) -> None:
    """Fork for each request until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # no page is copied for a count of references in passing
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 64)
        if not data:
            return
        if (parent := os.fork()) == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.0005)
            requests.detach()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            become(json.loads(data), descriptors)
            return
        os.waitpid(parent, 0)
        for fd in descriptors:
            os.close(fd)


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """In the fork: run what was asked for, as its main module."""
    moved = [fcntl(fd, F_DUPFD, FIRST_FREE) for fd in descriptors]
    os.closerange(3, FIRST_FREE)
    for fd, number in zip(moved[1:], request["numbers"], strict=True):
        os.dup2(fd, number)
    os.write(moved[0], str(os.getpid()).encode())
    os.closerange(FIRST_FREE, moved[-1] + 1)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    option, code, *arguments = request["args"]
    sys.argv = [option, *arguments]
    if option == "-m":
        importlib.import_module(code).main()
    else:
        exec(code, {"__name__": "__main__"})


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
