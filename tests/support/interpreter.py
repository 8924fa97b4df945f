"""Kernels under Triton's interpreter, in a process of its own: the variable that switches it on is read when triton is imported.

A test file names its interpreted cases `interpreted_*`, which pytest does not collect by itself, and runs them all at once by

    def test_under_the_interpreter() -> None:
        interpreter.run(__file__)

In that process this module is a plugin of pytest.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from inspect import getmembers
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(file: str, timeout: float = 240, cases: str = "interpreted_*") -> None:
    """Runs the cases of `file`, functions of such names; fails with pytest's own output if one fails, is skipped, or if there is
    none. After `timeout` seconds all its processes are killed, which raises TimeoutExpired."""
    options = ["-q", "-p", "no:cacheprovider", "-p", __name__, "-o", f"python_functions={cases}"]
    command = [sys.executable, "-m", "pytest", file, *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, out + errors
    assert "skipped" not in "".join(out.strip().splitlines()[-1:]), out


def pytest_collection_finish() -> None:
    """Has Triton look for its builtins once a namespace. It does so at each launch and each call of a device function, through all
    members: half of the time of a small kernel."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        remembering = ModuleType("inspect")
        vars(remembering).update(vars(interpreter.inspect), getmembers=_builtins)
        interpreter.inspect = remembering  # type: ignore[attr-defined]  # its only getmembers is that search


def _builtins(namespace: Any) -> list[tuple[str, Any]]:
    """Members that have been Triton's builtins at the first look, as they are now: replaced while a kernel runs."""
    return [(name, getattr(namespace, name)) for name in _builtin_names(namespace)]


@cache
def _builtin_names(namespace: Any) -> tuple[str, ...]:
    from triton.language.core import is_builtin

    return tuple(name for name, member in getmembers(namespace) if is_builtin(member))
