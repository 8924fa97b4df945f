"""What HAProxy itself answers where no replica does, in OpenAI's shape: files that deploy/haproxy.sh puts into its configuration.

404, 405  no application has the path, or HTTP has no such method
502, 503  the replica was killed before it answered, or there is none: 503 with Retry-After, as when a replica loses its engine
504       nobody answered within http_options.request_timeout_s
"""

from http import HTTPStatus
from pathlib import Path

from deploy.edge.error_response import OPENAI_ERROR, plain_error, refusal
from deploy.edge.http_errors import DeadlineExceeded
from engine.errors import EngineDead, QuartetError

_LOST = EngineDead("the replica is gone")
ERRORS: dict[int, QuartetError] = {502: _LOST, 503: _LOST, 504: DeadlineExceeded("The server did not answer in time.")}

SENTENCES = {404: "Not Found: the path must begin with /.", 405: "Method Not Allowed: there is no such method."}


def write(folder: Path) -> None:
    """Writes a file a status: a whole reply, `<status>.http`, as HAProxy's `errorfile` takes it, or a body, `<status>.json`."""
    for status, error in ERRORS.items():
        (folder / f"{status}.http").write_bytes(reply(error))
    for status, sentence in SENTENCES.items():
        (folder / f"{status}.json").write_bytes(bytes(plain_error(OPENAI_ERROR, status, sentence).body))


def reply(error: QuartetError) -> bytes:
    """Encodes the reply to `error`, head and body, as it goes over the wire."""
    response = refusal(error, OPENAI_ERROR)
    lines = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])
