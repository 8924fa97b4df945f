"""The processes below this one, by /proc: who descends from it, what runs in each, and their end."""

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on an orphan below this process becomes its child."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(ancestor: int) -> list[int]:
    """Process ids below `ancestor`."""
    parents = {pid: parent for pid, parent in map(_parent, _pids()) if parent}
    below = {ancestor}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        below |= more
        grown = bool(more)
    return sorted(below - {ancestor})


def is_ray_server(command: bytes) -> bool:
    """GCS or raylet, by the program that runs."""
    return Path(command.split(b"\0")[0].decode(errors="replace")).name in ("gcs_server", "raylet")


def lives(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _parent(pid: int) -> tuple[int, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return pid, 0  # it has just ended
    return pid, int(fields[1])


def command_line(pid: int) -> bytes:
    """Its arguments, each ended by a zero byte; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def socket_files(pids: Iterable[int]) -> set[Path]:
    """Where the Unix sockets of these processes lie in the file system, of those that do."""
    held = {inode for pid in pids for inode in _sockets(pid)}
    rows = (line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {Path(row[7]) for row in rows if len(row) == 8 and row[6] in held and row[7].startswith("/")}


def _sockets(pid: int) -> list[str]:
    """Their inodes; none of a process that has ended."""
    try:
        targets = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return [target[8:-1] for target in targets if target.startswith("socket:[")]


def reap() -> None:
    """Wait for every child."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
