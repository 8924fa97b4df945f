"""Rows of several tokens, each of a width of its own: what they give is committed, cut and given back; beside it, faults that must
show in random worlds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.core import results
from engine.core.masks import MaskedRow, MaskState
from engine.core.results import InFlightStep, Results
from engine.core.sequence import Sequence
from engine.plan import ResultRow, StepResult
from engine.protocol import FinishReason, Output, SamplingParams, ThoughtBudget
from tests.support.engine.plans import decode_rows, result_of
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, two_groups
from tests.support.engine.world_faults import caught, without_cuts
from tests.support.engine.worlds import World

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


def test_a_row_gives_what_was_accepted() -> None:
    """From one token to all of its width; what was rejected is planned again, and pages stay until they are needed no more."""
    served = Served()
    for tokens in ((3,), (3, 4), (3, 4, 5, 6)):
        low = served.sequence.low
        assert served.gives(*tokens).tokens == [*tokens]
        assert served.widths == [4]
        assert served.sequence.low == served.sequence.high == low + len(tokens)


def test_nothing_behind_an_end_reaches_the_client() -> None:
    """Behind a stop id, and behind max_tokens, tokens are dropped; no row reaches beyond what may be given."""
    assert (output := Served().gives(3, END, 5, 6)).tokens == [3, END]
    assert output.finish is FinishReason.stop
    served = Served(max_tokens=4)
    assert (output := served.gives(3, 4, 5)).tokens == [3, 4, 5]
    assert served.widths == [3]
    assert output.finish is FinishReason.length


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


def test_only_committed_pages_are_cached() -> None:
    """A row that wrote two pages and gave its first token alone leaves the pages before it."""
    served = Served()
    assert served.gives(3, 4).tokens == [3, 4]
    assert (served.gives(END, 4, 5, 6).tokens, served.sequence.ended) == ([END], True)
    served.scheduler.requests.add(request_of(2, [1] * 6 + [2, 3, 4, END, 4, 5, 6, 9], 2))
    served.scheduler.schedule()
    assert served.scheduler.requests.counters.hit_tokens == 8


def test_behind_a_thoughts_beginning_a_row_is_cut() -> None:
    """A budget counts from there: what the same row gave behind it is dropped, and the next row admits the sequence anew."""
    served = Served(thought=ThoughtBudget(tokens=1, begin=50, end=51, label=0, begin_call=52, open_label=None))
    assert served.gives(3, 50, 4, 5).tokens == [3, 50]
    assert (served.sequence.number, served.sequence.low) == (0, 8)
    plan = served.scheduler.schedule()
    assert plan is not None
    assert [(admission.cached, list(admission.tokens)) for admission in plan.admissions] == [(8, [1] * 6 + [2, 3, 50])]


def test_a_row_shrinks_to_its_pages() -> None:
    """Drafts take no page from another sequence, though one of later precedence holds it: the row ends with its own last page."""
    scheduler = scheduler_of(SchedulerConfig(GROUPS, (20, 6), 2, 64, 16, 3))
    for number, (prompt, tokens) in enumerate(((6, 11), (2, 7))):
        scheduler.requests.add(request_of(number, [number] * prompt, tokens))
        scheduler.schedule()
    plans = [scheduler.schedule() for _ in range(2)]
    assert [[row.width for row in decode_rows(plan)] for plan in plans if plan is not None] == [[4, 2], [2]]
    assert scheduler.requests.counters.preemptions == 0


def width_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that gives fewer tokens than planned does not lower the upper bound."""
    honest = Results._fold
    monkeypatch.setattr(Results, "_fold", lambda self, sequence, width, row: honest(self, sequence, len(row.tokens), row))


