"""The core's lines about its steps."""

import logging

import pytest

from engine.core.loop import StepLog
from engine.plan import Admission, StepPlan, single_rows
from engine.protocol import PoolLoad, SamplingParams
from tests.support.engine.load_figures import load
from tests.support.engine.plans import PrefillChunk

pytestmark = pytest.mark.pure

ADMISSION = Admission(0, 1, [1] * 96, 96, SamplingParams(max_tokens=1), cached=64)
PREFILL = StepPlan(1, admissions=[ADMISSION], chunks=[PrefillChunk(0, 64, 96, 95)])
MIXED = StepPlan(2, chunks=[PrefillChunk(1, 0, 10, 9)], rows=single_rows([0, 2]))


def test_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """Once a second, if steps have ended: how many, their tokens, cached tokens, queue, pools, preemptions since the last."""
    pools = [PoolLoad(group="full", total=90, used=7, cached=5)]
    first = {"hit_tokens": 64, "prefill_tokens": 42, "preemptions": 1}
    loads = iter((
        load(0, pools),
        load(4, pools, decode_tokens=8, running=3, waiting=2, **first),
        load(4, pools, decode_tokens=8, **first),
        load(5, pools, decode_tokens=11, running=3, **first),
    ))  # fmt: skip
    log = StepLog(lambda: next(loads), 10.0)
    with caplog.at_level(logging.INFO):
        for at in (10.9, 11.0, 11.9, 12.0, 12.9, 13.5):
            log.report(at)
    assert [record.getMessage() for record in caplog.records] == [
        "1.0 s: 4 steps, prefill 42, decode 8; cached 64, running 3, waiting 2, preempted 1, pages full 7+5 of 90",
        "1.5 s: 1 steps, prefill 0, decode 3; cached 0, running 3, waiting 0, preempted 0, pages full 7+5 of 90",
    ]


def test_a_line_a_step_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """At debug level each step says its tokens, and how things stand; otherwise that is not even looked up."""
    pools = [PoolLoad(group="sliding", total=9, used=1, cached=0), PoolLoad(group="full", total=90, used=7, cached=5)]
    with caplog.at_level(logging.DEBUG):
        for plan in (PREFILL, MIXED):
            loads = iter((load(0, pools), load(4, pools, running=3, waiting=2, preemptions=1)))
            StepLog(lambda: next(loads), 0.0).planned(plan)  # noqa: B023 (called at once)
    state = "running 3, waiting 2, preempted 1, pages sliding 1+0 of 9, full 7+5 of 90"
    assert [record.getMessage() for record in caplog.records] == [
        f"step 1: prefill 32, cached 64, decode 0, admitted 1; {state}",
        f"step 2: prefill 10, cached 0, decode 2, admitted 0; {state}",
    ]
    loads = iter((load(0),))
    with caplog.at_level(logging.INFO):
        StepLog(lambda: next(loads), 0.0).planned(PREFILL)
