"""What HAProxy itself answers where no replica does, in OpenAI's shape: files that deploy/haproxy.sh puts into its configuration.

502, 503  the replica was killed before it answered, or there is none: 503 with Retry-After, as when a replica loses its engine
504       nobody answered within http_options.request_timeout_s
"""

from http import HTTPStatus
from pathlib import Path

from deploy.edge.error_response import response_of
from deploy.edge.http_errors import DeadlineExceeded
from engine.errors import EngineDead, QuartetError

_LOST = EngineDead("the replica is gone")
ERRORS: dict[int, QuartetError] = {502: _LOST, 503: _LOST, 504: DeadlineExceeded("The server did not answer in time.")}


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
