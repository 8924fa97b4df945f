"""Kernels under Triton's interpreter, in a process of its own: the variable that switches it on is read when triton is imported.

A test file names its interpreted cases `interpreted_*`, which pytest does not collect by itself, and runs them all at once by

    def test_under_the_interpreter() -> None:
        interpreter.run(__file__)
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(file: str, timeout: float = 240, cases: str = "interpreted_*") -> None:
    """Runs the cases of `file`, functions of such names; fails with pytest's own output if one fails, is skipped, or if there is
    none."""
    options = ["-q", "-p", "no:cacheprovider", "-o", f"python_functions={cases}"]
    command = [sys.executable, "-m", "pytest", file, *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    summary = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in "".join(summary), done.stdout
