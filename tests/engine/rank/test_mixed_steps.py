"""Steps with chunks padded to the sizes that graphs are captured for, against the same steps as they are."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch import Tensor

from deploy.models.resolve import resolve
from engine.plan import StepPlan, StepResult, encode_plan, read_plan, single_rows
from engine.rank import runner, step
from engine.rank.builder import build
from engine.rank.parallel import Inboxes
from engine.rank.prompt_logprobs import PromptScoring
from engine.rank.runner import Runner
from engine.rank.stages.forward_stage import FinalRows
from engine.rank.step import MOST_PADDED_CHUNKS, StepSizes
from kernels.chunks import chunk_inputs
from tests.engine.rank.test_graphs import Rerun
from tests.golden.record import load
from tests.support.engine.answers import answers, requests, texts
from tests.support.engine.plan_stream import logprob_error
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import PAGES, config_of, tokens_of

pytestmark = pytest.mark.cpu

DRAFTS = 3
PLANS = load()[0][:70]  # of the committed stream
Nano = Callable[[str], Path]


def replayed(folder: Path, *, padded: bool) -> tuple[list[StepResult], list[Tensor], Counter[object]]:
    """The stream: results, final hidden rows of each step, and how often each size was run."""
    made, hidden, sizes = build(single(config_of(folder, 1)), PAGES), [], Counter[object]()
    made._pads_chunks = padded
    start, padded_forward = made.report_stage.start, made._padded_forward

    def seen(plan: Any, rows: Any, sampled: Any, final: Tensor, *rest: Any) -> Any:
        hidden.append(final[: len(rows.slots)].clone())
        return start(plan, rows, sampled, final, *rest)

    def counted(size: StepSizes, *rest: Any) -> FinalRows:
        sizes[size] += 1
        return padded_forward(size, *rest)

    made.report_stage.start, made._padded_forward = seen, counted
    return [run(made, plan) for plan in PLANS], hidden, sizes


def difference(rows: list[Tensor], others: list[Tensor]) -> float:
    """The largest of final hidden rows."""
    return max((one - other).abs().max().item() for one, other in zip(rows, others, strict=True) if len(one))


@pytest.mark.parametrize("member", ["31b", "26b-a4b", "e2b"])
def test_padded_steps_give_what_they_give_as_they_are(nano: Nano, member: str) -> None:
    """Tokens, logprobs and final hidden rows of the committed stream, whose steps with chunks are padded; a CPU adds products of
    experts and of single rows in another order when there are more."""
    plain, rows, few = replayed(nano(member), padded=False)
    results, others, many = replayed(nano(member), padded=True)
    assert not any(size.prompts for size in few)
    steps = {size: count for size, count in many.items() if size.prompts}
    assert sum(steps.values()) == len(rows) - sum(few.values())
    assert {size.decodes > 0 for size in steps} == {True, False}
    assert all(size.chunks == MOST_PADDED_CHUNKS and size.results == 4 for size in steps)
    assert tokens_of(results) == tokens_of(plain)
    assert logprob_error(results, plain) < 1e-5
    assert difference(rows, others) < 1e-5


def early(*arguments: Any) -> None:
    """`chunk_inputs`, and results one row too early."""
    chunk_inputs(*arguments)
    arguments[7].rows.sub_(1).clamp_(min=0)


def test_a_result_of_the_row_before_is_seen(nano: Nano, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a chunk's result is taken one row too early."""
    _, rows, _ = replayed(nano("31b"), padded=False)
    monkeypatch.setattr(step, "chunk_inputs", early)
    _, others, _ = replayed(nano("31b"), padded=True)
    assert difference(rows, others) > 1e-2


