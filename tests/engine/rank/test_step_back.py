"""A sequence that steps back on a real rank: the position that runs again gives the token that it gave the first time."""

from collections.abc import Iterator

import msgspec
import pytest

from engine.core.allocator import Allocator
from engine.core.loop import make_scheduler
from engine.core.scheduler import Scheduler
from engine.errors import PageViolation
from engine.logit_adjustments import LogitAdjustments
from engine.plan import DEPTH, StepPlan
from engine.protocol import SamplingParams
from engine.rank.worker import Rank, build
from tests.conftest import Nano
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import config_of
from tests.support.engine.scheduling import request_of

pytestmark = pytest.mark.cpu

PAGES = (60, 60)
LENGTHS = (5, 30, 70)


@pytest.fixture(scope="module")
def rank(nano: Nano) -> Rank:
    return single(config_of(nano("31b"), 1, pages=PAGES, debug_pages=True))


def tokens(rank: Rank, *, back: bool) -> list[list[int]]:
    """What three requests give, sampled with penalties. `back`: while one row of it is in flight, every fifth token of a request
    makes it step back. Steps without a prompt have no chunk."""
    runner, scheduler = build(rank, PAGES), make_scheduler(rank.config, PAGES)
    for number, length in enumerate(LENGTHS):
        prompt = [(number * 31 + at * 7) % 900 + 10 for at in range(length)]
        adjustments = LogitAdjustments(frequency_penalty=0.5, repetition_penalty=1.2) if number % 2 else None
        params = SamplingParams(max_tokens=12, temperature=0.9, seed=number, adjustments=adjustments)
        scheduler.requests.add(request_of(number, prompt, params))
    given = [[] for _ in LENGTHS]
    for plan in plans(scheduler):
        scheduler.commit(run(runner, plan))
        for output in scheduler.requests.drain():
            given[output.id] += output.tokens
            sequence = scheduler.requests.unfinished.get(output.id)
            if back and sequence is not None and len(given[output.id]) % 5 == 1 and sequence.planned >= len(sequence.tokens):
                sequence.step_back()
    assert scheduler.requests.counters.prefill_tokens == sum(LENGTHS)
    return given


def plans(scheduler: Scheduler) -> Iterator[StepPlan]:
    """One after the other, two made at a time."""
    made = []
    while scheduler.requests.unfinished or made:
        while scheduler.in_flight < DEPTH and (plan := scheduler.schedule()) is not None:
            made.append(plan)
        yield made.pop(0)


def test_a_position_that_runs_again_gives_the_same_token(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every table checked in every step, and no chunk but the prompts'. Planted faults: pages that are not named again are
    missing; a row that begins a position late gives other tokens."""
    expected = tokens(rank, back=False)
    assert tokens(rank, back=True) == expected
    with monkeypatch.context() as patch:
        patch.setattr(Allocator, "append_again", lambda *_: None)
        with pytest.raises(PageViolation):
            tokens(rank, back=True)
    made = Scheduler.schedule

    def late(scheduler: Scheduler) -> StepPlan | None:
        plan = made(scheduler)
        if plan is None:
            return None
        late = [each._replace(cached=each.cached - 1 if each.cached else 0) for each in plan.admissions]
        return msgspec.structs.replace(plan, admissions=late)

    monkeypatch.setattr(Scheduler, "schedule", late)
    assert tokens(rank, back=True) != expected
