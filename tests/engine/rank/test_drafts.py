"""Steps that verify drafts give what steps of single tokens give, whatever is drafted."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from deploy.models.resolve import resolve
from engine.config import EngineConfig
from engine.logit_adjustments import LogitAdjustments
from engine.plan import StepPlan, StepResult
from engine.protocol import FinishReason, GenerateRequest
from engine.rank.adjustments import Adjustments
from engine.rank.builder import build
from engine.rank.runner import Runner
from engine.rank.stages import draft_stage
from kernels.accept import Verified, accept
from tests.conftest import Nano
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.answers import Answers, RunStep, answers, requests, texts
from tests.support.engine.drafting_world import AnyDrafts
from tests.support.engine.ranks import Ranks, run, single
from tests.support.engine.recording import PAGES, config_of, constrained, request
from tests.support.judge import assistants

pytestmark = pytest.mark.cpu

DRAFTS = 3
@pytest.fixture(scope="module")
def plain(nano: Nano) -> Callable[[str], Answers]:
    def served(member: str) -> Answers:
        config = config_of(nano(member), 1)
        return answers(partial(run, build(single(config), PAGES)), config, requests())[0]

    return served


def drafting(nano: Nano, member: str, folder: Path, drafts: int | str = DRAFTS) -> tuple[Runner, Any]:
    assistants.write(SHAPES[member], folder)
    config = config_of(nano(member), 1, mtp={"model": str(folder), "drafts": drafts})
    return build(single(config), PAGES), config


@pytest.mark.parametrize("member", ["e4b", "12b", "31b"])  # the other two: any number from step to step
def test_drafts_change_no_text(nano: Nano, plain: Callable[[str], Answers], tmp_path: Path, member: str) -> None:
    """A random drafter, whose guesses are nearly all wrong: tokens, finishes and logprobs are those without."""
    runner, config = drafting(nano, member, tmp_path)
    given, plans, _ = answers(partial(run, runner), config, requests())
    assert texts(given) == texts(plain(member))
    assert max(row[1] for plan in plans for row in zip(*[iter(plan.rows)] * 3, strict=True)) == 1 + DRAFTS


@pytest.mark.parametrize("member", ["e2b", "26b-a4b"])
def test_any_number_of_drafts_from_step_to_step(nano: Nano, plain: Callable[[str], Answers], tmp_path: Path, member: str) -> None:
    """auto: none in some steps, seven in others, and rows that verify fewer than were made behind them."""
    runner, config = drafting(nano, member, tmp_path, "auto")
    given, plans, _ = answers(partial(run, runner), config, requests(), drafting=AnyDrafts(config.drafts, (16,), 3))
    assert texts(given) == texts(plain(member))
    assert {plan.drafts for plan in plans} == set(config.drafts)


MANY, AT_ONCE, LENGTH = 34_000, 16, 300


def mixed_requests(count: int) -> list[GenerateRequest]:
    """Greedy, sampled and filtered ones, every fourth with stop ids, every fifth with penalties, every tenth under a grammar."""
    asked = [request(number, (LENGTH,) * 4) for number in range(count)]
    penalties = LogitAdjustments(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
    for number in range(0, count, 5):
        params = msgspec.structs.replace(asked[number].params, adjustments=penalties)
        asked[number] = msgspec.structs.replace(asked[number], params=params)
    return [constrained(one.id) if one.id % 10 == 7 else one for one in asked]


@contextmanager
def stepping(config: EngineConfig) -> Iterator[RunStep]:
    """One rank here, or as many processes."""
    if config.tp == 1:
        yield partial(run, build(single(config), config.pages))
        return
    with Ranks(config) as ranks:
        ranks.boot(config.pages)

        def step(plan: StepPlan, masks: bytes) -> StepResult:
            ranks.submit(plan, masks)
            return ranks.result()

        yield step


def same_with_drafts(member: str, tp: int, asked: list[GenerateRequest], seed: int) -> tuple[int, int, int]:
    """Tokens, drafts among them, and preemptions; every tenth request is given up, and equal as far as it came."""
    model, assistant = (str(resolve(f"nano:{name}")) for name in (member, f"{member}-assistant"))
    aborted = [one.id for one in asked if one.id % 10 == 4]
    runs = []
    for mtp in ({}, {"mtp": {"model": assistant, "drafts": "auto"}}):
        sizes = {"max_seqs": AT_ONCE, "max_len": 512, "prefill_budget": 64, "pages": (100, 50), "debug_hash": False}
        config = config_of(Path(model), tp, **sizes, **mtp)
        drafting = AnyDrafts(range(8), (AT_ONCE,), seed) if mtp else None
        with stepping(config) as step:
            runs.append(answers(step, config, asked, aborted=aborted, drafting=drafting))
    (expected, _, _), (given, _, preemptions) = runs
    for number, (tokens, finish, logprobs) in texts(expected).items():
        others, *end = texts(given)[number]
        assert all(map(eq, tokens, others)), number
        assert number in aborted or (len(others), *end) == (len(tokens), finish, logprobs), number
    tokens = sum(len(one.tokens) for outputs in given.values() for one in outputs)
    return tokens, sum(one.accepted for outputs in given.values() for one in outputs), preemptions


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("member", "tp"), [("e2b", 1), ("26b-a4b", 2), ("31b", 4)])
def test_many_tokens_are_those_without_drafts(member: str, tp: int) -> None:
    """Of three members together 10^5 tokens, of trained models with their drafters, any number of drafts from step to step, with
    chunks, preemptions and aborts: not one differs."""
    tokens, accepted, preemptions = same_with_drafts(member, tp, mixed_requests(MANY // LENGTH * 3 // 2), 5)
    print(f"{member}, {tp} ranks: {tokens} tokens, {accepted} of them drafts, {preemptions} preemptions")
    assert tokens > MANY * 0.9
    assert accepted > tokens / 100
    assert preemptions > 0


def test_drafts_through_preemptions_and_aborts(nano: Nano, tmp_path: Path) -> None:
    """Requests that come at once, more than the pages hold, one of them given up: those that end have the texts without drafts."""
    runner, config = drafting(nano, "31b", tmp_path)
    alone, asked = config_of(nano("31b"), 1), [request(number, (100, 90, 80, 100)) for number in range(6)]
    expected, _, _ = answers(partial(run, build(single(alone), PAGES)), alone, asked, every=1, aborted=(0,))
    given, _, preemptions = answers(partial(run, runner), config, asked, every=1, aborted=(0,))
    ends = {number: text for number, text in texts(given).items() if number}
    assert ends == {number: text for number, text in texts(expected).items() if number}
    assert given[0][-1].finish is FinishReason.abort
    assert preemptions > 0


@pytest.mark.parametrize(("member", "tp"), [("e4b", 2), ("31b", 4)])
def test_ranks_draft_alike(nano: Nano, plain: Callable[[str], Answers], tmp_path: Path, member: str, tp: int) -> None:
    """Several ranks, each with its part of the drafter, or all of an ordered head: one rank's texts, and equal states."""
    assistants.write(SHAPES[member], tmp_path)
    config = config_of(nano(member), tp, mtp={"model": str(tmp_path), "drafts": DRAFTS})
    with Ranks(config) as ranks:
        ranks.boot(PAGES)

        def step(plan: StepPlan, masks: bytes) -> StepResult:
            ranks.submit(plan, masks)
            return ranks.result()

        given, plans, _ = answers(step, config, requests())
        assert len(set(ranks.hashes(plans[-1].step))) == 1
    assert texts(given) == texts(plain(member))


