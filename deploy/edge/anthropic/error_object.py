"""An error in Anthropic's shape.

    {"type": "error", "error": {"type": ..., "message": ...}}
"""

from typing import Any

PREFIX = "/v1/messages"
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


def is_anthropic(path: str) -> bool:
    """Whether who asks for `path` reads errors in this shape."""
    return path.endswith(PREFIX) or f"{PREFIX}/" in path


def error_object(status: int, message: str) -> dict[str, Any]:
    """The error, as a reply's body or as the data of a stream's last event."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
