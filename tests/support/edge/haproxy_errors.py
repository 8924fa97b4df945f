"""What HAProxy itself answers where no replica does, in OpenAI's shape: files that deploy/haproxy.sh puts into its configuration.

408       a request's head, or the first bytes of its body, did not arrive in time
404, 405  no application has the path, or HTTP has no such method
502, 503  the replica was killed before it answered, or there is none: 503 with Retry-After, as when a replica loses its engine
504       nobody answered within http_options.request_timeout_s

`python -m tests.support.edge.haproxy_errors` writes them from the edge's own errors.
"""

from http import HTTPStatus

from deploy.edge.http.error_response import OPENAI_ERROR, plain_error, refusal
from deploy.edge.http.http_errors import DeadlineExceeded, TooSlow
from engine.errors import EngineDead, QuartetError
from tests.support.repo_rules import ROOT

FOLDER = ROOT / "deploy" / "haproxy_errors"
_LOST = EngineDead("the replica is gone")
_ERRORS: dict[int, QuartetError] = {
    408: TooSlow("The request did not arrive in time."),
    502: _LOST,
    503: _LOST,
    504: DeadlineExceeded("The server did not answer in time."),
}
_SENTENCES = {404: "Not Found: the path must begin with /.", 405: "Method Not Allowed: there is no such method."}


def files() -> dict[str, bytes]:
    """What each file holds: a whole reply, `<status>.http`, as HAProxy's `errorfile` takes it, or a body, `<status>.json`."""
    replies = {f"{status}.http": reply(error) for status, error in _ERRORS.items()}
    bodies = {f"{status}.json": bytes(plain_error(OPENAI_ERROR, status, text).body) for status, text in _SENTENCES.items()}
    return replies | bodies


def reply(error: QuartetError) -> bytes:
    """The reply to `error`, head and body, as it goes over the wire."""
    response = refusal(error, OPENAI_ERROR)
    lines = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


def main() -> None:
    """Writes them."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        (FOLDER / name).write_bytes(content)


if __name__ == "__main__":
    main()
