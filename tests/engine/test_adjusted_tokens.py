"""Adjusted logits through the real processes at TP 1, 2 and 4, once with so few pages that sequences are preempted: tokens do not
depend on it, and greedy ones are the largest of transformers' logits behind the formulas.
"""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.group import Group
from engine.config import EngineConfig, engine_config
from engine.geometry import kv_groups, read_geometry
from engine.logit_adjustments import LogitAdjustments
from engine.protocol import SamplingParams
from tests.conftest import Nano
from tests.support.engine.adjusted_logits import AdjustedSequence
from tests.support.engine.drive import Answer, Request, ask_all, attached, booted, still
from tests.support.judge.oracle import judge, load_oracle

pytestmark = [pytest.mark.cpu, pytest.mark.slow]  # three groups

REQUESTS, TOKENS, LONGEST = 12, 40, 160
TIE = 1e-3  # logits nearer than this may fall either way


def adjustments(rng: random.Random, vocabulary: int, prompt: list[int]) -> LogitAdjustments:
    """Strong enough to change tokens, of ids that come."""
    ids = rng.sample(range(3, vocabulary), 20)
    return LogitAdjustments(
        repetition_penalty=rng.choice([1.0, 1.25, 1.5]),
        presence_penalty=rng.choice([0.0, 0.75, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.5, 2.0]),
        bias=tuple((token, rng.choice([-float("inf"), 4.0, -4.0])) for token in ids),
        allowed_ids=tuple({*prompt, *rng.sample(range(3, vocabulary), 300)}) if rng.random() < 0.5 else (),
        bad_words=tuple(tuple(rng.choices(prompt, k=size)) for size in (1, 2, 3)),
    )


def requests(vocabulary: int) -> list[Request]:
    """Greedy, drawn and filtered ones, two thirds of them adjusted."""
    rng, made = random.Random(11), []
    for at in range(REQUESTS):
        prompt = [rng.randrange(3, vocabulary) for _ in range(rng.randint(40, LONGEST - TOKENS))]
        kind = ({}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20})[at // 2 % 3]
        wanted = None if at % 3 == 2 else adjustments(rng, vocabulary, prompt)
        made.append(Request(prompt, SamplingParams(max_tokens=TOKENS, seed=at, adjustments=wanted, **kind)))
    return made


def config(folder: Path, tp: int, *, tight: bool) -> EngineConfig:
    page, groups = 16, kv_groups(read_geometry(folder), tp, 16)
    full = (2 if tight else REQUESTS) * LONGEST // page + 2
    pages = tuple(REQUESTS * (group.worst_pages(LONGEST) + 1) + 4 if group.window else full for group in groups)
    return engine_config(
        model=str(folder), tp=tp, device="cpu", dtype="float32", max_seqs=REQUESTS, max_len=LONGEST, prefill_budget=96, page=page,
        pages=pages, prefix_cache=False,
    )  # fmt: skip


def answers(settings: EngineConfig, asked: list[Request]) -> tuple[list[Answer], int]:
    """Of all requests at once, and how many sequences were preempted."""

    async def main(group: Group) -> tuple[list[Answer], int]:
        async with attached(group) as (client, _), asyncio.timeout(240):
            given = await ask_all(client, asked, len(asked))
            return given, (await still(client)).preemptions

    with booted(settings) as group:
        return asyncio.run(main(group))


def test_tokens_depend_on_neither_ranks_nor_preemptions(nano: Nano) -> None:
    """TP 1, 2 and 4 give the same tokens, with and without preemptions; each greedy one is the largest of transformers' logits,
    adjusted. With the prompt counted as generated, or as if nothing were adjusted, they are not."""
    folder = nano("31b")
    asked = requests(read_geometry(folder).vocab)
    alone, none = answers(config(folder, 1, tight=False), asked)
    assert none == 0
    for tp, tight in ((2, True), (4, False)):
        given, preempted = answers(config(folder, tp, tight=tight), asked)
        assert [answer.tokens for answer in given] == [answer.tokens for answer in alone]
        assert (preempted > 0) == tight
    assert all(len(answer.tokens) == TOKENS for answer in alone)
    oracle = load_oracle(folder)
    wrong, faults = 0, {"prompt": 0, "nothing": 0}
    for request, answer in zip(asked, alone, strict=True):
        if request.params.temperature or request.params.adjustments is None:
            continue
        logits = judge(oracle, torch.tensor(request.prompt + answer.tokens)).logits[len(request.prompt) - 1 :]
        sequence = AdjustedSequence(request.prompt, len(request.prompt), request.params.adjustments)
        for row, token in zip(logits, answer.tokens, strict=False):
            wrong += not_the_largest(sequence, row, token)
            faults["prompt"] += not_the_largest(replace(sequence, prompt=0), row, token)
            faults["nothing"] += not_the_largest(replace(sequence, wanted=LogitAdjustments()), row, token)
            sequence = sequence.longer(token)
    assert wrong == 0
    assert min(faults.values()) > 10, faults


def not_the_largest(sequence: AdjustedSequence, capped: torch.Tensor, token: int) -> bool:
    adjusted = sequence.of_capped(capped)
    return bool(adjusted[token] < adjusted.max() - TIE)
