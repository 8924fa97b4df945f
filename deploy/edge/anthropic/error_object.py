"""An error in Anthropic's shape.

The client's tool runner asks for a stored `thread`; `details` refuses it so that it continues.
"""

from deploy.edge.http.error_response import ErrorShape
from deploy.edge.http.scope import REQUEST_ID
from engine.protocol import JsonObject

# status -> the type that Anthropic gives it; other 4xx are invalid requests, other 5xx faults of the server
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _body(status: int, message: str, param: str | None, _: str | None) -> JsonObject:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if param == "thread":
        details = {"details": {"error_code": "thread_unsupported_request"}}
    else:
        details = {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": REQUEST_ID.get()}


ANTHROPIC_ERROR = ErrorShape("AnthropicError", _body, (b"x-request-id", b"request-id"))
