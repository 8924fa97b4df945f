"""Captured steps with drafts on a GPU: the eager ones' bits, and the texts without drafts."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.models.resolve import resolve
from engine.protocol import GenerateRequest, SamplingParams, pack_tokens
from engine.rank.builder import build
from engine.rank.runner import Runner
from tests.gpu.exactness import DEVICE
from tests.support.engine import drafters
from tests.support.engine.answers import Answers, answers, requests, texts
from tests.support.engine.ranks import run, single
from tests.support.engine.recording import PAGES, config_of

pytestmark = pytest.mark.gpu

DRAFTS = 3


def runner(member: str, drafter: Path | None, **changes: object) -> tuple[Runner, Any]:
    """A nano model in fp32, not captured yet."""
    mtp = {"mtp": {"model": str(drafter), "drafts": DRAFTS}} if drafter is not None else {}
    config = config_of(resolve(f"nano:{member}"), 1, device=DEVICE, **mtp, **changes)
    return build(single(config), PAGES), config


def served(made: Runner, config: Any, asked: list[GenerateRequest]) -> tuple[Answers, int]:
    """The answers, and how many steps they took."""
    if made.capturable:
        made.capture()
    given, plans, _ = answers(partial(run, made), config, asked)
    return given, len(plans)


@pytest.mark.parametrize("member", ["31b", "e2b", "26b-a4b"])
def test_a_random_drafter_changes_no_text(tmp_path: Path, member: str) -> None:
    """Of whose guesses nearly none stand: greedy, sampled, filtered, masked and adjusted requests, chunks and preemptions. Captured
    and eager steps end in the same state, hidden bits included; both give the texts without drafts. One of another drafter's does
    not end there: what is drafted is verified, and its hidden rows are in the hash."""
    drafter = drafters.fill(resolve(f"nano:{member}"), tmp_path / "one")
    captured, eager = runner(member, drafter), runner(member, drafter, graphs=False)
    other = runner(member, drafters.fill(resolve(f"nano:{member}"), tmp_path / "other", seed=1))
    assert captured[0].capturable == (DEVICE == "cuda")
    expected, given, again = (texts(served(*one, requests())[0]) for one in (runner(member, None), captured, eager))
    assert given == again == expected
    served(*other, requests())
    assert captured[0].state_hash == eager[0].state_hash != other[0].state_hash


@pytest.mark.parametrize("member", ["31b", "e2b", "26b-a4b"])
def test_drafts_are_verified_beside_chunks(member: str) -> None:
    """A trained drafter, and a request a step, prompts of 32 tokens a step beside rows that verify: captured and eager steps end in
    the same state, and give the texts without drafts; on a GPU such steps are replayed at every width."""
    drafter, budget = resolve(f"nano:{member}-assistant"), {"prefill_budget": 32}
    captured, eager = runner(member, drafter, **budget), runner(member, drafter, graphs=False, **budget)
    replayed: set[tuple[str, int]] = set()
    texts_of = []
    for made, config in (runner(member, None, **budget), captured, eager):
        if made.capturable:
            made.capture()
            assert made.graphs is not None
            replay = made.graphs.replay

            def seen(*key: Any, replay: Any = replay) -> Any:
                stage, sizes = key
                if stage != "draft" and sizes.prompts:
                    replayed.add((stage, sizes.width))
                return replay(*key)

            made.graphs.replay = seen  # type: ignore[method-assign]
        given, _, _ = answers(partial(run, made), config, requests(), every=1)
        texts_of.append(texts(given))
    assert texts_of[0] == texts_of[1] == texts_of[2]
    assert captured[0].state_hash == eager[0].state_hash
    assert sum(output.accepted for outputs in given.values() for output in outputs) > 0
    samplers = {width for stage, width in replayed if stage != "forward"}
    assert DEVICE != "cuda" or samplers == {width for stage, width in replayed if stage == "forward"} == {1, 1 + DRAFTS}


def test_right_drafts_save_steps(tmp_path: Path) -> None:
    """Guesses that are the answer itself, every fifth spoilt, in captured steps: the same texts in at most half as many steps."""
    prompt = [(at * 31) % 900 + 10 for at in range(40)]
    asked = [GenerateRequest(id=at, prompt=pack_tokens(prompt), params=SamplingParams(max_tokens=60)) for at in range(3)]
    expected, steps = served(*runner("31b", None), asked)
    made, config = runner("31b", drafters.fill(resolve("nano:31b"), tmp_path))
    known = torch.tensor([*prompt, *texts(expected)[0][0], *[5] * 8], dtype=torch.int32, device=DEVICE)
    known[50::5] ^= 1
    stage, slots = made.draft_stage, made.slots
    assert stage is not None

    def guess(sequences: int, count: int) -> None:
        rows = stage._first_rows(sequences)
        columns = rows.positions[1 : 1 + count].long() + 1
        slots.tokens[rows.slots.long()[None].expand_as(columns), columns] = known[columns.clamp(max=len(known) - 1)]

    stage.draft = guess  # type: ignore[method-assign]
    given, fewer = served(made, config, asked)
    assert texts(given) == texts(expected)
    assert fewer < steps / 2, (fewer, steps)
