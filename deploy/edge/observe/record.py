"""The record of one request. Every stage writes what it learns; logs and spans read it at the end.

    began ------ submitted -- scheduled -- first ------ last ------ ended       began: its head was read; ended: its last byte was
      |- prepare_s -|- queue_s -|            |                                  sent, or the client was gone
      |             |- ttft_s ---------------|

With several choices, queue_s and ttft_s are those of the first to get there.
"""

from msgspec import Struct
from starlette.types import Scope

from deploy.edge.admission_control import AdmissionTicket
from deploy.edge.http.http_errors import DeadlineExceeded, code_of
from deploy.edge.http.scope import RECORD
from deploy.edge.keys.replica_quotas import RequestGrant
from engine.errors import EngineDead, InvalidRequest, Overloaded, QuartetError, SlowReader
from engine.front.stream import Clock
from engine.protocol import JsonObject

CLIENT_GONE = 499  # as nginx and Serve have it: nobody was there to read a status
_OUTCOMES: dict[type[Exception], str] = {  # in the words of engine.events.Outcome; other errors are "error"
    DeadlineExceeded: "deadline",
    Overloaded: "queue_timeout",
    SlowReader: "slow_reader",
    EngineDead: "dead",
    InvalidRequest: "refused",
}


class RequestRecord(Struct):
    """Times in seconds on the monotonic clock. `deadline`: the latest end. `clocks`: per submitted
    choice; `key`: its API key's holder, with allowed `models` (None: all), and `grant`, a part
    of its quota."""

    id: str
    method: str
    route: str
    began: float
    deadline: float
    operation: str | None
    ticket: AdmissionTicket | None = None
    key: str | None = None
    models: frozenset[str] | None = None
    grant: RequestGrant | None = None
    traceparent: bytes | None = None
    home: bytes | None = None
    ended: float = 0.0
    status: int | None = None
    model: str | None = None
    answer: str | None = None
    stream: bool | None = None
    choices: int | None = None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    clocks: list[Clock] = []
    finishes: dict[int, str] = {}
    error: Exception | None = None
    gone: bool = False
    trace_id: str | None = None

    def may_ask(self, model: str) -> bool:
        return self.models is None or model in self.models

    @property
    def shown_status(self) -> int:
        return self.status or (CLIENT_GONE if self.gone else 500)

    @property
    def failed(self) -> bool:
        """By our fault: 5xx, or an error after a 200."""
        by_client = self.error is None or isinstance(self.error, InvalidRequest | SlowReader)
        return self.shown_status >= 500 or (self.status == 200 and not by_client)

    @property
    def finish(self) -> str | None:
        """OpenAI's finish reasons, or an outcome of quartet_requests_total."""
        if self.gone:
            return "client_gone"
        if self.error is not None and self.clocks:
            return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(self.error, kind)), "error")
        return ",".join(sorted(set(self.finishes.values()))) or None

    @property
    def tokens(self) -> int | None:
        if self.output_tokens is not None or not self.clocks:
            return self.output_tokens
        return sum(clock.output_tokens for clock in self.clocks)

    @property
    def used_tokens(self) -> int:
        """0 if the engine never started it."""
        if all(clock.scheduled is None for clock in self.clocks):
            return 0
        return (self.prompt_tokens or 0) + (self.tokens or 0)

    def first(self, point: str) -> float | None:
        """Seconds from submission to the first choice's `scheduled` or `first`, or None."""
        spans = [(getattr(clock, point), clock.submitted) for clock in self.clocks]
        return min((moment - submitted for moment, submitted in spans if moment is not None), default=None)

    @property
    def prepare_s(self) -> float | None:
        return min((clock.submitted - self.began for clock in self.clocks), default=None)


def record_of(scope: Scope) -> RequestRecord:
    return scope[RECORD]


def access_fields(record: RequestRecord) -> JsonObject:
    """Fields that do not apply are missing."""
    shown: JsonObject = {
        "status": record.shown_status,
        "key": record.key,
        "model": record.model,
        "stream": record.stream,
        "n": record.choices,
        "finish_reason": record.finish,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.tokens,
        "prepare_s": record.prepare_s,
        "queue_s": record.first("scheduled"),
        "ttft_s": record.first("first"),
        "e2e_s": record.ended - record.began,
        "client_gone": record.gone,
        **_error_fields(record.error),
        "trace_id": record.trace_id,
    }
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in shown.items() if value is not None}


def _error_fields(error: Exception | None) -> JsonObject:
    """The error's sentence is included only if it quotes nothing of the client."""
    if error is None:
        return {}
    fields: JsonObject = {"error": type(error).__name__}
    if isinstance(error, QuartetError):
        fields["error_code"] = code_of(error)
    if isinstance(error, InvalidRequest):
        fields["error_param"] = error.param
    elif isinstance(error, QuartetError):
        fields["error_message"] = str(error)[:500]
    return fields


