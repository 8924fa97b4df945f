"""The preStop of a Ray pod: it drains the node and waits for the replica's end, as long as it may, and not for others."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.cpu

SCRIPT = ROOT / "deploy" / "image" / "drain-node.sh"
# A pod sees its own processes alone: a replica, which ends after $1 seconds, and the hook, which may wait for $2.
POD = """\
(exec -a "$3" sleep "$1") &
sleep 0.2
exec bash "$4" "$2"
"""


@pytest.fixture
def ray(tmp_path: Path) -> Path:
    """A `ray` on the PATH that writes its arguments down; the file of them."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for a process namespace")
    log = tmp_path / "log"
    program = tmp_path / "ray"
    program.write_text(f'#!/bin/sh\necho "$@" > {log}\n')
    program.chmod(0o755)
    return log


def drained_after(ray: Path, replica_s: float, bound_s: int, name: str = "ray::ServeReplica:m:Quartet") -> float:
    """Seconds until the hook ended, in a pod whose replica ends after `replica_s`."""
    environ = {**os.environ, "PATH": f"{ray.parent}:{os.environ['PATH']}"}
    pod = ["bash", "-c", POD, "pod", str(replica_s), str(bound_s), name, str(SCRIPT)]
    command = ["unshare", "--pid", "--fork", "--mount-proc", *pod]
    begun = time.monotonic()
    subprocess.run(command, check=True, env=environ, timeout=60)
    return time.monotonic() - begun


def test_it_waits_for_the_replica(ray: Path) -> None:
    """Ray is told to drain this node, and the hook ends with the replica. Another process is not waited for."""
    assert 3 <= drained_after(ray, 3, 30) < 10
    assert ray.read_text().split() == [
        "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the", "pod", "ends",
        "--deadline-remaining-seconds", "30",
    ]  # fmt: skip
    assert drained_after(ray, 3, 30, name="ray::Other") < 2


def test_it_waits_no_longer_than_it_may(ray: Path) -> None:
    """A replica that does not end keeps the pod for the time that requests may take, and no longer."""
    assert 2 <= drained_after(ray, 30, 2) < 10
