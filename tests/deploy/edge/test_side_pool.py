"""Side processes: what they are started with, and the end of one that is stopped."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.edge.processes import side_pool
from deploy.edge.processes.grammar_process import complaint
from deploy.edge.processes.side_pool import SidePool
from engine.errors import Overloaded
from engine.front.grammar import Thought, choice_answer, grammar
from tests.conftest import Nano
from tests.support.edge.http_edge import until
from tests.support.engine.groups import children_of

pytestmark = pytest.mark.pure

RULES = grammar(None, choice_answer(["a"]), Thought.none)
SECRETS = ("SECRET_KEY", "HF_TOKEN", "PYTHONPATH", "LD_PRELOAD")


@pytest.fixture
def pool(nano: Nano, monkeypatch: pytest.MonkeyPatch) -> Iterator[SidePool]:
    """One that has answered, started with secrets in the environment."""
    for name in SECRETS[:-1]:
        monkeypatch.setenv(name, "secret")
    pool = SidePool("deploy.edge.processes.grammar_process", str(nano("31b")))
    assert complaint(pool, RULES) is None
    yield pool
    pool.close()


def pid_of(pool: SidePool) -> int:
    assert pool._process is not None
    return pool._process.pid


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def test_no_secret_and_no_new_rights(pool: SidePool) -> None:
    """Its environment has none of this process' secrets, and neither it nor a task's process can gain rights. Planted: this process
    has both."""
    until(lambda: len(children_of(pid_of(pool))) == 1, "the next task's process alone")
    for pid in (pid_of(pool), *children_of(pid_of(pool))):
        assert not environment_of(pid).keys() & set(SECRETS)
        assert "secret" not in environment_of(pid).values()
        assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()
    assert os.environ["SECRET_KEY"] == "secret"
    assert "NoNewPrivs:\t0" in Path("/proc/self/status").read_text()


@pytest.mark.parametrize("bound_s", [0.5, 600.0])
def test_a_stopped_side_process_is_replaced(pool: SidePool, bound_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no task: the one that waits is refused, the next ones are answered by another. Planted: without a bound it waits."""
    monkeypatch.setattr(side_pool, "TAKE_S", bound_s)
    before = pid_of(pool)
    os.kill(before, signal.SIGSTOP)
    refused = []

    def run() -> None:
        try:
            complaint(pool, RULES)
        except Overloaded as error:
            refused.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20 if bound_s < 1 else 1.5)
    assert bool(refused) is (bound_s < 1)
    if not refused:
        os.kill(before, signal.SIGCONT)
        thread.join(20)
    monkeypatch.setattr(side_pool, "TAKE_S", 60.0)
    assert complaint(pool, RULES) is None
    assert (pid_of(pool) != before) is bool(refused)


@pytest.mark.parametrize("bound_s", [0.5, 600.0])
def test_a_stopped_process_of_a_task_ends(pool: SidePool, bound_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task counts as one that takes too much, and the process is gone. Planted: without a bound it stays."""
    monkeypatch.setattr(side_pool, "ANSWER_S", bound_s)
    until(lambda: len(children_of(pid_of(pool))) == 1, "the next task's process alone")
    (child,) = children_of(pid_of(pool))
    os.kill(child, signal.SIGSTOP)
    found = []
    thread = threading.Thread(target=lambda: found.append(pool.run(RULES.encode())))
    thread.start()
    until(lambda: len(children_of(pid_of(pool))) == 2, "the process of the next task")
    thread.join(20 if bound_s < 1 else 1.5)
    assert found == ([None] if bound_s < 1 else [])
    if not found:
        os.kill(child, signal.SIGCONT)
        thread.join(20)
        assert found == [b"="]
    until(lambda: child not in children_of(pid_of(pool)), "the end of the process")
