"""The trained drafters, in our engine, on exercises that nobody was trained on."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deploy.models.nano import trained
from deploy.models.resolve import resolve
from engine.geometry import Geometry, Layer
from engine.protocol import SamplingParams
from engine.rank.batch import ForwardBatch
from engine.rank.builder import build
from engine.rank.models import assistant_geometry
from engine.rank.models.assistant import Assistant, DenseHead, OrderedHead
from engine.rank.models.gemma4 import LayerStep
from engine.rank.stages import draft_stage
from engine.rank.step import StepBuffers
from kernels.accept import DraftInputs, Verified, accept
from tests.nano.nano_shapes import SHAPES
from tests.support.engine.answers import answers
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import config_of
from tests.support.engine.scheduling import request_of
from training.exercises import exam
from training.train import ExampleBuilder

pytestmark = pytest.mark.cpu

DRAFTS, PAGES = 3, (120, 80)
SKILLS = ("add", "sort", "edge", "nested", "describe")


def tokens_a_verification(member: str, skills: tuple[str, ...]) -> float:
    """Of greedy replies, an exercise of each skill; every reply is the right one."""
    mtp = {"model": str(resolve(f"nano:{member}-assistant")), "drafts": DRAFTS}
    config = config_of(resolve(f"nano:{member}"), 1, mtp=mtp, max_len=512, pages=PAGES)
    step = partial(run, build(single(config), PAGES))
    builder = ExampleBuilder.of(resolve(f"nano:{member}"), SHAPES[member])
    draw = builder.draw(random.Random("drafts"))
    examples = [builder.example(exam(skill, draw, 1)[0]) for skill in skills]
    params = SamplingParams(max_tokens=200, temperature=0.0, stop_ids=(106, 50))
    asked = [request_of(at, example.ids[: example.start], params) for at, example in enumerate(examples)]
    given, _, _ = answers(step, config, asked)
    steps = [[output.tokens for output in given[at] if output.tokens] for at in range(len(examples))]
    assert [list(chain(*outputs)) for outputs in steps] == [example.ids[example.start :] for example in examples]
    return sum(len(list(chain(*outputs))) - 1 for outputs in steps) / sum(len(outputs) - 1 for outputs in steps)


@pytest.mark.parametrize("member", trained())
def test_drafts_are_mostly_right(member: str) -> None:
    """With three drafts behind each token, a verification gives at least 2.5 tokens."""
    assert tokens_a_verification(member, SKILLS) >= 2.5


Plant = Callable[[pytest.MonkeyPatch], None]


def fed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """Other rows of the token's embedding and of the hidden row."""
    forward = Assistant.forward

    def faulty(self: Assistant, embedded: Tensor, hidden: Tensor, *more: Any) -> Tensor:
        return forward(self, *change(embedded, hidden), *more)

    return lambda patch: patch.setattr(Assistant, "forward", faulty)


def reads(change: Callable[[ForwardBatch], ForwardBatch], turned: float = 1) -> Plant:
    """Other pages, or queries turned as at other positions."""
    drafting = StepBuffers.drafting

    def faulty(self: StepBuffers, slots: Tensor, positions: Tensor, at: Tensor) -> ForwardBatch:
        return change(drafting(self, slots, positions, (at * turned).int()))

    return lambda patch: patch.setattr(StepBuffers, "drafting", faulty)


def first_layers(patch: pytest.MonkeyPatch) -> None:
    def first(layer: Layer, target: Geometry, _: Path) -> int:
        return next(other.index for other in target.layers if other.kind == layer.kind)

    patch.setattr(assistant_geometry, "_source", first)


def none_stood(patch: pytest.MonkeyPatch) -> None:
    def faulty(rows: Verified, stop: Tensor, lengths: Tensor, padding: int, out: DraftInputs) -> Tensor:
        accepted = accept(rows, stop, lengths, padding, out)
        out.hidden[: len(rows.chosen) // rows.width] = rows.hidden[:: rows.width]
        return accepted

    patch.setattr(draft_stage, "accept", faulty)


def hidden_once(patch: pytest.MonkeyPatch) -> None:
    """Each pass has what the first one began with."""
    forward, begun = Assistant.forward, dict[str, Any]()

    def faulty(self: Assistant, embedded: Tensor, hidden: Tensor, step: LayerStep) -> Tensor:
        if begun.get("step") is not step:
            begun.update(step=step, hidden=hidden)
        return forward(self, embedded, begun["hidden"], step)

    patch.setattr(Assistant, "forward", faulty)


def other_heads(patch: pytest.MonkeyPatch) -> None:
    """The rows that a head chooses by are not those that the drafter made."""
    for head in (DenseHead, OrderedHead):

        def faulty(self: Any, rows: Tensor, *more: Any, forward: Any = head.forward) -> Tensor:
            return forward(self, rows.roll(1, dims=1).contiguous(), *more)

        patch.setattr(head, "forward", faulty)


FAULTS: dict[str, Plant] = {
    "unscaled embedding": fed(lambda embedded, hidden: (embedded / math.sqrt(80), hidden)),
    "hidden first": fed(lambda embedded, hidden: (hidden, embedded)),
    "hidden not normed": fed(lambda embedded, hidden: (embedded, hidden * 8)),
    "no hidden row": fed(lambda embedded, hidden: (embedded, hidden * 0)),
    "one hidden row for all passes": hidden_once,
    "the hidden row of a block's first token": none_stood,
    "K and V of the first layers": first_layers,
    "the first group's pages for all layers": reads(lambda batch: replace(batch, pages=batch.pages[:1] * len(batch.pages))),
    "each group's pages for the other": reads(lambda batch: replace(batch, pages=batch.pages[::-1])),
    "queries that are not turned": reads(lambda batch: batch, turned=0),
    "a head of other rows": other_heads,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_spoil_drafts(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A drafter that is fed wrongly loses a token a verification, or more, of four on nested arguments; the text stays."""
    FAULTS[fault](monkeypatch)
    assert tokens_a_verification("31b", ("nested",)) <= 3.0


def test_nested_arguments_are_guessed() -> None:
    """All three drafts, always, where nothing is wrong."""
    assert tokens_a_verification("31b", ("nested",)) == 4.0
