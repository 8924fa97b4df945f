"""Rows of several tokens, each of a width of its own: what they give is committed, cut and given back; beside it, faults that must
show in random worlds."""

from typing import Any

import pytest

from engine.plan import ResultRow
from engine.protocol import Output, SamplingParams
from tests.support.engine.plans import decode_rows, result_of
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, two_groups

pytestmark = pytest.mark.pure

GROUPS = two_groups()
END = 7


class Served:
    """One request of 6 prompt tokens, whose rows are 4 wide where they may be."""

    def __init__(self, **params: Any) -> None:
        self.scheduler = scheduler_of(SchedulerConfig(GROUPS, (20, 20), 2, 64, 16, 3, prefix_cache=True))
        asked = SamplingParams(**{"max_tokens": 20, "stop_ids": (END,)} | params)
        self.scheduler.requests.add(request_of(1, [1] * 6, asked))
        self.sequence = next(iter(self.scheduler.requests.unfinished.values()))
        assert self.gives(2).tokens == [2]

    def gives(self, *tokens: int) -> Output:
        """Plan a step whose row gives these tokens; what the client hears."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.widths = [row.width for row in decode_rows(plan)]
        number = self.sequence.number
        self.scheduler.commit(result_of(plan.step, [ResultRow(slot, number, tokens) for slot in plan.result_slots]))
        (output,) = self.scheduler.requests.drain()
        return output


def test_an_output_says_what_became_of_its_drafts() -> None:
    """Accepted are those that are among its tokens, rejected the others: also where a row is cut at the end."""
    served = Served()
    about = [(output.accepted, output.rejected) for output in (served.gives(3, 4), served.gives(3), served.gives(3, END, 5, 6))]
    assert about == [(1, 2), (0, 3), (2, 1)]
    assert [(each.verified, each.accepted) for each in served.scheduler.load().draft_positions] == [(3, 2), (3, 1), (3, 1)]


def test_a_request_may_do_without_drafts() -> None:
    """Its rows are of one token, and in a step of such rows alone ranks draft nothing."""
    served = Served(drafts=False)
    served.gives(3)
    assert served.widths == [1]
    plan = served.scheduler.schedule()
    assert plan is not None
    assert plan.drafts == 0
    served = Served()
    plan = served.scheduler.schedule()
    assert plan is not None
    assert plan.drafts == 3


def test_a_row_shrinks_to_its_pages() -> None:
    """Drafts take no page from another sequence, though one of later precedence holds it: the row ends with its own last page."""
    scheduler = scheduler_of(SchedulerConfig(GROUPS, (20, 6), 2, 64, 16, 3))
    for number, (prompt, tokens) in enumerate(((6, 11), (2, 7))):
        scheduler.requests.add(request_of(number, [number] * prompt, tokens))
        scheduler.schedule()
    plans = [scheduler.schedule() for _ in range(2)]
    assert [[row.width for row in decode_rows(plan)] for plan in plans if plan is not None] == [[4, 2], [2]]
    assert scheduler.requests.counters.preemptions == 0
