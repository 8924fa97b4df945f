"""What happened, in plain numbers: the front emits these events, a sink (the exporter, a test) folds them into whatever it shows.

Clock points, all on the front's monotonic clock, seconds:

    submit ------------ first ------ next ------ ... ------ last
       |--- ttft_s ------|            |- gap_s -|             |     submit: `generate` was called
       |--- e2e_s --------------------------------------------|     first, next, last: an Output with tokens reached the front

    tpot_s = (last - first) / (n - 1) over the n tokens received; None below two tokens

An abort ends a request's clock where the front asked for it; tokens that come after that are not counted.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

Outcome = Literal["stop", "length", "client_gone", "deadline", "slow_reader", "refused", "error", "dead"]


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request was submitted."""

    request: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first tokens of a request arrived."""

    request: int
    prompt_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """An output with `count` tokens arrived, the first one included; `gap_s` since the one before it (None: it is the first)."""

    request: int
    count: int
    gap_s: float | None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request ended; every RequestStarted gets exactly one. `outcome` dead: the group ended under it; stop: a stop string too."""

    request: int
    outcome: Outcome
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Pages of one KV group; `total` without the null page."""

    name: str
    total: int
    used: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The core's figures after a step. waiting, running, waiting_tokens and pools are levels, the others count since boot."""

    step: int
    waiting: int
    running: int
    waiting_tokens: int
    preemptions: int
    prefill_tokens: int
    decode_tokens: int
    pools: tuple[PoolUse, ...]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The group ended, for this reason; every open request then finishes as dead."""

    reason: str


Event = RequestStarted | FirstToken | Tokens | RequestFinished | EngineLoad | EngineFailed


class Sink(Protocol):
    """Takes events on the front's event loop: it must be quick, and must not raise."""

    def __call__(self, event: Event) -> None: ...


def no_sink(event: Event) -> None:
    """Where nobody listens."""
