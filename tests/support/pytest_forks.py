"""pytest in a copy of the tree, forked from a process that has imported what tests import: a run costs what its tests cost."""

import multiprocessing
import os
import signal
import sys
import tempfile
from contextlib import suppress
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = (
    "pytest", "hypothesis", "numpy", "msgspec", "torch", "triton", "PIL.Image", "av", "fastapi",
    "starlette", "httpx", "safetensors.torch", "tokenizers", "jinja2", "llguidance", "prometheus_client", "opentelemetry.sdk.trace",
)  # fmt: skip
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-m", "(pure or cpu) and not slow")
NICE = 19
_STOP_S = 10.0  # for pytest to end what its tests have started
_SAID = 1 << 20  # characters at the end


def run(tree: Path, arguments: list[str], limit_s: float | None = None) -> tuple[int | None, str]:
    """(pytest's exit status, below 0 if a signal ended it, None after `limit_s`; what it said). All its processes end with it."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = _forks().Process(target=_run, args=(str(tree), [*OPTIONS, *arguments], output.name))
        process.start()
        assert process.pid is not None
        try:
            process.join(limit_s)
            status = process.exitcode
            if status is None:
                os.kill(process.pid, signal.SIGINT)
                process.join(_STOP_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        return status, output.read()[-_SAID:]


@cache
def _forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _run(tree: str, arguments: list[str], output: str) -> None:
    """In the fork, which leads a group: no module of another tree is left, and none is found."""
    import pytest

    os.setsid()
    os.nice(NICE)
    written = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.chdir(tree)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some must be imported by pytest itself
    ours = {path.stem for path in Path(tree).iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    sys.path[:] = [tree, *(path for path in sys.path if not (Path(path) / "tests/support").is_dir())]
    sys.exit(pytest.main(arguments))
