"""Adapters through the real processes, in fp32, against transformers with the adapter merged: two of them and the model itself at
once, the same prompts of each, with drafts, chunks and preemptions; then a prompt of each again, so that prefixes are found."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig, engine_config
from engine.geometry import kv_groups, read_geometry
from engine.protocol import SamplingParams
from tests.conftest import Nano
from tests.support.engine import drafters
from tests.support.engine.adapters import Recipe, merge, write
from tests.support.engine.drive import Answer, Figures, Request, ask_all, attached, booted, still
from tests.support.judge.near_tie import Match, compare
from tests.support.judge.oracle import judge, load_oracle

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("forked_groups")]

TOLERANCE = 1e-4  # fp32
FAULT = 100 * TOLERANCE
BUDGET = 48
GREEDY = SamplingParams(max_tokens=28, logprobs=5)
AGAIN = SamplingParams(max_tokens=6, logprobs=5)
LONGEST = 220
ADAPTERS = (-1, 0, 1)


@dataclass(frozen=True)
class Case:
    """A member with a drafter and two adapters; `oracles`: of each, the model itself last."""

    folder: Path
    drafter: Path
    adapters: dict[str, str]
    oracles: list[transformers.PreTrainedModel]
    prompts: list[list[int]]

    def config(self, tp: int) -> EngineConfig:
        """Full-attention pages for twice the longest sequence; six run at once."""
        geometry = read_geometry(self.folder)
        groups = kv_groups(geometry, tp, 16)
        pages = tuple(6 * (group.worst_pages(LONGEST) + 1) + 8 if group.window else 2 * LONGEST // 16 for group in groups)
        return engine_config(
            model=str(self.folder),
            tp=tp,
            device="cpu",
            dtype="float32",
            max_seqs=6,
            max_len=LONGEST,
            prefill_budget=BUDGET,
            page=16,
            pages=pages,
            mtp={"model": str(self.drafter), "drafts": 2},
            adapters=self.adapters,
        )

    def requests(self) -> list[Request]:
        """Each prompt of each adapter."""
        return [Request(prompt, GREEDY, adapter=adapter) for prompt in self.prompts for adapter in ADAPTERS]

    def compare(self, requests: list[Request], answers: list[Answer], shift: int = 0) -> Match:
        """All answers, added up; with `shift` against another adapter's."""
        total = Match()
        for request, answer in zip(requests, answers, strict=True):
            oracle = self.oracles[(request.adapter + 1 + shift) % len(ADAPTERS) - 1]
            verdict = judge(oracle, torch.tensor(request.prompt + answer.tokens))
            total += compare(request.prompt, answer, verdict)
        return total


@pytest.fixture(scope="module")
def case(nano: Nano, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @cache
    def make(member: str) -> Case:
        folder = nano(member)
        made = tmp_path_factory.mktemp("adapters")
        oracle = load_oracle(folder)
        recipes = {"first": Recipe(1, rank=64, alpha=64.0, experts="fused"), "second": Recipe(2, rank=1, alpha=2.0, experts="each")}
        adapters = {name: str(write(made / name, oracle, recipe)) for name, recipe in recipes.items()}
        drafter = drafters.fill(folder, made / "drafter")
        rng = random.Random(f"adapters {member}")
        vocab = read_geometry(folder).vocab
        prompts = [[rng.randrange(3, vocab) for _ in range(length)] for length in (150, 33, 100)]
        oracles = [merge(load_oracle(folder), Path(each)) for each in adapters.values()]
        return Case(folder, drafter, adapters, [*oracles, oracle], prompts)

    return make


@pytest.mark.parametrize(("member", "tp"), [("31b", 1), ("26b-a4b", 1), ("e2b", 2)])
def test_each_request_is_answered_by_its_adapter(case: Callable[[str], Case], member: str, tp: int) -> None:
    """Every greedy token is that of transformers with the request's adapter merged, and logprobs lie within 1e-4 of its; those of
    another adapter, or of the model itself, lie a hundred times further away."""
    it = case(member)
    requests = it.requests()
    again = [replace(request, params=AGAIN) for request in requests[3:6] * 2]

    async def drive() -> tuple[list[Answer], Figures]:
        async with attached(group) as (client, figures), asyncio.timeout(240):
            answers = await ask_all(client, requests, 6)
            answers += await ask_all(client, again, 1)
            await still(client)
            return answers, figures

    with booted(it.config(tp)) as group:
        answers, figures = asyncio.run(drive())
    match = it.compare(requests + again, answers)
    load = figures.last
    assert load is not None
    print(f"{member} TP={tp}: {match}; {load.preemptions} preemptions, {load.hit_tokens} tokens found in the cache")
    assert match.wrong == 0
    assert match.worst < TOLERANCE
    assert match.judged >= 0.3 * sum(request.params.max_tokens for request in requests + again)
    assert load.hit_tokens > 0
    assert load.preemptions > 0
    for shift in (1, 2):
        assert it.compare(requests[:3], answers[:3], shift).worst > FAULT
