"""Events that the front emits in plain numbers, for the exporter and tests.

    submit -- scheduled -- first ------ next ------ ... ------ last     seconds on the front's monotonic clock
       |- queue_s -|         |            |- gap_s -|            |      scheduled: the core's first report that has it running
       |--- ttft_s ----------|                                   |      first, next, last: an Output with tokens arrived
       |--- e2e_s -----------------------------------------------|

    tpot_s = (last - first) / (n - 1) over n tokens; None below two tokens
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
    """Equal only to its own kind."""


class RequestStarted(EventRecord):
    request: int
    prompt_tokens: int


class Scheduled(EventRecord):
    """It is not repeated after a preemption."""

    request: int
    queue_s: float


class FirstToken(EventRecord):
    request: int
    ttft_s: float
    queue_s: float | None = None

    @property
    def prefill_s(self) -> float | None:
        if self.queue_s is None:
            return None
        return self.ttft_s - self.queue_s


class Tokens(EventRecord):
    """`token_gaps_s`: time between two outputs of a request, divided by the later one's tokens."""

    count: int
    token_gaps_s: list[float]


class RequestFinished(EventRecord):
    """It comes once for every RequestStarted. `outcome` dead: the group ended; stop includes stop strings."""

    request: int
    outcome: Outcome
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    queue_s: float | None = None


class KeyDecision(EventRecord):
    """`key`: the holder's name, empty without a valid key."""

    key: str
    verdict: KeyVerdict


class KeyTokens(EventRecord):
    key: str
    count: int


class ConversationRequest(EventRecord):
    """`home`: whether the conversation's previous request reached the same replica."""

    home: ConversationHome


class EngineLoad(EventRecord):
    load: Load
    interval_s: float | None = None  # since an earlier reported step, if the core had work throughout and this one is new


class EngineFailed(EventRecord):
    """Open requests then finish as dead."""


class ProcessFigures(EventRecord):
    rank: str
    up: bool
    stall_s: float  # time that it has owed a step
    busy_s: float  # device time of the last step
    idle_s: float  # idle time before it
    late_compilations: int
    encoder_s: float  # since boot


class AdapterFigures(EventRecord):
    """Open requests. `state`: running or waiting."""

    adapter: str
    state: str
    requests: int


class ScrapeGauges(EventRecord):
    """`encoder` is of one rank; the others differ only in times."""

    open: int = 0
    processes: tuple[ProcessFigures, ...] = ()
    encoder: EncoderFigures = EncoderFigures()
    adapters: tuple[AdapterFigures, ...] = ()


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
    def sink(event: Event) -> None:
        for receive in sinks:
            receive(event)

    return sink
