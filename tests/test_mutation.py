"""The tool that plants faults, on a tree of one module and one test file: what it says of a fault, and what it tries again."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.mutants import Fault
from tests.support.mutation import (
    CAUGHT,
    LIMIT_FLOOR_S,
    LIMIT_TIMES,
    SURVIVED,
    TIMED_OUT,
    Baseline,
    Baselines,
    Outcome,
    Results,
    tried,
)

pytestmark = pytest.mark.cpu

PATIENT_S = 120.0
CODE = "def double(x):\n    return 2 * x\n\n\ndef unused(x):\n    return x\n"
TESTS = '''
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from doubling import double

import pytest

pytestmark = pytest.mark.pure


def test_double():
    assert double(2) == 4
    assert double(3) == 6
'''
WRONG = Fault("wrong", "doubling.py", "2 * x", "x * x", "test_doubling.py")
UNSEEN = Fault("unseen", "doubling.py", "return x\n", "return -x\n", "test_doubling.py")
ENDLESS = Fault("endless", "doubling.py", "return 2 * x", "while True: pass", "test_doubling.py")
DEADLY = Fault("deadly", "doubling.py", "return 2 * x", "import os; os.kill(os.getpid(), 9)", "test_doubling.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A module and its test."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["pure", "cpu", "slow"]\n')
    (tmp_path / "doubling.py").write_text(CODE)
    (tmp_path / "tests/test_doubling.py").write_text(TESTS)
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "kind", "seen_by"),
    [(WRONG, CAUGHT, "test_doubling.py::test_double"), (UNSEEN, SURVIVED, ""), (DEADLY, CAUGHT, "pytest died of signal 9")],
    ids=lambda value: getattr(value, "id", ""),
)
def test_what_becomes_of_a_fault(tree: Path, fault: Fault, kind: str, seen_by: str) -> None:
    """A failing test catches a fault, a dead pytest does, a test that passes does not; then the file is as it was."""
    outcome = tried(fault, tree, Baseline(PATIENT_S, ("test_doubling.py",)))
    assert (outcome.kind, outcome.seen_by) == (kind, seen_by)
    assert (tree / "doubling.py").read_text() == CODE


def test_a_time_out_is_no_catch(tree: Path) -> None:
    """A fault with which the tests do not end has timed out."""
    assert tried(ENDLESS, tree, Baseline(5.0, ("test_doubling.py",))).kind == TIMED_OUT


def test_the_time_limit_follows_the_tests_own_time(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each selection of tests has three times its own time without a fault, and a floor. If all fail without one, the run ends."""
    moments = iter((100.0, 107.0))
    monkeypatch.setattr("tests.support.mutation.time.monotonic", lambda: next(moments))
    monkeypatch.setattr("tests.support.mutation.run_tests", lambda *_, **__: (0, ""))
    baselines = Baselines()
    for fault in (WRONG, UNSEEN):
        assert baselines.of(fault.tests, tree).limit_s == LIMIT_TIMES * 7.0 + LIMIT_FLOOR_S
    monkeypatch.undo()
    (tree / "doubling.py").write_text(CODE.replace("2 * x", "3 * x"))
    with pytest.raises(SystemExit, match="without a fault"):
        Baselines().of(WRONG.tests, tree)


def test_a_test_that_fails_without_a_fault_is_left_out(tree: Path) -> None:
    """Tests that hold times fail on a busy machine. Planted: one that never passes."""
    (tree / "tests/test_doubling.py").write_text(TESTS + "\n\ndef test_never():\n    assert False\n")
    assert Baselines().of(WRONG.tests, tree).tests == ("test_doubling.py::test_double",)


def test_fast_tests_come_first(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So most faults are noticed before a slow test runs. Setups and teardowns, which other tests share, do not count."""
    said = (
        "1.30s call     tests/test_doubling.py::test_slow[a b]\n"
        "0.90s setup    tests/test_doubling.py::test_double\n"
        "0.01s call     tests/test_doubling.py::test_double\n"
    )
    monkeypatch.setattr("tests.support.mutation.run_tests", lambda *_, **__: (0, said))
    assert Baselines().of(WRONG.tests, tree).tests == ("test_doubling.py::test_double", "test_doubling.py::test_slow[a b]")
    monkeypatch.undo()
    assert Baselines().of(WRONG.tests, tree).tests == ("test_doubling.py::test_double",)


def test_results_are_kept(tree: Path) -> None:
    """What was caught is known for good, what was not until its tests or its file change; another fault of the same name is new."""
    path = tree / "results.jsonl"
    results = Results(path)
    caught = Outcome(WRONG, CAUGHT, 1.0, "test_doubling.py::test_double")
    found = [caught, Outcome(UNSEEN, SURVIVED, 2.0), Outcome(ENDLESS, TIMED_OUT, 3.0)]
    for outcome in found:
        assert results.known(outcome.fault, tree) is None
        results.add(outcome, tree)
    again = Results(path)
    assert [again.known(outcome.fault, tree) for outcome in found] == found
    assert again.known(replace(WRONG, new="x + x + x"), tree) is None
    (tree / "tests/test_doubling.py").write_text(TESTS + "\n\ndef test_more():\n    pass\n")
    assert [again.known(outcome.fault, tree) for outcome in found] == [caught, None, None]
