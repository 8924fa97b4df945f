"""Steps with chunks padded to the sizes that graphs are captured for, against the same steps as they are."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from deploy.models.resolve import resolve
from engine.config import EngineConfig
from engine.plan import Admission, StepPlan, StepResult, single_rows
from engine.protocol import SamplingParams
from engine.rank import runner, step
from engine.rank.builder import build
from engine.rank.runner import Runner
from engine.rank.sampler import ResultRows
from engine.rank.stages.forward_stage import Forwarded
from engine.rank.stages.report_stage import Launched
from engine.rank.stages.sample_stage import StepTokens
from engine.step_shapes import MOST_PADDED_CHUNKS, StepShapes, StepSizes
from kernels.chunks import chunk_inputs
from tests.engine.rank.test_graphs import Rerun
from tests.golden.record import load
from tests.support.engine.answers import answers, requests, texts
from tests.support.engine.plan_stream import logprob_error
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import PAGES, config_of, padded_shapes, tokens_of

pytestmark = pytest.mark.cpu

DRAFTS = 3
PLANS = load()[0][:70]  # of the committed stream
Nano = Callable[[str], Path]


def replayed(folder: Path, *, padded: bool) -> tuple[list[StepResult], list[Tensor], Counter[StepSizes]]:
    """The stream: results, final hidden rows of each step, and how often each size was run."""
    config, hidden, sizes = config_of(folder, 1), [], Counter[StepSizes]()
    made = build(single(config), PAGES, padded_shapes(config) if padded else None)
    start, forward = made.report_stage.start, made.forward_stage.padded

    def seen(step: Forwarded, rows: Any, *rest: Any) -> Any:
        hidden.append(step.hidden[: len(rows.slots)].clone())
        return start(step, rows, *rest)

    def counted(size: StepSizes, *, adapted: bool) -> Any:
        sizes[size] += 1
        return forward(size, adapted=adapted)

    made.report_stage.start, made.forward_stage.padded = seen, counted
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
    eager, captured, wrong = (build(single(config), PAGES, padded_shapes(config)) for _ in range(3))
    monkeypatch.setattr(runner, "StageGraphs", Rerun)
    monkeypatch.setattr(runner.torch.cuda, "synchronize", lambda _: None)
    for made in (captured, wrong):
        made.capture()
        made.slots.lengths.zero_()
        for cache in made.slots.cache:
            cache.pool.zero_()
    assert [run(captured, plan).step for plan in PLANS] == [run(eager, plan).step for plan in PLANS]
    assert captured.state_hash == eager.state_hash
    graphs = captured.graphs
    replayed = {stage for stage, sizes in graphs.replayed if sizes.prompts}
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
    made = build(single(config), PAGES, padded_shapes(config))
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
    forwards = {sizes.width for stage, sizes in graphs.replayed if stage == "forward" and sizes.prompts}
    assert forwards == {1, 1 + DRAFTS}
    monkeypatch.setattr(step, "chunk_inputs", early)
    wrong = texts(answers(partial(run, eager), config, asked[:3], every=1)[0])
    assert wrong != {number: texts(expected)[number] for number in wrong}


def test_steps_that_score_prompts_are_not_padded(nano: Nano) -> None:
    """The host must know which rows give logprobs of prompt tokens; the same chunk without is padded."""
    config = config_of(nano("31b"), 1)
    made = build(single(config), PAGES, padded_shapes(config))
    forward, ran = made.forward_stage.padded, []
    made.forward_stage.padded = lambda sizes, adapted: ran.append(sizes) or forward(sizes, adapted=adapted)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    for number, asked in enumerate((params, msgspec.structs.replace(params, prompt_logprobs=None)), 1):
        admission = Admission(0, number, tuple(range(10, 30)), 20, asked)
        plan = StepPlan(number, admissions=[admission], chunks=[(0, 0, 20, 19, 0, 0)], appends=[(0, 0, 0, 1), (1, 0, 0, 1)])
        result = run(made, plan)
        assert bool(result.prompts) == (asked is params)
        assert ran == ([] if asked is params else [(32, MOST_PADDED_CHUNKS, 0, 4, 1)])


def beside(*, others: bool) -> Iterator[StepPlan]:
    """A prompt of 40 tokens in slot 0 and six tokens after it; with `others`, two more sequences come meanwhile."""
    running: list[int] = []
    for number in range(1, 8):
        plan = StepPlan(number, rows=single_rows(running))
        for slot, (first, tokens) in enumerate(((1, 40), (1, 20), (3, 17))):
            if first == number and (others or slot == 0):
                prompt = tuple(range(10 + slot, 10 + slot + tokens))
                plan.admissions.append(Admission(slot, slot + 1, prompt, tokens, SamplingParams(max_tokens=9)))
                plan.chunks.append((slot, 0, tokens, tokens - 1, 0, 0))
                plan.appends += [(group, slot, page, 1 + 2 * slot + page) for group in (0, 1) for page in (0, 1)]
                running.append(slot)
        yield plan


def bits(config: EngineConfig, shapes: StepShapes | None, *, others: bool) -> list[bytes]:
    """What each step of slot 0 gives, to the last bit: final hidden row and token."""
    made = build(single(config), PAGES, shapes)
    start, given = made.report_stage.start, []

    def seen(step: Forwarded, rows: ResultRows, sampled: StepTokens, masks: bytes) -> Launched:
        row = rows.slots.tolist().index(0)
        given.append(step.hidden[row].numpy().tobytes() + sampled.chosen[row].numpy().tobytes())
        return start(step, rows, sampled, masks)

    made.report_stage.start = seen  # type: ignore[method-assign]
    for plan in beside(others=others):
        run(made, plan)
    return given


def test_steps_of_one_size_compute_a_sequence_alike_whoever_is_beside_it(nano: Nano) -> None:
    """Whether the step has decode rows alone, chunks, or both, the bits of a sequence are the same. With the usual sizes they are
    not: a product of more rows adds in another order."""
    config = config_of(nano("31b"), 1)
    one = StepShapes((StepSizes(64, 4, 4, 4),), prefill=64, longest=64)
    assert bits(config, one, others=True) == bits(config, one, others=False)
    assert bits(config, None, others=True) != bits(config, None, others=False)