@pytest.mark.parametrize(("drafts", "right"), [(1, 1.0), (3, 0.7), (7, 1.0)])
def test_right_drafts_save_steps(
    nano: Nano, plain: Callable[[str], Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: int, right: float
) -> None:
    """Guesses that are the answer itself, some of them spoilt: the same texts in fewer steps, under grammars too. Masks that are
    shifted within a row, and guesses taken without a look at what was sampled, change the texts."""
    runner, config = drafting(nano, "31b", tmp_path, drafts)
    expected = plain("31b")
    known = {request.id: [*memoryview(request.prompt).cast("i"), *texts(expected)[request.id][0]] for request in requests()}
    rng = random.Random(5)

    stage, slots = runner.draft_stage, runner.slots
    assert stage is not None

    def guesses(sequences: int, _: int) -> None:
        rows = stage._first(sequences)
        for slot in rows.slots[rows.positions[0] >= 0].tolist():
            length = int(slots.lengths[slot])
            begun = slots.tokens[slot, : length + 1].tolist()
            for whole in known.values():
                if whole[: length + 1] == begun:
                    ahead = (whole[length + 1 :] + [5] * drafts)[:drafts]
                    ahead = [token if rng.random() < right else token ^ 1 for token in ahead]
                    slots.tokens[slot, length + 1 : length + 1 + drafts] = torch.tensor(ahead)

    monkeypatch.setattr(stage, "draft", guesses)
    given, plans, _ = answers(partial(run, runner), config, requests())
    assert texts(given) == texts(expected)
    under_grammars = sum(one.accepted for number in (7, 9) for one in given[number])
    assert under_grammars >= (10 if right == 1 and drafts > 1 else 1), under_grammars
    longest = max(len(tokens) for tokens, _, _ in texts(given).values())
    assert right < 1 or len(plans) < 45 + 2 * longest / (1 + drafts)

    honest = Adjustments.set_masks
    with monkeypatch.context() as patch:

        def shifted(self: Adjustments, step: int, slots: np.ndarray, bits: np.ndarray, after: Any) -> None:
            rolled = [np.roll(bits[slots == slot], 1, axis=0) for slot in dict.fromkeys(slots)]
            honest(self, step, slots, np.concatenate(rolled or [bits]), after)

        patch.setattr(Adjustments, "set_masks", shifted)
        assert texts(answers(partial(run, runner), config, requests())[0]) != texts(expected)

    def unseen(rows: Verified, *rest: Any) -> Tensor:
        sampled = rows.chosen[:, 0].view(-1, rows.width).roll(1, 1)
        return accept(rows._replace(ids=sampled.flatten()), *rest)

    monkeypatch.setattr(draft_stage, "accept", unseen)
    assert right == 1 or texts(answers(partial(run, runner), config, requests())[0]) != texts(expected)
