"""An error as a reply: in OpenAI's shape, which is also a stream's last event, or in that of whoever asked for the path.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Messages are cut: a reply is never larger than 2 kB. Every reply that no access log stands around (a refusal before Ray Serve saw
the request) brings its own request id and log line.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.edge.anthropic.error_object import error_object, is_anthropic
from deploy.edge.http_errors import NO_RETRY, code_of, status_of
from deploy.edge.scope import RECORD, request_id
from engine.errors import EngineDead, InvalidRequest, Overloaded, QuartetError

MAX_MESSAGE = 1000

logger = logging.getLogger(__name__)


def body_of(error: QuartetError) -> dict[str, Any]:
    """The error object, as a reply's body or as a stream's last event."""
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"error": {"message": message_of(error), "type": status_of(error).type, "param": param, "code": code_of(error)}}


def response_of(error: QuartetError, path: str = "") -> Response:
    """The whole reply, in the shape of the API that `path` is of."""
    status = status_of(error)
    headers = dict(status.headers)
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    shown = error_object(status.status, message_of(error)) if is_anthropic(path) else body_of(error)
    return Refusal(error, shown, status.status, headers)


class Refusal(Response):
    """An error as a reply."""

    def __init__(self, error: QuartetError, body: dict[str, Any], status: int, headers: dict[str, str]) -> None:
        super().__init__(msgspec.json.encode(body), status, headers, media_type="application/json")
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
        fields = {"request_id": name, "status": self.status_code, "error": kind}
        logger.info("rejected before routing: status=%d error=%s", self.status_code, kind, extra=fields)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON reply."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def plain_error(
    path: str, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error that no exception of ours stands for: unknown path, wrong method, a bug."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {**(headers or {}), **(dict(NO_RETRY) if status >= 500 else {})}
    if is_anthropic(path):
        return json_response(error_object(status, _cut(message)), status, headers)
    return json_response({"error": {"message": _cut(message), "type": kind, "param": None, "code": code}}, status, headers)


def handle(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for the whole tree."""
    assert isinstance(error, QuartetError), error
    return response_of(error, request.scope["path"])


def message_of(error: QuartetError) -> str:
    """The message for the client. Which process died is for the log, not for the client."""
    if isinstance(error, EngineDead):
        return "The engine was lost while this request was open; it is being restarted. Please try again."
    return _cut(str(error))


def _cut(message: str) -> str:
    """At most MAX_MESSAGE characters that any JSON reader takes."""
    clean = message.encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_MESSAGE else clean[: MAX_MESSAGE - 1] + "…"
