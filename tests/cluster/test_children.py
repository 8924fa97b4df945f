"""Names, root cause and environment of children, without any process."""

import itertools
import os
import socket
import subprocess
import time
from types import SimpleNamespace
from typing import NoReturn

import pytest

from cluster import children
from cluster.children import ROOT, Child, ExitStatus, child_name, environment, root_cause
from cluster.group import spin_polls
from engine.lifeline import Allocate, BootSocket, Failed, Ready

pytestmark = [pytest.mark.pure, pytest.mark.alone]

KILLED = ExitStatus("rank 2", -9)
REFUSED = ExitStatus("rank 1", 1, Failed("a tensor is missing", user=True))
RAISED = ExitStatus("rank 0", 1, Failed("RuntimeError: peer closed", user=False))
ENDED = ExitStatus("rank 3", 7)
LEFT = ExitStatus("the core", 0)


def test_the_root_cause_is_named() -> None:
    """In every order of discovery: a signal before a refusal, that before an exception, that before an exit code, that before 0."""
    ranked = [KILLED, REFUSED, RAISED, ENDED, LEFT]
    for count in range(1, 6):
        for found in itertools.permutations(ranked[-count:]):
            assert root_cause(found) is ranked[-count]
    assert root_cause([]) is None


def test_an_exit_status_is_a_sentence() -> None:
    """Each way to end reads as one: who, and by what."""
    assert [str(exit_status) for exit_status in (KILLED, RAISED, ENDED, LEFT)] == [
        "rank 2 was killed by SIGKILL",
        "rank 0 failed: RuntimeError: peer closed",
        "rank 3 ended with exit code 7",
        "the core ended with exit code 0",
    ]
    assert str(ExitStatus("rank 0", -35)) == "rank 0 was killed by signal 35"


@pytest.mark.parametrize("unread", [False, True])
def test_a_lifeline_ends_whatever_was_left_unread(unread: bool) -> None:
    """What its other end said is heard, then it is at its end. Planted: the bare socket is reset where a message was unread."""

    def left() -> socket.socket:
        ours, theirs = socket.socketpair()
        BootSocket(theirs).send(Ready("on"))
        if unread:
            BootSocket(ours).send(Allocate((1, 2)))
        theirs.close()
        return ours

    with left() as sock:
        lifeline = BootSocket(sock)
        assert [lifeline.receive(), lifeline.receive()] == [Ready("on"), None]
    with left() as sock:
        sock.recv(1 << 16)
        if unread:
            with pytest.raises(ConnectionResetError):
                sock.recv(1 << 16)
        assert sock.recv(1 << 16) == b""


def test_children_that_no_signal_ends_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held by a driver that hangs, all of them share the bound, and are named."""

    waits = []

    class Held(Child):
        def __init__(self, name: str) -> None:
            self.name, self.process = name, SimpleNamespace(kill=lambda: None, wait=self._wait)

        def _wait(self, timeout_s: float) -> NoReturn:
            waits.append(timeout_s)
            time.sleep(timeout_s)
            raise subprocess.TimeoutExpired(self.name, timeout_s)

        def close(self) -> None: ...

    monkeypatch.setattr(children, "KILL_WAIT_S", 0.2)
    assert children.kill([Held(name) for name in "abcd"]) == [*"abcd"]
    assert 0.1 < waits[0] <= 0.2
    assert waits[1:] == [0.0] * 3


def test_the_last_record_is_the_core() -> None:
    """Status record tp belongs to the core, those before it to the ranks."""
    assert [child_name(index, 2) for index in range(3)] == ["rank 0", "rank 1", "the core"]


def test_a_cpu_child_sees_no_gpu_and_one_thread() -> None:
    """On CPU the devices are hidden and OpenMP has one thread; on GPU both are inherited; Ray's debugger hook never is."""
    inherited = {"CUDA_VISIBLE_DEVICES": "2,3", "OMP_NUM_THREADS": "8", "PYTHONPATH": "/a", "X": "1"}
    inherited["PYTHONBREAKPOINT"] = "ray.util"
    cpu, cuda = environment(inherited, "cpu"), environment(inherited, "cuda")
    assert (cpu["CUDA_VISIBLE_DEVICES"], cpu["OMP_NUM_THREADS"]) == ("", "1")
    assert (cuda["CUDA_VISIBLE_DEVICES"], cuda["OMP_NUM_THREADS"]) == ("2,3", "8")
    for env in (cpu, cuda):
        assert "PYTHONBREAKPOINT" not in env
        assert env["PYTHONPATH"] == f"{ROOT}{os.pathsep}/a"
        assert (env["GLOO_SOCKET_IFNAME"], env["X"]) == ("lo", "1")
    assert environment({}, "cpu")["PYTHONPATH"] == str(ROOT)


def test_nobody_spins_on_a_full_machine() -> None:
    """Readers spin only where ranks, core and replica each have a core of the machine."""
    assert spin_polls(4, 2) == 0
    assert spin_polls(4, 5) == 0
    assert spin_polls(4, 6) > 0
