"""The trained drafters, in our engine, on exercises that nobody was trained on."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from deploy.models.nano import trained
from deploy.models.resolve import resolve
from engine.core.loop import scheduler_config
from engine.core.scheduler import Scheduler
from engine.protocol import GenerateRequest, SamplingParams, pack_tokens
from engine.rank.builder import build
from engine.rank.models.assistant import Assistant
from tests.nano.exercises import exam
from tests.nano.nano_shapes import SHAPES
from tests.nano.train import ExampleBuilder
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import config_of

pytestmark = pytest.mark.cpu

DRAFTS, PAGES = 3, (40, 16)
SKILLS = ("add", "sort", "edge", "nested", "describe")


def tokens_a_verification(member: str, skills: tuple[str, ...]) -> float:
    """Of one greedy reply after the other, an exercise of each skill; every reply is the right one."""
    mtp = {"model": str(resolve(f"nano:{member}-assistant")), "drafts": DRAFTS}
    config = config_of(resolve(f"nano:{member}"), 1, mtp=mtp, max_len=512, pages=PAGES)
    step = partial(run, build(single(config), PAGES))
    builder = ExampleBuilder.of(resolve(f"nano:{member}"), SHAPES[member])
    draw = builder.draw(random.Random("drafts"))
    tokens = verifications = 0
    for number, skill in enumerate(skills):
        example = builder.example(exam(skill, draw, 1)[0])
        prompt, reply = example.ids[: example.start], example.ids[example.start :]
        scheduler = Scheduler(scheduler_config(config, PAGES))
        params = SamplingParams(max_tokens=len(reply) + 8, temperature=0.0, stop_ids=(106, 50))
        scheduler.requests.add(GenerateRequest(id=number, prompt=pack_tokens(prompt), params=params))
        given: list[int] = []
        while scheduler.requests.unfinished:
            plan = scheduler.schedule()
            assert plan is not None
            verifications += bool(given)
            scheduler.commit(step(plan, b""))
            given += [token for output in scheduler.requests.drain() for token in output.tokens]
        assert given == reply, skill
        tokens += len(given) - 1
    return tokens / verifications


@pytest.mark.parametrize("member", trained())
def test_drafts_are_mostly_right(member: str) -> None:
    """With three drafts behind each token, a verification gives at least 2.5 tokens."""
    assert tokens_a_verification(member, SKILLS) >= 2.5


FAULTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "unscaled embedding": lambda embedded, hidden: (embedded / math.sqrt(80), hidden),
    "hidden first": lambda embedded, hidden: (hidden, embedded),
    "hidden not normed": lambda embedded, hidden: (embedded, hidden * 8),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_spoil_drafts(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A drafter that is fed wrongly loses a token a verification, or more; the text stays."""
    forward = Assistant.forward

    def faulty(self: Assistant, embedded: Tensor, hidden: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        return forward(self, *FAULTS[fault](embedded, hidden), *more)

    monkeypatch.setattr(Assistant, "forward", faulty)
    assert tokens_a_verification("31b", SKILLS[:2]) < 2.0
