"""What happened, in plain numbers: the front emits these events, a sink (the exporter, a test) folds them into whatever it shows.

Clock points, all on the front's monotonic clock, seconds:

    submit -- scheduled -- first ------ next ------ ... ------ last     submit: `generate` was called
       |- queue_s -|         |            |- gap_s -|            |      scheduled: the core's first report that has it running
       |--- ttft_s ----------|                                   |      first, next, last: an Output with tokens reached the front
       |--- e2e_s -----------------------------------------------|

    tpot_s = (last - first) / (n - 1) over the n tokens received; None below two tokens

The core reports when a plan admits a sequence, with a step's outputs, and when asked: `scheduled` is at most a message late.

An abort ends a request's clock where the front asked for it; tokens that come after that are not counted.
"""

from collections.abc import Callable
from typing import Literal

from engine.protocol import FrozenStruct, Load
from engine.rank_status import EncoderFigures

Outcome = Literal[
    "stop", "length", "client_gone", "deadline", "slow_reader", "queue_timeout", "sibling_failed", "refused", "error", "dead"
]
ConversationHome = Literal["new", "kept", "moved"]
KeyVerdict = Literal["admitted", "unauthenticated", "forbidden", "rate_limited"]


class EventRecord(FrozenStruct):
    """Values that never change; equal to those of its own kind alone."""


class RequestStarted(EventRecord):
    """A request was submitted."""

    request: int
    prompt_tokens: int


class Scheduled(EventRecord):
    """The core has begun with a request; a preemption later does not begin it again."""

    request: int
    queue_s: float


class FirstToken(EventRecord):
    """The first tokens of a request arrived."""

    request: int
    ttft_s: float
    queue_s: float | None = None

    @property
    def prefill_s(self) -> float | None:
        """Time from the first plan that has the request to its first token."""
        return None if self.queue_s is None else self.ttft_s - self.queue_s


class Tokens(EventRecord):
    """Outputs with `count` tokens in all arrived, in one message, first ones included; `token_gaps_s`: of each that is not its
    request's first, the time since the one before it, divided by its tokens."""

    count: int
    token_gaps_s: list[float]


class RequestFinished(EventRecord):
    """A request ended; every RequestStarted gets exactly one. `outcome` dead: the group ended under it; stop: a stop string too."""

    request: int
    outcome: Outcome
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    queue_s: float | None = None


class KeyDecision(EventRecord):
    """An HTTP request that needs an API key was let in, or was not. `key`: its holder's name; empty where it has no valid key."""

    key: str
    verdict: KeyVerdict


class KeyTokens(EventRecord):
    """A request of the key's holder has ended: tokens of its prompt and of its answers, once."""

    key: str
    count: int


class ConversationRequest(EventRecord):
    """A request of a conversation has come to one of several replicas. `home`: whether the one before went there."""

    home: ConversationHome


class EngineLoad(EventRecord):
    """The core's figures have come.

    `interval_s` is the time since an earlier step was reported, if the core has had work ever since; None: it had not, or this
    report tells of no new step.
    """

    load: Load
    interval_s: float | None = None


class EngineFailed(EventRecord):
    """The group ended; every open request then finishes as dead."""


class ProcessFigures(EventRecord):
    """One process of the group at this moment; `rank` is a rank's number, or `core`.

    stall_s: how long it has owed a step without progress, 0 while it owes none. `busy_s` is how long its device took for the last
    step, `idle_s` how long that stood idle before. `late_compilations`: kernels compiled while it served. `encoder_s`: time in
    encoders since boot.
    """

    rank: str
    up: bool
    stall_s: float
    busy_s: float
    idle_s: float
    late_compilations: int
    encoder_s: float


class ScrapeGauges(EventRecord):
    """What is read at a scrape, not sent as an event: the front's open requests, the group's processes, what one rank's encoders
    have done (the others' have done the same, but in other times)."""

    open: int = 0
    processes: tuple[ProcessFigures, ...] = ()
    encoder: EncoderFigures = EncoderFigures()


Event = (
    RequestStarted
    | Scheduled
    | FirstToken
    | Tokens
    | RequestFinished
    | KeyDecision
    | KeyTokens
    | ConversationRequest
    | EngineLoad
    | EngineFailed
)
Sink = Callable[[Event], None]  # called on the front's event loop: it must be quick, and must not raise


def to_each(*sinks: Sink) -> Sink:
    """Returns a sink that hands every event to all of these, in order."""

    def sink(event: Event) -> None:
        for receive in sinks:
            receive(event)

    return sink
