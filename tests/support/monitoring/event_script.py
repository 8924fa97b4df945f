"""What a group requests through, written beforehand from a seed: events with their times, and what anybody may count in them."""

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
from engine.protocol import DraftPosition, DraftSwitches
from engine.rank_status import EncoderFigures
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
class TimedEvent:
    """One event, `at` seconds after the script's start."""

    at: float
    event: Event


@dataclass(frozen=True)
class ScriptedRequest:
    """One request: seconds after the script's start at which it was submitted, scheduled, got its tokens and ended; its end."""

    number: int
    prompt: int
    submitted: float
    scheduled: float | None
    tokens: tuple[float, ...]
    ended: float
    outcome: Any

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the prefix cache had: about a third, in whole pages."""
        return self.prompt // (3 * PAGE) * PAGE


@dataclass(frozen=True)
class GroupScript:
    """A group's events in order, and the requests they stem from."""

    moments: tuple[TimedEvent, ...]
    requests: tuple[ScriptedRequest, ...]

    def gauges(self, now: float) -> ScrapeGauges:
        """What a scrape reads `now` seconds after the script's start: open requests, and four healthy ranks and a core."""
        opened = sum(request.submitted <= now < request.ended for request in self.requests)
        names = ("0", "1", "2", "3", "core")
        seen = sum(request.submitted <= now for request in self.requests)  # each has a picture of 5 ms, as a third of all have
        encoder = EncoderFigures(0, seen, seen, seen, 260 * seen, 3 * seen, 2 * seen, seen, seen, 1 << 20, 1 << 20)
        figures = (ProcessFigures(name, True, 0.0, STEP_S, encoder_s=seen / 200) for name in names)
        return ScrapeGauges(opened, tuple(figures), encoder)


def script(seed: int, seconds: float, rate: float) -> GroupScript:
    """`rate` requests a second, evenly spaced with jitter, all over before `seconds` are; the same for the same seed."""
    rng = random.Random(seed)
    count = int((seconds - 2.5) * rate)
    requests = tuple(_request(rng, number, (number + rng.random()) / rate) for number in range(count))
    moments = [moment for request in requests for moment in _events_of(request)]
    moments += _loads(requests, seconds)
    return GroupScript(tuple(sorted(moments, key=lambda moment: moment.at)), requests)


def _request(rng: random.Random, number: int, submitted: float) -> ScriptedRequest:
    """Queue about 10 ms, TTFT about 90 ms, TPOT about 12 ms, forty tokens; one in twenty ends otherwise than well."""
    prompt, length = rng.randint(40, 400), rng.randint(20, 60)
    scheduled = submitted + rng.uniform(0.005, 0.02)
    outcome = rng.choices(("stop", "length", "client_gone", "deadline", "error", "refused"), (60, 30, 4, 2, 2, 2))[0]
    if outcome == "refused":
        return ScriptedRequest(number, prompt, submitted, None, (), submitted + 0.002, outcome)
    first = scheduled + rng.lognormvariate(-2.6, 0.5)
    pace = rng.lognormvariate(-4.4, 0.3)
    times = [first]
    for _ in range(length - 1):
        times.append(times[-1] + pace * rng.uniform(0.7, 1.3))
    return ScriptedRequest(number, prompt, submitted, scheduled, tuple(times), times[-1] + 0.001, outcome)


def _events_of(request: ScriptedRequest) -> Iterator[TimedEvent]:
    yield TimedEvent(request.submitted, RequestStarted(request.number, request.prompt))
    ttft = tpot = queue = None
    if request.scheduled is not None:
        queue = request.scheduled - request.submitted
        ttft = request.tokens[0] - request.submitted
        tpot = (request.tokens[-1] - request.tokens[0]) / (len(request.tokens) - 1)
        yield TimedEvent(request.scheduled, Scheduled(request.number, queue))
        yield TimedEvent(request.tokens[0], FirstToken(request.number, request.prompt, ttft, queue))
        yield TimedEvent(request.tokens[0], Tokens(1, []))
    for before, at in pairwise(request.tokens):
        yield TimedEvent(at, Tokens(1, [at - before]))
    wall, count, outcome = request.ended - request.submitted, len(request.tokens), request.outcome
    yield TimedEvent(request.ended, RequestFinished(request.number, outcome, request.prompt, count, ttft, tpot, wall, queue))


def _loads(requests: tuple[ScriptedRequest, ...], seconds: float) -> Iterator[TimedEvent]:
    """The core's reports, as the requests imply."""
    for tick in range(int(seconds / LOAD_PERIOD_S)):
        now = tick * LOAD_PERIOD_S
        yield TimedEvent(now, _load(requests, now))


def _load(requests: tuple[ScriptedRequest, ...], now: float) -> EngineLoad:
    begun = [request for request in requests if request.scheduled is not None and request.scheduled <= now]
    running = [request for request in begun if now < request.ended]
    waiting = [request for request in requests if request.scheduled is not None and request.submitted <= now < request.scheduled]
    over = Counter(_CORE_ENDS[request.outcome] for request in requests if request.ended <= now)
    held = sum(request.prompt // PAGE + 1 for request in running)
    figures = load(
        step=int(now / STEP_S),
        waiting=len(waiting),
        running=len(running),
        waiting_tokens=sum(request.prompt for request in waiting),
        prefill_tokens=sum(request.prompt - request.cached for request in begun),
        queried_tokens=sum(request.prompt for request in begun),
        hit_tokens=sum(request.cached for request in begun),
        evicted_pages=len(begun),
        drafts=3,
        draft_positions=[DraftPosition(at, 4 * len(begun), (3 - at) * len(begun)) for at in range(3)],
        draft_switches=[DraftSwitches("trial", len(begun))],
        encoder_wait_s=len(begun) / 50,
        decode_tokens=sum(at <= now for request in begun for at in request.tokens),
        pools=[pool("sliding", 12 * len(running), SLIDING_PAGES), pool("full", held, FULL_PAGES)],
        received=sum(request.submitted <= now for request in requests),
        finished=over["finished"],
        refused=over["refused"],
        aborted=over["aborted"],
        failed=over["failed"],
    )
    return EngineLoad(figures, LOAD_PERIOD_S if now else None)
