"""What a process that adopts orphans does with them."""

import subprocess
import sys

import pytest

from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

ADOPTER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from deploy import processes

if sys.argv[1] == "prctl alone":
    processes._reap_orphans = lambda: None
processes.adopt_orphans()
parent = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & echo ready; wait"], stdout=subprocess.PIPE)
parent.stdout.readline()
orphans = [pid for pid in processes.descendants() if pid != parent.pid]
parent.kill()
parent.wait()
for pid in orphans:
    os.kill(pid, signal.SIGKILL)
own = subprocess.Popen(["sh", "-c", "exit 7"])
deadline = time.monotonic() + (20 if sys.argv[1] == "reaper" else 0.5)
while any(Path(f"/proc/{pid}").exists() for pid in orphans) and time.monotonic() < deadline:
    own.poll()
    time.sleep(0.01)
print(len(orphans), sum(Path(f"/proc/{pid}").exists() for pid in orphans), own.wait())
"""


@pytest.mark.parametrize(("how", "zombies"), [("reaper", 0), ("prctl alone", 2)])
def test_adopted_orphans_leave_no_zombies(how: str, zombies: int) -> None:
    """Two children of a child that was killed end: both are gone soon, and a child of the adopter's own keeps its exit code.
    Planted fault: a process that only adopts keeps two zombies."""
    done = subprocess.run([sys.executable, "-c", ADOPTER, how], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["2", str(zombies), "7"], done.stderr