def test_padded_steps_are_replayed(nano: Nano, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and sampler of a padded step are graphs of its sizes, and replays give the eager steps' state; with the rows of the
    step before they do not."""
    config = config_of(nano("31b"), 1)
    eager, captured, wrong = (build(single(config), PAGES) for _ in range(3))
    monkeypatch.setattr(runner, "StageGraphs", Rerun)
    monkeypatch.setattr(runner.torch.cuda, "synchronize", lambda _: None)
    for made in (eager, captured, wrong):
        made._pads_chunks = True
    for made in (captured, wrong):
        made.capture()
        made.slots.lengths.zero_()
        for cache in made.slots.cache:
            cache.pool.zero_()
    assert [run(captured, plan).step for plan in PLANS] == [run(eager, plan).step for plan in PLANS]
    assert captured.state_hash == eager.state_hash
    graphs = captured.graphs
    replayed = {stage for stage, sizes, _ in graphs.replayed if sizes.prompts}
    assert replayed >= {"forward", "argmax", "small_top_k"}
    stages = wrong.graphs
    for key, (_, kept) in stages.stages.items():
        if key[0] == "forward" and key[1].prompts:
            stages.stages[key] = partial(lambda given: given, kept), kept
    for plan in PLANS:
        run(wrong, plan)
    assert wrong.state_hash != eager.state_hash


def drafting(config: Any, *, captured: bool) -> Runner:
    """Steps with chunks are padded as on a GPU."""
    made = build(single(config), PAGES)
    made._pads_chunks, made._widths, made._mixed_widths = True, config.widths, config.widths
    if captured:
        made.capture()
        made.slots.lengths.zero_()
        for cache in made.slots.cache:
            cache.pool.zero_()
    return made


def test_drafts_are_verified_beside_chunks(nano: Nano, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with chunks and rows that verify is a graph of its sizes and width: replays give the eager steps' state, and the texts
    without drafts, of a trained drafter and requests that are masked, adjusted, filtered, or end by a stop id. Planted fault:
    results taken one row too early."""
    monkeypatch.setattr(runner, "StageGraphs", Rerun)
    monkeypatch.setattr(runner.torch.cuda, "synchronize", lambda _: None)
    asked = requests()
    alone = config_of(nano("e2b"), 1, prefill_budget=32)
    config = config_of(nano("e2b"), 1, prefill_budget=32, mtp={"model": str(resolve("nano:e2b-assistant")), "drafts": DRAFTS})
    expected, _, _ = answers(partial(run, build(single(alone), PAGES)), alone, asked, every=1)
    eager, captured = drafting(config, captured=False), drafting(config, captured=True)
    for made in (eager, captured):
        given, _, _ = answers(partial(run, made), config, asked, every=1)
        assert texts(given) == texts(expected)
    assert captured.state_hash == eager.state_hash
    graphs = captured.graphs
    forwards = {width for stage, size, width in graphs.replayed if stage == "forward" and size.prompts}
    assert forwards == {1, 1 + DRAFTS}
    monkeypatch.setattr(step, "chunk_inputs", early)
    wrong = texts(answers(partial(run, eager), config, asked[:3], every=1)[0])
    assert wrong != {number: texts(expected)[number] for number in wrong}


def test_what_the_host_must_know_is_not_padded(nano: Nano) -> None:
    """Chunks whose prompts' logprobs are wanted, and steps of more rows or chunks than any size has; where layers share K and V, or
    ranks norm own rows, there are larger ones."""
    made, sharing = (build(single(config_of(nano(member), 1, prefill_budget=3500)), PAGES) for member in ("31b", "e2b"))
    inboxes = Inboxes(MagicMock(), MagicMock(), MagicMock())
    by_rows = build(replace(single(config_of(nano("31b"), 1, prefill_budget=4096)), inboxes=inboxes), PAGES)
    made._pads_chunks = sharing._pads_chunks = by_rows._pads_chunks = True

    def padded(*chunks: tuple[int, ...], spans: list[tuple[int, ...]] | None = None, rows: int = 0) -> StepSizes | None:
        plan = StepPlan(1, chunks=list(chunks), spans=spans or [], rows=single_rows(range(rows)))
        return made._padded_sizes(read_plan(encode_plan(plan)))

    chunk = (0, 3, 20, 19, 0, 0)
    assert padded(chunk) == (32, MOST_PADDED_CHUNKS, 0, 4)
    assert padded(chunk, rows=1) == (32, MOST_PADDED_CHUNKS, 4, 4)
    assert padded((0, 0, 2048, 2048, 0, 0)) == (2048, MOST_PADDED_CHUNKS, 0, 4)
    assert padded((0, 0, 2049, 2049, 0, 0)) is None
    large = read_plan(encode_plan(StepPlan(1, chunks=[(0, 0, 2049, 2049, 0, 0)])))
    assert sharing._padded_sizes(large) == by_rows._padded_sizes(large) == (2560, 20, 0, 4)
    many = read_plan(encode_plan(StepPlan(1, chunks=[(slot, 0, 150, 150, 0, 0) for slot in range(MOST_PADDED_CHUNKS + 4)])))
    full = read_plan(encode_plan(StepPlan(1, chunks=[(0, 0, 3500, 3500, 0, 0)])))  # of the budget
    assert sharing._padded_sizes(full) == (3500, 27, 0, 4)
    assert by_rows._padded_sizes(many) == (3072, 24, 0, 4)
    assert padded(*((slot, 0, 1, 1, 0, 0) for slot in range(MOST_PADDED_CHUNKS + 1))) is None
    assert padded((0, 3, 20, 19, 0, 1), spans=[(4, 6)]) == padded(chunk), "an image is no case of its own"
    made.slots.prompt_scorings[0] = PromptScoring(1, 9, 0)
    assert padded(chunk) is None
