"""An HTTP server of a few pages, on a thread of its own: what Prometheus reads.

Metrics are always the plain text format 0.0.4, whatever the Accept header asks for: every Prometheus reads it. In OpenMetrics 1.0
the library would escape the colon of `vllm:` names, and Prometheus 2 would not find them.
"""

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from engine.errors import ConfigError

TICK_S = 0.5


class Page(NamedTuple):
    """A page's content type, and what makes its body; a ConfigError of it is a 503."""

    kind: str
    body: Callable[[], bytes]


def metrics_page(collector: Collector) -> Page:
    """Returns the page of a collector's metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return Page(CONTENT_TYPE_PLAIN_0_0_4, lambda: generate_latest(registry))


class PageServer(ThreadingHTTPServer):
    """Serves `pages`, by their paths, until `stop`. `url`: of the first page."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page], name: str) -> None:
        """Open the port (0: a free one). OSError: it cannot be opened."""
        self.pages = dict(pages)
        self.address_family = socket.getaddrinfo(host, port)[0][0]
        super().__init__((host, port), _Handler)
        address = f"[{host}]" if ":" in host else host
        self.url = f"http://{address}:{self.server_port}{next(iter(pages))}"
        self._thread = threading.Thread(target=self.serve_forever, args=(TICK_S,), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give the port back."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10.0

    def do_GET(self) -> None:
        """Answer with the page of the path, or 404; 503 where the page cannot be made now: Prometheus then keeps its list."""
        pages = self.server.pages
        page = pages.get(self.path.partition("?")[0])
        status = 404
        kind = "text/plain"
        body = f"there are {', '.join(pages)}\n".encode()
        if page is not None:
            try:
                body = page.body()
                status = 200
                kind = page.kind
            except ConfigError as error:
                status = 503
                body = str(error).encode()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing: one line a scrape is noise."""
