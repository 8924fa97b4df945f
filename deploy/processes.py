"""The descendants of this process, by /proc."""

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    threading.Thread(target=_reap_orphans, name="reaper", daemon=True).start()


def _reap_orphans() -> None:
    """Reap children 0.2 s after their end, so that their starters can wait for them."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # there is no child
            ended = None
        time.sleep(0.2)
        if ended is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, os.WNOHANG)


def descendants(words: bytes = b"") -> list[int]:
    """Descendants whose arguments contain `words`."""
    own = os.getpid()
    parents = {pid: int(fields[1]) for pid in _pids() if (fields := _stat(pid))}
    below = {own}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(pid for pid in below - {own} if words in _read(pid, "cmdline"))


def started_with(words: bytes) -> list[int]:
    """This user's processes whose initial environment contains `words`."""
    return [pid for pid in _pids() if words in _read(pid, "environ")]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def is_ray_server(pid: int) -> bool:
    return Path(_read(pid, "cmdline").split(b"\0")[0].decode(errors="replace")).name in ("gcs_server", "raylet")


def lives(pid: int) -> bool:
    """Neither gone nor a zombie."""
    return _stat(pid)[:1] not in ([], ["Z"])


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat after the name: state, parent, ...; empty after the end."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