def low_by_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row advances its sequence by its width, whatever was accepted."""
    honest = Results._fold

    def fold(self: Results, sequence: Sequence, width: int, row: ResultRow) -> None:
        sequence.low += width - len(row.tokens)
        honest(self, sequence, width, row)

    monkeypatch.setattr(Results, "_fold", fold)


def drafts_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rejected drafts wrote, which may not be finite, is taken for what the sequence left."""
    honest = Results._take

    def take(self: Results, sequence: Sequence, *given: Any) -> None:
        sequence.dropped = 0
        honest(self, sequence, *given)

    monkeypatch.setattr(Results, "_take", take)


def cut_without_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' tokens behind a cut stay, and their next row goes on from there."""
    monkeypatch.setattr(Sequence, "step_back", lambda self: None)


def bound_taken_for_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked row's token has the index that it would have if no draft before it was rejected."""
    monkeypatch.setattr(MaskedRow, "length", property(lambda self: self.most))
    monkeypatch.setattr("tests.support.engine.worlds._MAX_STEPS", 1000)


def thoughts_of_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are masked for the end of a thought as if those in flight before them were of one token."""
    monkeypatch.setattr("engine.core.masks.DEPTH", 0.5)


def masks_of_other_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are made behind the drafts of a step before."""
    honest, before = results._note_drafts, dict[int, list[int]]()

    def noted(step: InFlightStep, result: StepResult) -> None:
        honest(step, result)
        for sequence in [row.sequence for row in step.chunks] + [row[0] for row in step.rows]:
            sequence.drafted, before[sequence.id] = before.get(sequence.id, []), sequence.drafted

    monkeypatch.setattr(results, "_note_drafts", noted)


def masks_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's first token has the mask of its last."""
    honest = MaskedRow.masks.fget
    monkeypatch.setattr(MaskedRow, "masks", property(lambda self: np.roll(honest(self), 1, axis=0)))


def free_behind_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a row behind its grammar's end are read as the grammar's."""

    def consume(self: MaskState, tokens: Any) -> Any:
        for token in tokens:
            self.matcher.consume(token)
        return tokens[:0]

    monkeypatch.setattr(MaskState, "consume", consume)


def drafts_while_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait for the end of a thought have drafts."""
    monkeypatch.setattr(MaskState, "update_drafts", lambda self: None)


def mostly_wrong_drafts(world: World) -> World:
    """Wide rows, a step at a time, whose drafts are mostly wrong, and now and then not finite."""
    world.config = replace(world.config, drafts=3)
    world.depth, world.nan_chance, world.guess_chance = 1, 0.05, 0.3
    return world


def long_thoughts(world: World) -> World:
    """Wide rows, and budgets for thoughts that begin now and then."""
    world.config, world.guess_chance, world.stop_chance = replace(world.config, drafts=3), 0.8, 0.0
    world._limit_thoughts()
    return world


def calls(world: World) -> World:
    """Wide rows, mostly right, under grammars, of which many begin at a trigger and soon end."""
    world.config, world.guess_chance, world.stop_chance = replace(world.config, drafts=3), 0.8, 0.0
    world._constrain(lambda number: True, triggers=0.7)
    return world


CHANGED = {
    drafts_forgotten: mostly_wrong_drafts, bound_taken_for_index: long_thoughts, thoughts_of_single_rows: long_thoughts,
    drafts_while_ending: long_thoughts, masks_of_other_drafts: calls, masks_shifted: calls, free_behind_a_call: calls,
}  # fmt: skip


@pytest.mark.parametrize("fault", [
    width_ignored, low_by_width, drafts_forgotten, without_cuts, cut_without_step_back, bound_taken_for_index,
    thoughts_of_single_rows, masks_of_other_drafts, masks_shifted, free_behind_a_call, drafts_while_ending,
])  # fmt: skip
def test_wrong_widths_are_noticed(monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Planted faults: what rows of several tokens give is committed wrongly, or masked wrongly."""
    fault(monkeypatch)
    changed = CHANGED.get(fault, lambda world: world)
    assert caught(300, 2, changed)
