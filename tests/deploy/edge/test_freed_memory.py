"""Memory after a burst of bodies, in a process of its own."""

import subprocess
import sys

import pytest

from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

BURST = """
import sys
from deploy.edge.processes.freed_memory import keep_large_blocks_apart
from tests.support.stack.serve_process import process_mb

def burst():
    pieces, kept = [[] for _ in range(8)], []
    for number in range(31 << 4):
        for body in pieces:
            body.append(bytes(1 << 16))
        kept.append(bytes([number % 256] * 300))  # what lives on, such as a record of the request
    bodies = [b"".join(body) for body in pieces]
    pieces.clear()
    texts = [body.decode() for body in bodies]
    return kept

if sys.argv[1] == "apart":
    keep_large_blocks_apart()
before = process_mb("self", "VmRSS")
kept = burst()
print(process_mb("self", "VmRSS") - before)
"""


@pytest.mark.parametrize("fault", [False, True])
def test_memory_returns_after_a_burst(fault: bool) -> None:
    """Eight bodies of 31 MiB, in pieces, joined and decoded: 15 MiB stay at most. Planted: malloc as it is keeps 150 MiB."""
    command = [sys.executable, "-c", BURST, "heap" if fault else "apart"]
    grown = float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout)
    print(f"{grown:.1f} MiB")
    assert grown > 150 if fault else grown < 15
