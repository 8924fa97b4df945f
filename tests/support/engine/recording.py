"""Plan streams recorded from a real scheduler over one rank, and what replays of them are compared by."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig, engine_config
from engine.plan import StepPlan, StepResult, encode_plan
from engine.protocol import GenerateRequest
from engine.rank.builder import build
from engine.rank.runner import Runner
from engine.step_shapes import StepShapes, StepSizes, mixed_sizes, prompt_rows
from tests.support.engine.answers import MAX_TOKENS, answers, constrained, request
from tests.support.engine.plans import decode_plan, result_rows
from tests.support.engine.ranks import Ranks, run, single

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


def padded_shapes(config: EngineConfig) -> StepShapes:
    """Sizes of steps on a CPU, but that those with chunks are padded too, and tokens of a sequence, as on a GPU."""
    decoding = [StepSizes.decoding(rows, width) for rows in range(1, config.max_seqs + 1) for width in config.widths]
    mixed = mixed_sizes(prompt_rows(config), config.max_seqs, config.widths)
    return replace(StepShapes.of(config), sizes=(*decoding, *mixed))


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
    made = Recording(Path(config.model))

    def step(plan: StepPlan, masks: bytes) -> StepResult:
        made.plans.append(decode_plan(encode_plan(plan)))
        made.masks.update({plan.step: masks} if masks else {})
        made.results.append(run(runner, plan, masks))
        return made.results[-1]

    answers(step, config, list(waves), every=5)
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
