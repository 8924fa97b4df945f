"""What HAProxy itself answers, in OpenAI's shape: files that deploy/haproxy.sh puts into its configuration.

400, 501  what came is not HTTP as HAProxy reads it, or its head is larger than HAProxy's buffer
408       the head has not come in time
413       the body cannot be as large as it is said to be
500       HAProxy has failed
502, 503  the replica was killed before it answered, or there is none: 503 with Retry-After, as when a replica loses its engine
504       nobody answered within http_options.request_timeout_s
"""

from http import HTTPStatus
from pathlib import Path

from deploy.edge.error_response import response_of
from deploy.edge.http_errors import DeadlineExceeded, TooLarge, TooSlow
from engine.errors import EngineDead, InvalidRequest, QuartetError

_LOST = EngineDead("the replica is gone")
_MALFORMED = InvalidRequest("What came is not an HTTP request, or its head is too large.")
ERRORS: dict[int, QuartetError] = {
    400: _MALFORMED,
    408: TooSlow("the head of the request did not arrive in time"),
    413: TooLarge("the body is too large"),
    500: QuartetError("Internal error"),
    501: _MALFORMED,
    502: _LOST,
    503: _LOST,
    504: DeadlineExceeded("The server did not answer in time."),
}


def write(folder: Path) -> None:
    """One file a status, `<status>.http`: a whole reply, as HAProxy's `errorfile` takes it."""
    for status, error in ERRORS.items():
        (folder / f"{status}.http").write_bytes(reply(error))


def reply(error: QuartetError) -> bytes:
    """The reply to `error`, head and body, as it goes over the wire."""
    made = response_of(error)
    lines = [f"HTTP/1.1 {made.status_code} {HTTPStatus(made.status_code).phrase}".encode()]
    lines += [name + b": " + value for name, value in made.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(made.body)])
