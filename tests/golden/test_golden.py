"""What the engine answers today is what it answered when the stream was recorded, whatever was refactored since."""

from collections.abc import Callable

import pytest

from deploy.models.resolve import resolve
from engine.plan import StepPlan, StepResult
from engine.rank.builder import build
from engine.rank.runner import Runner
from tests.golden.record import load
from tests.support.engine.plan_stream import logprob_error
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import PAGES, config_of, tokens_of

pytestmark = pytest.mark.cpu

TOLERANCE = 2e-5  # fp32 on the CPU: another torch or processor adds in another order; the file rounds at 1e-6


def replay(plans: list[StepPlan], plant_fault: Callable[[Runner, StepPlan], None] = lambda *_: None) -> list[StepResult]:
    """The committed plans through one rank."""
    runner = build(single(config_of(resolve("nano:31b"), 1)), PAGES)
    results = []
    for plan in plans:
        plant_fault(runner, plan)
        results.append(run(runner, plan))
    return results


def test_the_committed_stream_gives_the_committed_tokens() -> None:
    """Every token is the recorded one and every reported logprob lies within 2e-5 of the recorded one."""
    plans, expected = load()
    results = replay(plans)
    print(f"{len(plans)} steps, largest logprob difference {logprob_error(results, expected):.1e}")
    assert tokens_of(results) == tokens_of(expected)
    assert logprob_error(results, expected) < TOLERANCE


def test_one_wrong_page_is_seen() -> None:
    """Planted fault: a page that lies in another's place gives other tokens, or logprobs 100 tolerances off."""

    def plant_fault(runner: Runner, plan: StepPlan) -> None:
        if plan.step == 30:
            pool = next(iter(runner.slots.cache)).pool
            pool[:, 1:] = pool[:, 1:].roll(1, dims=1)

    plans, expected = load()
    results = replay(plans, plant_fault)
    assert tokens_of(results) != tokens_of(expected) or logprob_error(results, expected) > 100 * TOLERANCE
