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
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
    """Has Triton replace the language's functions once. It does so anew at each launch and at each call of a device function."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        from tests.support import interpreter_types

        interpreter_types.share()
        patch = interpreter._patch_lang

        def patch_once(fn: Any) -> SimpleNamespace:
            if not _is_patched(fn):
                patch(fn)
            return SimpleNamespace(restore=lambda: None)

        interpreter._patch_lang = patch_once  # type: ignore[attr-defined]


def _is_patched(fn: Any) -> bool:
    """Whether all that a function knows as Triton's language is the interpreter's now."""
    from triton.language.core import is_builtin

    return not any(is_builtin(language.load) for language in _languages(fn))


@cache
def _languages(fn: Any) -> list[ModuleType]:
    from triton import language

    return [value for value in fn.__globals__.values() if value is language or value is language.core]
