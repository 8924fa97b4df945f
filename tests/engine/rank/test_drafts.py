"""Steps that verify drafts give what steps of single tokens give, whatever is drafted."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from deploy.models.nano import trained
from deploy.models.resolve import resolve
from engine.config import EngineConfig
from engine.logit_adjustments import LogitAdjustments
from engine.plan import StepPlan, StepResult
from engine.protocol import FinishReason, GenerateRequest, pack_tokens
from engine.rank.adjustments import Adjustments
from engine.rank.builder import build, load_rank
from engine.rank.parallel import Single
from engine.rank.runner import Runner
from engine.rank.stages import draft_stage
from kernels.accept import Verified, accept
from tests.conftest import Nano
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.answers import RunStep, answers, requests, texts
from tests.support.engine.drafting_world import AnyDrafts
from tests.support.engine.plans import result_rows
from tests.support.engine.quantised import saved, widths_of
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import PAGES, config_of, constrained, request
from tests.support.engine.threads import run_ranks
from tests.support.judge import assistants
from training.exercises import exam
from training.train import ExampleBuilder

pytestmark = pytest.mark.cpu

AT_ONCE, LENGTH, RIGHT = 32, 96, 0.8
SKILLS = ("story", "think", "describe", "json", "sort", "edge")
CALL = 48  # the token that opens a tool call


def mixed_requests(member: str, numbers: range, length: int = LENGTH) -> list[GenerateRequest]:
    """Greedy, sampled and filtered ones, every fourth with stop ids, every fifth with penalties, every tenth under a grammar. A
    trained member's are exercises, all but every third: its drafter is right there, and a tool call opens the grammar."""
    asked = [request(number, (length, length * 5 // 3, length, length)) for number in numbers]
    penalties = LogitAdjustments(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
    examples = ExampleBuilder.of(resolve(f"nano:{member}"), SHAPES[member]) if member in trained() else None
    for at, one in enumerate(asked):
        limited = constrained(one.id) if one.id % 10 == 7 else one
        params = limited.params
        if one.id % 5 == 0:
            params = msgspec.structs.replace(params, adjustments=penalties)
        prompt = one.prompt
        if examples is not None and one.id % 3:
            skill = "call" if params.grammar else SKILLS[one.id % len(SKILLS)]
            draw = examples.draw(random.Random(one.id))
            example = examples.example(exam(skill, draw, 1)[0])
            prompt = pack_tokens(example.ids[: example.start])
            if params.grammar and params.grammar.trigger is not None:
                params = msgspec.structs.replace(params, grammar=msgspec.structs.replace(params.grammar, trigger=CALL))
        asked[at] = msgspec.structs.replace(one, prompt=prompt, params=params)
    return asked


@contextmanager
def stepping(config: EngineConfig, plant: Callable[[Runner], None] = lambda _: None) -> Iterator[RunStep]:
    """One rank, or as many in threads, which must give the same."""
    device = torch.device("cpu")
    groups = [Single()] if config.tp == 1 else run_ranks(config.tp, lambda parallel: parallel)
    runners = run_ranks(config.tp, lambda at: build(load_rank(config, groups[at.rank], device), config.pages))
    for runner in runners:
        plant(runner)

    def step(plan: StepPlan, masks: bytes) -> StepResult:
        first, *others = run_ranks(config.tp, lambda at: run(runners[at.rank], plan, masks))
        assert all(result_rows(other) == result_rows(first) for other in others)
        return first

    yield step
    assert len({runner.state_hash for runner in runners}) == 1


def guessing(whole: Iterable[Sequence[int]], right: float, runner: Runner) -> None:
    """Write over the drafts: tokens of these whole texts that are to come, each right by that chance. No two begin alike."""
    stage, slots, rng = runner.draft_stage, runner.slots, random.Random(5)
    known = {text[0]: text for text in whole}
    assert stage is not None
    own = stage.draft

    def draft(sequences: int, count: int) -> None:
        own(sequences, count)
        rows = stage._first_rows(sequences)
        for slot in rows.slots[rows.positions[0] >= 0].tolist():
            length = int(slots.lengths[slot])
            whole = known[int(slots.tokens[slot, 0])]
            if list(whole[: length + 1]) == slots.tokens[slot, : length + 1].tolist():
                ahead = [*whole[length + 1 : length + 1 + count], *[5] * count][:count]
                ahead = [token if rng.random() < right else token ^ 1 for token in ahead]
                slots.tokens[slot, length + 1 : length + 1 + count] = torch.tensor(ahead)

    stage.draft = draft  # type: ignore[method-assign]


def same_with_drafts(
    member: str,
    tp: int,
    asked: list[GenerateRequest],
    folder: Path,
    seed: int = 5,
    pages: tuple[int, int] = (112, 40),
    **settings: str,
) -> Counter[str]:
    """Every tenth request is given up, and equal as far as it came. A member without a trained drafter gets guesses of its text.
    What was seen is counted: masked tokens are those under a grammar."""
    aborted = [one.id for one in asked if one.id % 10 == 4]
    runs = []
    plant = lambda _: None  # noqa: E731
    for mtp in ({}, {"mtp": {"model": str(folder / "assistant"), "drafts": 8}}):
        sizes = {"max_seqs": AT_ONCE, "prefill_budget": 256, "max_len": 320, "pages": pages, "debug_hash": False}
        config = config_of(folder, tp, **settings, **sizes, **mtp)
        drafting = AnyDrafts(range(9), (AT_ONCE,), seed) if mtp else None
        if mtp and member not in trained():
            whole = [[*memoryview(one.prompt).cast("i"), *texts(runs[0][0])[one.id][0]] for one in asked]
            plant = partial(guessing, whole, RIGHT)
        with stepping(config, plant) as step:
            runs.append(answers(step, config, asked, every=1, aborted=aborted, drafting=drafting))
    (expected, _, _), (given, _, preemptions) = runs
    compared = Counter(preemptions=preemptions)
    for one in asked:
        (tokens, *end), (others, *ended) = texts(expected)[one.id], texts(given)[one.id]
        assert all(map(eq, tokens, others)), one.id
        assert one.id in aborted or (len(others), *ended) == (len(tokens), *end), one.id
        compared.update(
            aborted=ended[0] is FinishReason.abort,
            tokens=len(others),
            accepted=sum(output.accepted for output in given[one.id]),
            masked=len(others) if one.params.grammar else 0,
        )
    return compared


EVERY = [("e2b", 1), ("26b-a4b", 2), ("31b", 4), ("e4b", 2), ("12b", 1)]


@pytest.mark.parametrize(("member", "tp"), EVERY[:3])
def test_text_is_that_without_drafts(nano: Nano, tmp_path: Path, member: str, tp: int) -> None:
    """Any number of drafts from step to step, right and wrong ones, with chunks, aborts, grammars, penalties and stop ids, on ranks
    that must agree; more than the pages hold, so that some are preempted."""
    asked = mixed_requests(member, range(3, 10), 24)
    compared = same_with_drafts(member, tp, asked, folder_of(nano, tmp_path, member), pages=(26, 9))
    assert compared["accepted"] > compared["tokens"] / 10
    assert min(compared["aborted"], compared["masked"]) > 0
    assert compared["preemptions"] > 0 or member not in ("31b", "26b-a4b")


KEPT = "nvfp4, kept"  # in four bits
FAST = [(KEPT, "31b", 2, "auto"), ("channel", "e2b", 2, "auto"), ("int4-32", "31b", 1, "fp8"), ("plain", "e2b", 2, "fp8")]
FORMATS = [
    *FAST,
    *((kind, "31b", 1, "auto") for kind in ("int8", "tensor", "nvfp4", "blocks", "mixed")),
    *(("channel", "26b-a4b", 1, "auto"), ("int8", "26b-a4b", 2, "auto"), ("int4-32", "26b-a4b", 2, "auto")),
    *((KEPT, "26b-a4b", 2, "auto"), ("nvfp4", "e2b", 2, "auto"), ("int4-32", "e2b", 1, "auto")),
]


@pytest.mark.parametrize(
    ("kind", "member", "tp", "kv_dtype"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in FORMATS]
)
def test_text_in_each_format_is_that_without_drafts(
    tmp_path: Path, kind: str, member: str, tp: int, kv_dtype: str
) -> None:
    """Rows that verify drafts are rounded as rows of single tokens are. The drafter reads the target's FP8 pages as they are, and
    pages that are taken back and filled again hold the same numbers."""
    folder = resolve(f"nano:{member}")
    if kind != "plain":
        widths = widths_of(folder) if kind.startswith("int4") else {}
        ignore = tuple(name for name, width in widths.items() if width % (64 * tp))
        folder = saved(folder, tmp_path / "saved", kind=kind.partition(",")[0], ignore=ignore)
    settings = {"kv_dtype": kv_dtype, "weights": "nvfp4" if kind == KEPT else "auto"}
    compared = same_with_drafts(member, tp, mixed_requests(member, range(3, 10), 24), folder, pages=(30, 10), **settings)
    print(f"{member} {kind} TP={tp}: {compared}")
    assert compared["accepted"] > compared["tokens"] / 10


def folder_of(nano: Nano, out: Path, member: str) -> Path:
    """A trained member with its drafter, or a random one with a drafter that is written into `out`."""
    if member in trained():
        return resolve(f"nano:{member}")
    folder = out / member
    shutil.copytree(nano(member), folder)
    assistants.write(SHAPES[member], folder / "assistant")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("member", "tp"), EVERY)
def test_many_tokens_are_those_without_drafts(nano: Nano, tmp_path: Path, member: str, tp: int) -> None:
    """Of all members together 10^5 tokens: not one differs."""
    folder, compared = folder_of(nano, tmp_path, member), Counter[str]()
    for first in range(0, 600, 100):
        compared += same_with_drafts(member, tp, mixed_requests(member, range(first, first + 100)), folder, first)
        print(f"{member}, {tp} ranks: {compared}", flush=True)
        if compared["tokens"] > 20_000:
            break
    assert compared["tokens"] > 20_000
    assert compared["preemptions"] > 0


@pytest.mark.parametrize(("drafts", "right"), [(1, 1.0), (3, 0.7), (8, 1.0)])
def test_right_drafts_save_steps(
    nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: int, right: float
) -> None:
    """Guesses that are the answer itself, some of them spoilt: the same texts in fewer steps, under grammars too. Masks that are
    shifted within a row, and guesses taken without a look at what was sampled, change the texts."""
    assistants.write(SHAPES["31b"], tmp_path)
    alone, config = config_of(nano("31b"), 1), config_of(nano("31b"), 1, mtp={"model": str(tmp_path), "drafts": drafts})
    expected, _, _ = answers(partial(run, build(single(alone), PAGES)), alone, requests())
    whole = [[*memoryview(one.prompt).cast("i"), *texts(expected)[one.id][0]] for one in requests()]
    runner = build(single(config), PAGES)
    guessing(whole, right, runner)
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
