"""The edge's errors, and each error class's HTTP status, type and code.

OpenAI's clients retry 408, 409, 429 and 5xx unless `x-should-retry: false`: errors that would
repeat send it. Overload and a group being rebuilt name a time to retry.
"""

from collections.abc import Mapping

from engine.errors import EngineDead, GenerationFailed, InvalidRequest, ModelNotFound, Overloaded, QuartetError, SlowReader
from engine.protocol import FrozenStruct

RESTART_S = 5


class TooLarge(InvalidRequest):
    pass


class HeadersTooLarge(InvalidRequest):
    pass


class TooSlow(InvalidRequest):
    pass


class Unauthenticated(InvalidRequest):
    pass


class Forbidden(InvalidRequest):
    pass


class QuotaExceeded(Overloaded):
    """`retry_after_s` is when a retry makes sense."""


class WrongMediaType(InvalidRequest):
    pass


class ForeignHost(InvalidRequest):
    pass


class DeadlineExceeded(GenerationFailed):
    pass


class HttpStatus(FrozenStruct):
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
    return next(_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE)


def code_of(error: QuartetError) -> str | None:
    if isinstance(error, InvalidRequest) and error.code:
        return error.code
    return status_of(error).code
