"""One plan in, one result out, on one rank: against the same model asked in another way, and against itself."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import engine_config
from engine.logit_adjustments import LogitAdjustments
from engine.plan import Admission, Encode, PlanView, StepPlan, StepResult, encode_plan, read_plan, single_rows
from engine.protocol import MAX_ALTERNATIVES, Logprobs, PlacedItem, SamplingParams
from engine.rank import runner as rank_runner
from engine.rank.batch import ForwardBatch
from engine.rank.builder import Rank, build
from engine.rank.runner import Runner
from engine.rank.sampler import ResultRows
from engine.rank.stages.report_stage import Launched
from kernels.choose import ROW_ERROR
from kernels.sampling_batch import SamplingBatch
from tests.conftest import Nano
from tests.support.engine.adjusted_logits import AdjustedSequence
from tests.support.engine.plans import PageAppend, PrefillChunk, encoded, result_of, result_rows
from tests.support.engine.ranks import run, single

pytestmark = pytest.mark.cpu

PAGES = (40, 40)
GREEDY = SamplingParams(max_tokens=99, logprobs=2)
SAMPLED = SamplingParams(max_tokens=99, temperature=1.0, top_k=30, seed=-77)
PROMPTS = ([5, 17, 300, 41, 9, 8, 77], [(at * 37) % 900 + 20 for at in range(100)])


@pytest.fixture(scope="module")
def rank(nano: Nano) -> Rank:
    config = engine_config(
        model=str(nano("31b")), tp=1, device="cpu", dtype="float32", pages=PAGES, debug_hash=True, max_seqs=3, max_len=256
    )
    return single(config)


@pytest.fixture
def runner(rank: Rank) -> Runner:
    return build(rank, PAGES)


def with_config(rank: Rank, **changes: object) -> Runner:
    config = msgspec.structs.replace(rank.config, **changes)
    return build(replace(rank, config=config), PAGES)


def admit(slot: int, number: int, tokens: list[int], params: SamplingParams) -> tuple[Admission, list[PageAppend]]:
    """An admission and pages for 160 positions: its own of each group."""
    pages = [PageAppend(group, slot, index, 1 + slot * 5 + index) for group in (0, 1) for index in range(5)]
    return Admission(slot, number, tokens, len(tokens), params), pages


def first_plan(params: tuple[SamplingParams, SamplingParams] = (GREEDY, SAMPLED)) -> StepPlan:
    """Both prompts admitted and run whole, in slots 2 and 0."""
    plan = StepPlan(1)
    for number, (slot, prompt, param) in enumerate(zip((2, 0), PROMPTS, params, strict=True), 1):
        admission, pages = admit(slot, number, prompt, param)
        plan.admissions.append(admission)
        plan.appends.extend(pages)
        plan.chunks.append(PrefillChunk(slot, 0, len(prompt), len(prompt) - 1))
    return plan


def test_a_part_that_did_not_come_while_steps_were_captured_ends_the_start(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inboxes' error flag is looked at behind the capture, not by the first request; without it the start goes on."""
    allreduce = SimpleNamespace(failed=False)
    monkeypatch.setattr(runner, "_captured", lambda: ())
    monkeypatch.setattr(rank_runner, "StageGraphs", MagicMock())
    monkeypatch.setattr(rank_runner.torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(runner.forward_stage, "inboxes", SimpleNamespace(allreduce=allreduce))
    runner.capture()
    allreduce.failed = True
    with pytest.raises(RuntimeError, match="did not come in time while decode steps were captured"):
        runner.capture()


def test_a_sum_that_failed_gives_no_tokens(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is flagged because another rank's part did not come ends the step with an error; without the flag it has one."""
    sample, flag = runner.sample_stage.sampler.sample, 0

    def flagged(*arguments: object) -> tuple[Tensor, Tensor | None]:
        chosen, logprobs = sample(*arguments)
        chosen[1, 1] |= flag
        return chosen, logprobs

    monkeypatch.setattr(runner.sample_stage.sampler, "sample", flagged)
    assert len(run(runner, first_plan()).table) == 2
    flag = ROW_ERROR
    with pytest.raises(RuntimeError, match="step 2: another rank's part of an all-reduce did not come in time"):
        run(runner, StepPlan(2, rows=single_rows([0, 2])))


@pytest.mark.parametrize("reached", [False, True])
def test_encodes_begin_behind_a_forward_that_needs_none(rank: Rank, reached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's encodes begin once its step is launched, or before its forward if a chunk reads their rows."""
    made, phases, phase = build(rank, PAGES), list[str](), "forward"

    def begun(plan: PlanView) -> None:
        assert [slot for slot, _ in plan.encodes] == [3]
        phases.append(phase)

    monkeypatch.setattr(made.encode_stage, "encode", begun)
    monkeypatch.setattr(rank_runner, "reaches_encodes", lambda plan: reached)
    encodes = [Encode(3, PlacedItem(200, 4, bytes(32), (), "image", (4,), 0))]
    step, phase = made.forward(encode_plan(msgspec.structs.replace(first_plan(), encodes=encodes))), "sample"
    made.sample(step).finish()
    assert phases == ["forward" if reached else "sample"]


def test_what_warms_a_runner_leaves_nothing_behind(rank: Rank, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills of every number of rows that products have a tile for, up to all that three sequences may have, use the null page.
    Then it is zero again, and plans give what they give without. They did write there. Samplers run with all that a step may ask,
    adjusted and not, up to the largest bucket: a step that is so large finds the memory that it takes."""
    sizes = []
    sampled = []
    stage, forward = runner.sample_stage, runner.forward_stage.model.states
    report, sample = stage.prompt_logprobs, stage.sampler.sample

    def seen_sampling(logits: Tensor, batch: SamplingBatch, inbox: None, asked: ResultRows) -> tuple[Tensor, Tensor | None]:
        sampled.append((len(logits), batch.adjustments is not None, asked))
        return sample(logits, batch, inbox, asked)

    def seen(batch: ForwardBatch, *rest: object) -> tuple[Tensor, Tensor]:
        sizes.append(batch.rows)
        return forward(batch, *rest)

    def written(*arguments: object) -> Tensor:
        assert all(bool(group.pool[:, 0].any()) for group in runner.slots.cache)
        return report(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(runner.forward_stage.model, "states", seen)
        patch.setattr(stage, "prompt_logprobs", written)
        patch.setattr(stage.sampler, "sample", seen_sampling)
        runner.warm()
    assert sizes == [1, 1, 1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 768, 768]
    most = ResultRows(small_top_k=True, filtered=range(3), reported=range(3), alternatives=MAX_ALTERNATIVES)
    assert sampled[:2] == [(3, False, most), (3, True, replace(most, adjusted=True))]
    assert [rows for rows, adjusted, _ in sampled if adjusted] == [3, 2, 1]
    assert not any(bool(group.pool.any() or group.table.any()) for group in runner.slots.cache)
    assert not runner.slots.lengths.any()
    plain = build(rank, PAGES)
    assert encoded([run(runner, first_plan())]) == encoded([run(plain, first_plan())])
    assert runner.state_hash == plain.state_hash != 0


def stream(steps: int = 12, **kwargs: tuple[SamplingParams, SamplingParams]) -> list[StepPlan]:
    return [first_plan(**kwargs), *(StepPlan(step, rows=single_rows([0, 2])) for step in range(2, steps + 1))]


def tokens_of(results: list[StepResult]) -> dict[int, list[int]]:
    found = {}
    for row in (row for result in results for row in result_rows(result)):
        found.setdefault(row.slot, []).extend(row.tokens)
    return found


def scored_plans(prompt: list[int], alternatives: int | None) -> list[StepPlan]:
    """A prompt in chunks of its own in slot 1, which report its tokens' logprobs, beside another prompt that asks for none."""
    params = msgspec.structs.replace(GREEDY, prompt_logprobs=alternatives)
    admission, pages = admit(1, 7, prompt, params)
    other, others = admit(0, 8, PROMPTS[0], GREEDY)
    ends, first = (33, 97, len(prompt)), PrefillChunk(0, 0, len(PROMPTS[0]), len(PROMPTS[0]) - 1)
    chunks = [PrefillChunk(1, start, end, end - (end == ends[-1])) for start, end in zip((0, *ends), ends, strict=False)]
    plans = [StepPlan(1, admissions=[admission, other], appends=pages + others, chunks=[first, chunks[0]])]
    return plans + [StepPlan(step, chunks=[chunk], rows=single_rows([0])) for step, chunk in enumerate(chunks[1:], 2)]


def told(results: list[StepResult]) -> dict[int, tuple[int, Logprobs]]:
    """Of slot 1's prompt, by position; each once."""
    found = {}
    for slot, number, piece in (prompt for result in results for prompt in result.prompts):
        assert (slot, number) == (1, 7)
        for at, entry in enumerate(piece.entries(), piece.first):
            assert at not in found
            found[at] = entry
    return found


def test_logprobs_of_a_prompt_are_those_that_sampling_reports(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the head in pieces of seven rows, in three chunks beside another sequence: to 1e-4 what a row reports that samples
    behind each prefix; tokens are what they are without."""
    prompt = PROMPTS[1]
    quiet = run(build(rank, PAGES), scored_plans(prompt, None)[0])
    monkeypatch.setattr("engine.rank.stages.sample_stage.PIECE_LOGITS", 7 * rank.geometry.vocab)
    runner = build(rank, PAGES)
    results = [run(runner, plan) for plan in scored_plans(prompt, 3)]
    assert results[0].row(0).tokens == quiet.row(0).tokens
    found = told(results)
    assert list(found) == list(range(1, len(prompt)))
    wanted = msgspec.structs.replace(GREEDY, logprobs=rank.geometry.vocab - 1)
    for end in (1, 33, 34, 60, 99):
        admission, pages = admit(1, 9, prompt[:end], wanted)
        plan = StepPlan(1, admissions=[admission], appends=pages, chunks=[PrefillChunk(1, 0, end, end - 1)])
        (row,) = result_rows(run(build(rank, PAGES), plan))
        (sampled,) = row.logprobs
        ranks = {token: (at, value) for at, (token, value) in enumerate(sampled.top, 1)}
        number, logprobs = found[end]
        place, value = ranks[prompt[end]]
        assert number == place
        assert abs(logprobs.chosen - value) < 1e-4
        assert [token for token, _ in logprobs.top] == [token for token, _ in sampled.top[:3]]
    assert max(abs(found[at][1].chosen - found[at - 1][1].chosen) for at in range(2, len(prompt))) > 1e-2


@pytest.mark.parametrize("debug", [True, False])
def test_hash_sees_plan_tokens_and_hidden_bits(rank: Rank, debug: bool) -> None:
    """Another plan byte, or another token of the same plans, changes the hash; a hidden bit that changes no token only with
    debug_hash."""

    def hash_of(
        plans: list[StepPlan], plant_fault: Callable[[Runner], None] = lambda _: None, suppress: tuple[int, ...] = ()
    ) -> tuple[int, dict[int, list[int]]]:
        made = with_config(rank, debug_hash=debug, suppress=suppress)
        plant_fault(made)
        results = [run(made, plan) for plan in plans]
        return made.state_hash, tokens_of(results)

    def nudge(made: Runner) -> None:
        """One K or V value off by a little, where slot 2's first page lies."""
        launch = made.launch

        def launched(data: bytes, masks: bytes = b"") -> Launched:
            if read_plan(data).step == 2:
                next(iter(made.slots.cache)).pool[0, 11, 0, 0, 0, 0] += 1e-4
            return launch(data, masks)

        made.launch = launched  # type: ignore[method-assign]

    plain, tokens = hash_of(stream(5))
    seeded, _ = hash_of(stream(5, params=(GREEDY, msgspec.structs.replace(SAMPLED, seed=-78))))
    nudged, same = hash_of(stream(5), nudge)
    other, others = hash_of(stream(5), suppress=(tokens[2][-1],))
    assert seeded != plain
    assert other != plain
    assert others != tokens
    assert same == tokens
    assert (nudged != plain) is debug


def test_a_plan_without_rows_has_an_empty_result(runner: Runner) -> None:
    """Releases alone run no forward, and still move the hash."""
    result = run(runner, StepPlan(1))
    assert encoded([result]) == encoded([result_of(1, [])])
    assert runner.state_hash != 0


def test_nan_silences_its_row_alone(rank: Rank, runner: Runner) -> None:
    """A NaN in one sequence's pages flags that sequence's row from then on, without a token or logprobs, and no other."""
    plans = stream(5)
    clean = [run(build(rank, PAGES), plan) for plan in plans[:1]]
    results = [run(runner, plans[0])]
    next(iter(runner.slots.cache)).pool[:, 11] = torch.nan  # slot 2's first page
    results += [run(runner, plan) for plan in plans[1:]]
    assert encoded(results[:1]) == encoded(clean)
    for result in results[1:]:
        good, bad = result_rows(result)
        assert (good.slot, bad.slot) == (0, 2)
        assert not good.nan
        assert len(good.tokens) == 1
        assert bad.nan
        assert bad.tokens == ()
        assert not bad.logprobs


def test_a_slot_that_is_admitted_again_forgets(rank: Rank, runner: Runner) -> None:
    """A new tenant of a used slot, on the same pages, gets what it gets in an empty runner, under its own number."""
    for plan in stream(6):
        run(runner, plan)
    admission, pages = admit(0, 41, PROMPTS[0], GREEDY)
    plan = StepPlan(7, admissions=[admission], appends=pages, chunks=[PrefillChunk(0, 0, 7, 6)], rows=single_rows([2]))
    again = run(runner, plan).row(0)
    fresh = run(build(rank, PAGES), first_plan()).row(0)
    assert (again.slot, again.number) == (0, 41)
    assert again.tokens == fresh.tokens
    assert abs(again.logprobs[0].chosen - fresh.logprobs[0].chosen) < 1e-4


def test_suppressed_ids_are_not_sampled(rank: Rank) -> None:
    """config.suppress masks what the model would have said, and logprobs still know it."""
    best = run(build(rank, PAGES), first_plan()).row(0)
    other = run(with_config(rank, suppress=(best.tokens[0],)), first_plan()).row(0)
    assert other.tokens != best.tokens
    assert other.logprobs[0].top[0][0] == best.tokens[0]
    assert other.tokens[0] == other.logprobs[0].top[1][0]


def test_a_mask_holds_for_its_step_alone(rank: Rank, runner: Runner) -> None:
    """Masked rows of a prefill and of a decode step give an allowed id; what follows is what that id leads to, unmasked."""
    vocabulary = rank.geometry.vocab
    forced = {1: (2, 111), 3: (0, 222)}  # step -> slot, the one id that may come
    found = {}
    for plan in stream(6):
        if plan.step in forced:
            slot, token = forced[plan.step]
            bits = np.zeros((1, -(-vocabulary // 32)), np.int32)
            bits[0, token // 32] = 1 << token % 32
            runner.slots.adjustments.set_masks(plan.step, np.array([slot], np.int32), bits)
        found[plan.step] = {row.slot: row.tokens[0] for row in result_rows(run(runner, plan))}
    assert (found[1][2], found[3][0]) == (111, 222)
    for slot, prompt in ((2, PROMPTS[0]), (0, PROMPTS[1])):
        known = prompt + [found[step][slot] for step in range(1, 7)]
        params = GREEDY if slot == 2 else SAMPLED
        for end in range(len(prompt), len(known)):
            admission, pages = admit(1, 9, known[:end], params)
            plan = StepPlan(1, admissions=[admission], appends=pages, chunks=[PrefillChunk(1, 0, end, end - 1)])
            (row,) = result_rows(run(build(rank, PAGES), plan))
            masked = forced.get(end - len(prompt) + 1, (None, 0))[0] == slot
            assert (row.tokens == (known[end],)) is not masked, (slot, end)


def test_greedy_tokens_are_the_largest_adjusted_logits(rank: Rank, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through prefill, decodes and a return with all its tokens after a preemption, each token is the largest of the model's logits
    behind the formulas; as if nothing were adjusted it is not."""
    raw = []
    logits = runner.forward_stage.model.head.logits
    head = runner.forward_stage.model.head
    monkeypatch.setattr(head, "logits", lambda *at, **how: raw.append(logits(*at, **how)) or raw[-1].clone())
    prompt = PROMPTS[0]
    wanted = LogitAdjustments(
        repetition_penalty=1.4, frequency_penalty=1.5, presence_penalty=1.0, bias=((77, 3.0), (5, -float("inf"))), bad_words=((9,),)
    )
    sequence, plainly = AdjustedSequence(prompt, len(prompt), wanted), 0
    for step in range(1, 17):
        plan = StepPlan(step, rows=single_rows([2]))
        if step in (1, 9):
            admission, pages = admit(2, step, sequence.tokens, SamplingParams(max_tokens=99, adjustments=wanted))
            end = len(sequence.tokens)
            plan = StepPlan(
                step, admissions=[admission._replace(prompt=len(prompt))], appends=pages, chunks=[PrefillChunk(2, 0, end, end - 1)]
            )
        (token,) = run(runner, plan).row(0).tokens
        adjusted = sequence.logits(raw[-1][0], rank.geometry.softcap or 1e9)
        assert adjusted[token] > adjusted.max() - 1e-4, step
        plainly += token == int(raw[-1][0].argmax())
        sequence = sequence.longer(token)
    assert plainly < 12
