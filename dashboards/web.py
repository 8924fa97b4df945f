"""What the small HTTP servers of this package share: a handler that answers GET from one function, and says nothing of it."""

from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

HttpReply = tuple[int, str, bytes]  # status, content type, body


def handler(answer: Callable[[str], HttpReply]) -> type[BaseHTTPRequestHandler]:
    """A handler class. `answer` gets the path without its query; a client that leaves before the end is nobody's error."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            """The answer to the path."""
            status, kind, body = answer(self.path.partition("?")[0])
            with suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Nothing: one line a scrape is noise."""

    return Handler
