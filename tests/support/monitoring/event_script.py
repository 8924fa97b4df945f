"""What a group lives through, written beforehand from a seed: events with their times, and what anybody may count in them."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from engine.events import (
    EngineLoad,
    Event,
    FirstToken,
    ProcessFigures,
    RequestFinished,
    RequestStarted,
    Scheduled,
    ScrapeGauges,
    Tokens,
)
from tests.support.engine.load_figures import load, pool

SLOTS = 64
LOAD_PERIOD_S = 0.05
STEP_S = 0.010
FULL_PAGES, SLIDING_PAGES, PAGE = 4000, 1200, 32
_CORE_ENDS = {
    "stop": "finished", "length": "finished", "client_gone": "aborted", "deadline": "aborted", "error": "failed",
    "refused": "refused",
}  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """One event, `at` seconds after the curtain."""

    at: float
    event: Event


@dataclass(frozen=True)
class Life:
    """One request: seconds after the curtain at which it was submitted, scheduled, got its tokens and ended; its end."""

    number: int
    prompt: int
    submitted: float
    scheduled: float | None
    tokens: tuple[float, ...]
    ended: float
    outcome: Any


@dataclass(frozen=True)
class Scene:
    """A group's events in order, and the lives they tell."""

    moments: tuple[Moment, ...]
    lives: tuple[Life, ...]

    def gauges(self, now: float) -> ScrapeGauges:
        """What a scrape reads `now` seconds after the curtain: open requests, and four ranks and a core in good health."""
        opened = sum(life.submitted <= now < life.ended for life in self.lives)
        steps = max(0, int(now / STEP_S))
        names = ("0", "1", "2", "3", "core")
        return ScrapeGauges(opened, tuple(ProcessFigures(name, True, 0.0, STEP_S, 0.02, steps, STEP_S, 20 << 30) for name in names))


def script(seed: int, seconds: float, rate: float) -> Scene:
    """`rate` requests a second, evenly spaced with jitter, all over before `seconds` are; the same for the same seed."""
    rng = random.Random(seed)
    count = int((seconds - 2.5) * rate)
    lives = tuple(_life(rng, number, (number + rng.random()) / rate) for number in range(count))
    moments = [moment for life in lives for moment in _told(life)]
    moments += _loads(lives, seconds)
    return Scene(tuple(sorted(moments, key=lambda moment: moment.at)), lives)


def _life(rng: random.Random, number: int, submitted: float) -> Life:
    """Queue about 10 ms, TTFT about 90 ms, TPOT about 12 ms, forty tokens; one in twenty ends otherwise than well."""
    prompt, length = rng.randint(40, 400), rng.randint(20, 60)
    scheduled = submitted + rng.uniform(0.005, 0.02)
    outcome = rng.choices(("stop", "length", "client_gone", "deadline", "error", "refused"), (60, 30, 4, 2, 2, 2))[0]
    if outcome == "refused":
        return Life(number, prompt, submitted, None, (), submitted + 0.002, outcome)
    first = scheduled + rng.lognormvariate(-2.6, 0.5)
    pace = rng.lognormvariate(-4.4, 0.3)
    times = [first]
    for _ in range(length - 1):
        times.append(times[-1] + pace * rng.uniform(0.7, 1.3))
    return Life(number, prompt, submitted, scheduled, tuple(times), times[-1] + 0.001, outcome)


def _told(life: Life) -> Iterator[Moment]:
    yield Moment(life.submitted, RequestStarted(life.number, life.prompt))
    ttft = tpot = queue = None
    if life.scheduled is not None:
        queue = life.scheduled - life.submitted
        ttft = life.tokens[0] - life.submitted
        tpot = (life.tokens[-1] - life.tokens[0]) / (len(life.tokens) - 1)
        yield Moment(life.scheduled, Scheduled(life.number, queue))
        yield Moment(life.tokens[0], FirstToken(life.number, life.prompt, ttft, queue))
        yield Moment(life.tokens[0], Tokens(life.number, 1, None))
    for before, at in pairwise(life.tokens):
        yield Moment(at, Tokens(life.number, 1, at - before))
    wall = life.ended - life.submitted
    yield Moment(life.ended, RequestFinished(life.number, life.outcome, life.prompt, len(life.tokens), ttft, tpot, wall, queue))


def _loads(lives: tuple[Life, ...], seconds: float) -> Iterator[Moment]:
    """The core's reports, as the lives imply them."""
    for tick in range(int(seconds / LOAD_PERIOD_S)):
        now = tick * LOAD_PERIOD_S
        yield Moment(now, _load(lives, now))


def _load(lives: tuple[Life, ...], now: float) -> EngineLoad:
    begun = [life for life in lives if life.scheduled is not None and life.scheduled <= now]
    running = [life for life in begun if now < life.ended]
    waiting = [life for life in lives if life.scheduled is not None and life.submitted <= now < life.scheduled]
    over = Counter(_CORE_ENDS[life.outcome] for life in lives if life.ended <= now)
    held = sum(life.prompt // PAGE + 1 for life in running)
    figures = load(
        step=int(now / STEP_S),
        waiting=len(waiting),
        running=len(running),
        waiting_tokens=sum(life.prompt for life in waiting),
        prefill_tokens=sum(life.prompt for life in begun),
        decode_tokens=sum(at <= now for life in begun for at in life.tokens),
        pools=[pool("sliding", 12 * len(running), SLIDING_PAGES), pool("full", held, FULL_PAGES)],
        received=sum(life.submitted <= now for life in lives),
        finished=over["finished"],
        refused=over["refused"],
        aborted=over["aborted"],
        failed=over["failed"],
    )
    return EngineLoad(figures, LOAD_PERIOD_S if now else None)
