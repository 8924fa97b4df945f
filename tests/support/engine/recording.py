"""Plan streams recorded from a real scheduler over one rank, and what replays of them are compared by."""

import json
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig, engine_config
from engine.core.loop import make_scheduler, read_vocabulary
from engine.core.masks import Masks
from engine.plan import StepPlan, StepResult, encode_plan
from engine.protocol import GenerateRequest, Grammar, SamplingParams, pack_tokens
from engine.rank.builder import build
from engine.rank.runner import Runner
from engine.step_masks import decode_masks
from tests.support.engine.plans import decode_plan, result_rows
from tests.support.engine.ranks import Ranks, run, single
from tests.support.engine.schemas import members

PAGES = (22, 6)  # full pages so few that sequences of the requests below must preempt
REQUESTS, MAX_TOKENS = 12, (6, 45, 45, 16)
HEAD = '%llguidance {"no_forcing": true}\n'
TRIGGER, ENDS = 864, (1, 106, 50)  # the trigger is a token that the last request gives
SETTINGS = {"max_seqs": 4, "max_len": 256, "prefill_budget": 64}


def config_of(folder: Path, tp: int, **changes: Any) -> EngineConfig:
    """fp32 on the CPU, unless `changes` say otherwise; every hidden bit goes into the hash."""
    settings = {
        "model": str(folder),
        "tp": tp,
        "device": "cpu",
        "dtype": "float32",
        "pages": PAGES,
        "debug_hash": True,
        "step_timeout_s": 15.0,
    }
    return engine_config(**(settings | SETTINGS | changes))


def request(number: int, max_tokens: Sequence[int] = MAX_TOKENS) -> GenerateRequest:
    """Greedy, sampled and filtered requests of 5 to 191 tokens, some with logprobs, some that a stop id may end by surprise."""
    length = (30, 28, 60, 140, 5)[number % 5]
    params = SamplingParams(
        max_tokens=max_tokens[number % 4],
        temperature=(0.0, 1.0, 0.8)[number % 3],
        top_k=20 if number % 3 == 2 else 0,
        top_p=0.9 if number % 3 == 2 else 1.0,
        seed=number * 0x1234567890AB - 5,
        stop_ids=tuple(range(0, 1000, 16)) if number % 4 == 3 else (),
        min_tokens=3 if number % 4 == 3 else 0,
        logprobs=3 if number % 4 == 0 else None,
    )
    prompt = pack_tokens((number * 31 + at * 7) % 900 + 10 for at in range(length))
    return GenerateRequest(id=number, prompt=prompt, params=params)


def constrained(number: int) -> GenerateRequest:
    """The same with a grammar: an object by a random schema; the fourth writes a word behind its trigger."""
    rules = Grammar(f"{HEAD}start: %json {json.dumps(members(random.Random(number), 1))}\n")
    if number % 4 == 3:
        rules = Grammar(f"{HEAD}start: /[a-z]{{3,9}}/ <[49]>\n", trigger=TRIGGER)
    asked = request(number)
    params = msgspec.structs.replace(asked.params, grammar=rules, stop_ids=ENDS, min_tokens=0, max_tokens=12, temperature=0.7)
    return msgspec.structs.replace(asked, params=params)


@dataclass(frozen=True)
class Recording:
    """A plan stream and what one rank made of it; masks: bytes by step."""

    folder: Path
    plans: list[StepPlan] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)


def record(
    folder: Path, *, grammars: bool = True, requests: int = REQUESTS, max_tokens: Sequence[int] = MAX_TOKENS
) -> Recording:
    """So many requests, in waves of four, and a last one of two with grammars, served by one rank on the CPU."""
    config = config_of(folder, 1)
    waves = [[request(number, max_tokens) for number in range(first, first + 4)] for first in range(0, requests, 4)]
    if grammars:
        waves.append([constrained(REQUESTS + 1), constrained(REQUESTS + 3)])
    return serve(build(single(config), PAGES), config, waves)


def serve(runner: Runner, config: EngineConfig, waves: Iterable[list[GenerateRequest]]) -> Recording:
    """Serve requests with a real scheduler, two plans out at a time. A wave comes every fifth step."""
    scheduler = make_scheduler(config, PAGES)
    masks = Masks(scheduler.requests, read_vocabulary(config), scheduler.config.widest)
    made = Recording(Path(config.model))
    out: deque[StepPlan] = deque()
    pending = deque(waves)
    while pending or scheduler.requests.unfinished or out:
        if pending and (len(made.plans) % 5 == 0 or not scheduler.requests.unfinished):
            for request in pending.popleft():
                masks.add(request) if request.params.grammar else scheduler.requests.add(request)
        masks.advance()
        while len(out) < 2 and (plan := scheduler.schedule()) is not None:
            made.plans.append(decode_plan(encode_plan(plan)))
            out.append(plan)
            if plan.masked:
                masks.planned(plan)
        made.masks.update((decode_masks(data).step, data) for data in masks.due())
        if out:
            plan = out.popleft()
            made.results.append(run(runner, plan, made.masks.get(plan.step, b"")))
            scheduler.commit(made.results[-1])
            masks.advance()
        else:
            time.sleep(0.001)
    return made


def tokens_of(results: Sequence[StepResult]) -> list[list[tuple[int, int, tuple[int, ...], bool]]]:
    return [[(row.slot, row.number, row.tokens, row.nan) for row in result_rows(result)] for result in results]


def replay_in_step(
    ranks: Ranks, plans: Sequence[StepPlan], masks: Mapping[int, bytes]
) -> tuple[list[StepResult], list[list[int]]]:
    """Each plan alone: its result, and every rank's hash after it."""
    results, hashes = [], []
    for plan in plans:
        ranks.submit(plan, masks.get(plan.step, b""))
        results.append(ranks.result())
        hashes.append(ranks.hashes(plan.step))
    return results, hashes
