"""A device whose steps take known times, and sequences whose drafts are right with known chances, for `core/draft_policy.py`."""

import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.core.draft_policy import DraftPolicy
from engine.lifeline import Points
from engine.step_shapes import buckets

OPTIONS = (0, 1, 2, 3, 5, 7)
SIZES = buckets(256)
Times = Callable[[int, int], float]  # padded rows, drafts -> ms


def points(times: Times) -> list[Points]:
    """What ranks would measure of them at boot."""
    return [tuple((rows, times(rows, drafts)) for rows in (1, 8, 32, 128)) for drafts in OPTIONS]


def padded(rows: int) -> int:
    return next(size for size in SIZES if size >= rows)


def dense(rows: int, drafts: int) -> float:
    """As a 31B on two H200: weights are read once, up to some 160 rows of products."""
    return 8.0 + 0.16 * drafts + 0.02 * rows + 0.045 * max(0, rows * (1 + drafts) - 160)


def experts(rows: int, drafts: int) -> float:
    """As a 26B of experts: each token reads more of them, until all are read."""
    tokens = rows * (1 + drafts)
    return 2.0 + 0.15 * drafts + 6.0 * (1 - 0.94**tokens) + 0.01 * tokens


def small(rows: int, drafts: int) -> float:
    """As an E2B: a drafter's pass is a tenth of a step."""
    return 1.8 + 0.2 * drafts + 0.02 * rows * (1 + drafts)


# rows: ms of a step without drafts; of one that verifies so many, and of making them: H200, tests/bench/results.csv at 64b74c6
Measured = dict[int, tuple[float, float, float]]
_DENSE: Measured = {1: (8.135, 9.87, 0.968), 8: (9.968, 11.46, 1.465), 32: (12.67, 16.73, 2.354), 64: (17.37, 29.66, 3.698),
                    100: (21.53, 45.89, 5.263)}  # fmt: skip
_EXPERTS: Measured = {1: (2.804, 5.771, 1.084), 5: (6.404, 11.94, 1.396), 16: (10.25, 15.17, 1.699), 48: (15.72, 19.61, 2.806)}


def between(table: Measured, made: int, rows: int, drafts: int) -> float:
    """Straight lines between the measured numbers of rows, and of drafts, 0 and `made`."""
    known = sorted(table)
    at = min(max(1, bisect_left(known, rows)), len(known) - 1)
    low, high = ((alone, verify + draft) for alone, verify, draft in (table[known[at - 1]], table[known[at]]))
    part = (rows - known[at - 1]) / (known[at] - known[at - 1])
    alone, drafted = (first + part * (last - first) for first, last in zip(low, high, strict=True))
    return alone + (drafted - alone) * drafts / made


MEASURED: dict[str, Times] = {"31b": partial(between, _DENSE, 5), "26b-a4b": partial(between, _EXPERTS, 4)}


@dataclass
class Traffic:
    """Steps of `rows(step)` sequences, whose n-th draft is right with `chance(sequence, step)` if those before it were.
    `drafting`: of so many, the first ones may draft;   `token_ms`: of a prompt token;   `beside_ms`: what a step takes more if it
    has drafts and prompt tokens."""

    rows: Callable[[int], int]
    chance: Callable[[int, int], float]
    prompts: Callable[[int], int] = lambda step: 0
    steps: int = 20_000
    drafting: Callable[[int], int] = lambda rows: rows
    beside_ms: float = 0.0
    token_ms: float = 0.01


@dataclass
class Served:
    """What came of it: tokens of each sequence, ms, the drafts of each step."""

    tokens: list[float]
    ms: float = 0.0
    drafts: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return sum(self.tokens) / self.ms


def serve(drafting: DraftPolicy, times: Times, traffic: Traffic, seed: int = 0) -> Served:
    """Two steps are out at a time: a step's drafts are chosen before the one before it has ended."""
    rng, clock, out = random.Random(seed), random.Random(seed), deque[tuple[tuple[Any, ...], list[tuple[int, int]]]]()
    served, made = Served([0.0] * 256), 0
    for step in range(traffic.steps):
        rows, prompts = traffic.rows(step), traffic.prompts(step)
        drafts, at = drafting.choose(rows)
        beside_ms = traffic.token_ms * prompts + (traffic.beside_ms if prompts and drafts else 0.0)
        ms = (times(padded(rows), drafts) + beside_ms) * max(0.5, clock.gauss(1, 0.03))
        given = []
        for sequence in range(rows):
            right, most = 0, min(made, drafts) if sequence < traffic.drafting(rows) else 0
            chance = traffic.chance(sequence, step) if most else 0.0
            if chance:
                right = min(most, int(math.log(1 - rng.random()) / math.log(chance)))
            given.append((most, right))
            served.tokens[sequence] += 1 + right
        made = drafts
        served.ms += ms
        if clock.random() < 0.002:
            ms += 50  # a pause of the host, which is nobody's
        served.drafts.append(drafts)
        out.append(((at, traffic.drafting(rows) / rows, drafts, prompts, ms), given))
        if len(out) == 2:
            ended, verified = out.popleft()
            for most, right in verified:
                if most:
                    drafting.verified(most, right)
            drafting.record(*ended)
    return served


def best_fixed(times: Times, traffic: Traffic, seed: int = 0) -> Served:
    """The best of the runs with one number throughout."""
    runs = (serve(DraftPolicy((drafts,), SIZES, ()), times, traffic, seed) for drafts in OPTIONS)
    return max(runs, key=lambda served: served.rate)


class AnyDrafts(DraftPolicy):
    """Each step's number of drafts is drawn."""

    def __init__(self, options: Iterable[int], sizes: tuple[int, ...], seed: int) -> None:
        super().__init__(tuple(options), sizes, ())
        self._draw = random.Random(seed)

    def choose(self, rows: int) -> tuple[int, int]:
        self.drafts = self._draw.choice(self._options)
        return self.drafts, 0
