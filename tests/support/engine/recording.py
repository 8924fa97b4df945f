"""Plan streams recorded from a real scheduler over one rank, and what replays of them are compared by."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, engine_config
from engine.core.loop import scheduler_config
from engine.core.scheduler import Scheduler
from engine.plan import StepPlan, StepResult, decode_plan, encode_plan
from engine.protocol import GenerateRequest, SamplingParams, pack_tokens
from engine.rank.runner import Launched, Runner
from engine.rank.worker import build
from tests.support.engine.ranks import Ranks, finish, single

PAGES = (22, 6)  # full pages so few that sequences of the requests below must preempt
REQUESTS = 12
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


def request(number: int) -> GenerateRequest:
    """Greedy, sampled and filtered requests of 5 to 191 tokens, some with logprobs, some that a stop id may end by surprise."""
    length = (30, 28, 60, 140, 5)[number % 5]
    params = SamplingParams(
        max_tokens=(6, 45, 45, 16)[number % 4],
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


@dataclass(frozen=True)
class Recording:
    """A plan stream and what one rank made of it."""

    folder: Path
    plans: list[StepPlan]
    results: list[StepResult]


def record(folder: Path) -> Recording:
    """The requests, in three waves, served by one rank on the CPU."""
    config = config_of(folder, 1)
    waves = [[request(number) for number in range(first, first + 4)] for first in range(0, REQUESTS, 4)]
    plans, results = serve(build(single(config), PAGES), config, waves)
    return Recording(folder, plans, results)


def serve(runner: Runner, config: EngineConfig, waves: Iterable[list[GenerateRequest]]) -> tuple[list[StepPlan], list[StepResult]]:
    """Serve requests with a real scheduler, two plans out at a time; every plan and its result. A wave comes every fifth step."""
    scheduler = Scheduler(scheduler_config(config, PAGES))
    plans: list[StepPlan] = []
    results: list[StepResult] = []
    launched: deque[Launched] = deque()
    pending = deque(waves)
    while pending or scheduler.unfinished or launched:
        if pending and (len(plans) % 5 == 0 or not scheduler.unfinished):
            for request in pending.popleft():
                scheduler.add(0, request)
        while len(launched) < 2 and (plan := scheduler.schedule()) is not None:
            data = encode_plan(plan)
            plans.append(decode_plan(data))
            launched.append(runner.launch(data))
        results.append(finish(launched.popleft()))
        scheduler.commit(results[-1])
    return plans, results


def tokens_of(results: Sequence[StepResult]) -> list[list[tuple[int, int, tuple[int, ...], bool]]]:
    return [[(row.slot, row.number, row.tokens, row.nan) for row in result.rows] for result in results]


def replay_in_step(ranks: Ranks, plans: Sequence[StepPlan]) -> tuple[list[StepResult], list[list[int]]]:
    """Each plan alone: its result, and every rank's hash after it."""
    results, hashes = [], []
    for plan in plans:
        ranks.submit(plan)
        results.append(ranks.result())
        hashes.append(ranks.hashes(plan.step))
    return results, hashes
