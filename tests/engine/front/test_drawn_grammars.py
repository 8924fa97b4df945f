"""Random grammars in Lark, GBNF, regular expressions, choices and structural tags, each walked to its end with random tokens."""

import json
import subprocess
import sys

import pytest

from engine.front.text import TextProcessor
from tests.conftest import Nano
from tests.support.engine import drawn_grammars
from tests.support.engine.drawn_grammars import Drawn, drawn, walked
from tests.support.engine.walker import Walker
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

KINDS = {"Lark", "GBNF", "nested Lark", "regex", "choice", "structural tag"}


@pytest.fixture(scope="module")
def walker(nano: Nano) -> Walker:
    return Walker(TextProcessor.load(nano("31b")))


def test_what_is_accepted_is_written_to_its_end(walker: Walker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a walk writes is an answer of the grammar by a judge of its own. Planted: by a neighbour's judge most are none."""
    assert {walked(walker, seed) for seed in range(40)} >= KINDS

    def mistaken(seed: int) -> Drawn:
        return drawn(seed)._replace(judge=drawn(seed + 1).judge)

    monkeypatch.setattr(drawn_grammars, "drawn", mistaken)
    wrong = 0
    for seed in range(20):
        try:
            walked(walker, seed)
        except (AssertionError, ValueError):
            wrong += 1
    assert wrong > 10


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["8192", "unlimited"])
def test_a_thousand_grammars_at_any_stack_limit(nano: Nano, limit: str) -> None:
    """A thousand, at this `ulimit -s`: a few may be refused, and no other ends in anything but an answer."""
    command = [sys.executable, "-m", "tests.support.engine.drawn_grammars", str(nano("31b")), "0", "1000"]
    run = ["bash", "-c", f'ulimit -s {limit}; exec "$@"', "bash", *command]
    done = subprocess.run(run, cwd=ROOT, timeout=600, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"\n{found}")
    assert min(found[kind] for kind in KINDS) > 100
    assert sum(found.values()) == 1000
    assert sum(count for kind, count in found.items() if kind.startswith("refused")) < 50
