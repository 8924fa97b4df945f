"""Kernels under Triton's interpreter, in a process of its own: the variable that switches it on is read when triton is imported.

A test file names its interpreted cases `interpreted_*`, which pytest does not collect by itself, and runs them all at once by

    def test_under_the_interpreter() -> None:
        interpreter.run(__file__)

That process is a fork of one that has imported torch and triton: five seconds less a file. There this module is a plugin of pytest.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from inspect import getmembers
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 800.0
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def run(file: str, cases: str = "interpreted_*") -> None:
    """Runs the cases of `file`, functions of such names; fails with pytest's own output if one fails, is skipped, or if there is
    none. After LIMIT_S all its processes are killed, which raises TimeoutExpired."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = _forks().Process(target=_run, args=(file, cases, output.name))
        process.start()
        try:
            process.join(LIMIT_S)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(file, LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        said = output.read()
    assert process.exitcode == 0, said
    assert "skipped" not in "".join(said.strip().splitlines()[-1:]), said


@cache
def _forks() -> ForkServerContext:
    """Starts the process that is forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hypothesis", "pytest", "torch", "triton.runtime.interpreter", "kernels.selfcheck"])
    before = {name: os.environ.get(name) for name in INTERPRETED}
    os.environ.update(INTERPRETED)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return context


def _run(file: str, cases: str, output: str) -> None:
    """In the fork: the leader of a group, which is killed as a whole."""
    import pytest

    os.setsid()
    os.chdir(ROOT)
    written = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a second a file
    options = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-o", f"python_functions={cases}"]
    sys.exit(pytest.main([file, *options], plugins=[sys.modules[__name__]]))


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
