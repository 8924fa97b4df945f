"""Forked processes against subprocess's own: whose they are, what they are given, how they end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked

pytestmark = pytest.mark.cpu

SAYS = """
import json, os, sys
given = os.read(int(sys.argv[1]), 9).decode()
told = [sys.argv, given, os.environ, os.getcwd(), os.getppid(), sorted(map(int, os.listdir("/proc/self/fd")))]
print(json.dumps(told, default=dict))
"""


@pytest.mark.parametrize("popen", [subprocess.Popen, forked.Popen])
def test_a_process_has_what_it_was_given(popen: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Arguments, environment, folder, standard streams and descriptors, and no other; it is our child."""
    read, write = os.pipe()
    os.write(write, b"a word")
    with tempfile.TemporaryFile() as out:
        given: dict[str, Any] = {"env": {"A": "b"}, "cwd": tmp_path, "stdin": subprocess.DEVNULL, "stdout": out, "pass_fds": [read]}
        process = popen([sys.executable, "-c", SAYS, str(read)], **given)
        assert process.wait(30) == 0
        out.seek(0)
        arguments, word, environ, folder, parent, descriptors = json.loads(out.read())
    os.close(read)
    os.close(write)
    assert (arguments, word, environ["A"], folder, parent) == (["-c", str(read)], "a word", "b", str(tmp_path), os.getpid())
    assert set(environ) <= {"A", "LC_CTYPE"}
    assert len(set(descriptors) - {0, 1, 2, read}) == 1, descriptors  # that of the listing


ENDS = {"import sys; sys.exit(7)": 7, "raise ValueError": 1, "import os; os._exit(3)": 3, "pass": 0}


@pytest.mark.parametrize("popen", [subprocess.Popen, forked.Popen])
def test_a_process_ends_as_it_says(popen: Callable[..., subprocess.Popen[bytes]]) -> None:
    """By exit, exception or signal; it has torch already if it was forked."""
    for script, code in ENDS.items():
        assert popen([sys.executable, "-c", script], env={}, cwd=".", stderr=subprocess.DEVNULL).wait(30) == code
    stopped = popen([sys.executable, "-c", "import time; time.sleep(60)"], env={}, cwd=".")
    time.sleep(0.1)
    assert stopped.poll() is None
    stopped.kill()
    assert stopped.wait(30) == -signal.SIGKILL
    warm = popen([sys.executable, "-c", "import sys; sys.exit('torch' in sys.modules)"], env={}, cwd=".")
    assert warm.wait(30) == (popen is forked.Popen)
