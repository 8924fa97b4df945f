"""Every error that has an HTTP status: those of the edge, and which status, type and code each class of the whole tree has.

    InvalidRequest (engine/errors.py)
    |-- TooLarge            the body exceeds the limit                                          -> 413
    |-- HeadersTooLarge     the headers exceed the limit                                        -> 431
    |-- TooSlow             the body did not arrive in time                                     -> 408
    |-- Unauthenticated     no API key, more than one, or none that is valid                    -> 401
    |-- Forbidden           the API key's holder has not the right                              -> 403
    |-- WrongMediaType      a POST whose body does not say that it is JSON, or is compressed    -> 415
    `-- ForeignHost         a Host that this server is not known by                             -> 403
    Overloaded
    `-- QuotaExceeded       the API key's holder has used up a limit                            -> 429
    GenerationFailed
    `-- DeadlineExceeded    the request took longer than this server allows                     -> 504

OpenAI's clients retry 408, 409, 429 and 5xx unless `x-should-retry: false`. So an overload says when to come back, a group that is
being rebuilt says so too, and what would fail again says not to try.
How an error looks is for error_response.py and anthropic/error_object.py.
"""

from collections.abc import Mapping

from engine.errors import EngineDead, GenerationFailed, InvalidRequest, ModelNotFound, Overloaded, QuartetError, SlowReader
from engine.protocol import FrozenStruct

RESTART_S = 5


class TooLarge(InvalidRequest):
    """The body exceeds the limit."""


class HeadersTooLarge(InvalidRequest):
    """The headers exceed the limit."""


class TooSlow(InvalidRequest):
    """The body did not arrive in time."""


class Unauthenticated(InvalidRequest):
    """The request has no valid API key."""


class Forbidden(InvalidRequest):
    """The API key's holder may not ask for this."""


class QuotaExceeded(Overloaded):
    """The API key's holder has reached a limit; `retry_after_s` is when it is worth coming back."""


class WrongMediaType(InvalidRequest):
    """The body does not say that it is JSON, or is compressed."""


class ForeignHost(InvalidRequest):
    """The Host header names somebody else."""


class DeadlineExceeded(GenerationFailed):
    """The request took longer than this server allows."""


class HttpStatus(FrozenStruct):
    """How one class of the tree looks from outside."""

    status: int
    code: str | None = None
    headers: Mapping[str, str] = {}


NO_RETRY = {"x-should-retry": "false"}

# The most derived class that is listed counts.
_TABLE: dict[type[QuartetError], HttpStatus] = {
    TooLarge: HttpStatus(413, "request_too_large"),
    HeadersTooLarge: HttpStatus(431, "headers_too_large"),
    TooSlow: HttpStatus(408, "request_timeout", NO_RETRY),
    Unauthenticated: HttpStatus(401, "invalid_api_key", {"www-authenticate": "Bearer"}),
    Forbidden: HttpStatus(403, "insufficient_permissions"),
    QuotaExceeded: HttpStatus(429, "rate_limit_exceeded"),
    WrongMediaType: HttpStatus(415, "unsupported_media_type"),
    ForeignHost: HttpStatus(403, "host_not_allowed"),
    ModelNotFound: HttpStatus(404, "model_not_found"),
    InvalidRequest: HttpStatus(400),
    Overloaded: HttpStatus(429, "overloaded"),
    EngineDead: HttpStatus(503, "engine_restarting", {"retry-after": str(RESTART_S)}),
    SlowReader: HttpStatus(408, "slow_reader", NO_RETRY),
    DeadlineExceeded: HttpStatus(504, "deadline_exceeded", NO_RETRY),
    GenerationFailed: HttpStatus(500, "generation_failed", NO_RETRY),
    QuartetError: HttpStatus(500, "internal_error", NO_RETRY),
}


def status_of(error: QuartetError) -> HttpStatus:
    """Return what the most derived class in the table has."""
    return next(_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE)


def code_of(error: QuartetError) -> str | None:
    """The error's own short code, or its class'."""
    return error.code if isinstance(error, InvalidRequest) and error.code else status_of(error).code
