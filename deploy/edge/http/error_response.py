"""An error as a reply, in the shape of its API, at most 2 kB."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.edge.http.http_errors import code_of, status_of
from deploy.edge.http.scope import RECORD, REQUEST_ID, request_id
from engine.errors import EngineDead, InvalidRequest, Overloaded, QuartetError
from engine.protocol import FrozenStruct, JsonObject

MAX_MESSAGE = 1000

logger = logging.getLogger(__name__)


class ErrorShape(FrozenStruct):
    name: str  # of its schema in the API's document
    # from status, message, param and code; always at least the same keys
    write: Callable[[int, str, str | None, str | None], JsonObject]
    id_headers: tuple[bytes, ...] = (b"x-request-id",)  # in which its clients look for a request's id

    def body(self, error: QuartetError) -> JsonObject:
        param = error.param if isinstance(error, InvalidRequest) else None
        return self.write(status_of(error).status, message_of(error), param, code_of(error))


def _openai_body(status: int, message: str, param: str | None, code: str | None) -> JsonObject:
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


OPENAI_ERROR = ErrorShape("Error", _openai_body)


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def refusal(error: QuartetError, shape: ErrorShape) -> JsonResponse:
    status = status_of(error)
    headers = dict(status.headers)
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_s)
    return JsonResponse(shape.body(error), status.status, headers)


async def refuse(error: QuartetError, shape: ErrorShape, scope: Scope, receive: Receive, send: Send) -> None:
    """Reply, and note the error in the request's record; without one, log it with a new id."""
    ids = []
    if RECORD in scope:
        scope[RECORD].error = error
    else:
        REQUEST_ID.set(name := request_id(scope["headers"]))
        ids = [(header, name.encode()) for header in shape.id_headers]
        kind = type(error).__name__
        status = status_of(error).status
        logger.info(
            "rejected before routing: status=%d error=%s", status, kind, extra={"request_id": name, "status": status, "error": kind}
        )
    response = refusal(error, shape)
    response.raw_headers += ids
    await response(scope, receive, send)


def plain_error(
    shape: ErrorShape, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """For unknown paths, wrong methods and bugs."""
    return JsonResponse(shape.write(status, _cut(message), None, code), status, headers)


def message_of(error: QuartetError) -> str:
    if isinstance(error, EngineDead):
        return "The engine was lost and is being restarted, or is starting or stopping. Please try again."
    return _cut(str(error))


def _cut(message: str) -> str:
    clean = message.encode("utf-8", "replace").decode()
    if len(clean) <= MAX_MESSAGE:
        return clean
    return clean[: MAX_MESSAGE - 1] + "…"
