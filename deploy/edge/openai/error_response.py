"""The exception tree as HTTP, in OpenAI's shape: the one place that decides a status code.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

OpenAI's clients retry 408, 409, 429 and 5xx unless `x-should-retry: false`. So an overload says when to come back, a group that is
being rebuilt says so too, and what would fail again says not to try. Messages are cut: a reply is never larger than 2 kB.
Every reply that no Journal stands around (a refusal before Ray Serve saw the request) brings its own request id and log line.
"""

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.edge.scope import RECORD, request_id
from engine.errors import EngineDead, GenerationFailed, InvalidRequest, ModelNotFound, Overloaded, QuartetError

MAX_MESSAGE = 1000
RESTART_S = 5

logger = logging.getLogger(__name__)


class TooLarge(InvalidRequest):
    """The body exceeds the limit."""


class HeadersTooLarge(InvalidRequest):
    """The headers exceed the limit."""


class TooSlow(InvalidRequest):
    """The body did not arrive in time."""


class DeadlineExceeded(GenerationFailed):
    """The request took longer than this server allows."""


@dataclass(frozen=True)
class _Status:
    """How one class of the tree looks from outside."""

    status: int
    type: str
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


_NO_RETRY = (("x-should-retry", "false"),)

# The most derived class that is listed counts.
_TABLE: dict[type[QuartetError], _Status] = {
    TooLarge: _Status(413, "invalid_request_error", "request_too_large"),
    HeadersTooLarge: _Status(431, "invalid_request_error", "headers_too_large"),
    TooSlow: _Status(408, "invalid_request_error", "request_timeout", _NO_RETRY),
    ModelNotFound: _Status(404, "invalid_request_error", "model_not_found"),
    InvalidRequest: _Status(400, "invalid_request_error"),
    Overloaded: _Status(429, "rate_limit_error", "overloaded"),
    EngineDead: _Status(503, "server_error", "engine_restarting", (("retry-after", str(RESTART_S)),)),
    DeadlineExceeded: _Status(504, "server_error", "deadline_exceeded", _NO_RETRY),
    GenerationFailed: _Status(500, "server_error", "generation_failed", _NO_RETRY),
    QuartetError: _Status(500, "server_error", "internal_error", _NO_RETRY),
}


def body_of(error: QuartetError) -> dict[str, Any]:
    """The error object, as a reply's body or as a stream's last event."""
    look = _look(error)
    code = error.code if isinstance(error, InvalidRequest) and error.code else look.code
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"error": {"message": _cut(_message(error)), "type": look.type, "param": param, "code": code}}


def response_of(error: QuartetError) -> Response:
    """The whole reply."""
    look = _look(error)
    headers = dict(look.headers)
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    return Refusal(error, look.status, headers)


class Refusal(Response):
    """An error as a reply."""

    def __init__(self, error: QuartetError, status: int, headers: dict[str, str]) -> None:
        super().__init__(msgspec.json.encode(body_of(error)), status, headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply, and leave the error with the request's record; without one, with an id and a line in the log."""
        if RECORD in scope:
            scope[RECORD].error = self._error
        else:
            self._introduce(request_id(scope["headers"]))
        await super().__call__(scope, receive, send)

    def _introduce(self, name: str) -> None:
        self.headers["x-request-id"] = name
        kind = type(self._error).__name__
        said = {"request_id": name, "status": self.status_code, "error": kind}
        logger.info("refused at the door: status=%d error=%s", self.status_code, kind, extra=said)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON reply."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def plain_error(status: int, message: str, code: str | None = None) -> Response:
    """An error that no exception of ours stands for: unknown path, wrong method, a bug."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = dict(_NO_RETRY) if status >= 500 else None
    return json_response({"error": {"message": _cut(message), "type": kind, "param": None, "code": code}}, status, headers)


def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for the whole tree."""
    assert isinstance(error, QuartetError), request.url.path
    return response_of(error)


def _look(error: QuartetError) -> _Status:
    return next(_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE)


def _message(error: QuartetError) -> str:
    """What the client is told. Which process died is for the log, not for the client."""
    if isinstance(error, EngineDead):
        return "The engine was lost while this request was open; it is being restarted. Please try again."
    return str(error)


def _cut(message: str) -> str:
    """At most MAX_MESSAGE characters that any JSON reader takes."""
    clean = message.encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_MESSAGE else clean[: MAX_MESSAGE - 1] + "…"
