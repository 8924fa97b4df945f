"""An HTTP server of a few pages in a thread, for Prometheus.

Always text format 0.0.4: OpenMetrics 1.0 escapes the colon of `vllm:` names, which Prometheus 2 would not find.
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
    """The body's ConfigError is a 503."""

    kind: str
    body: Callable[[], bytes]


def metrics_page(collector: Collector) -> Page:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return Page(CONTENT_TYPE_PLAIN_0_0_4, lambda: generate_latest(registry))


class PageServer(ThreadingHTTPServer):
    def __init__(self, host: str, port: int, pages: Mapping[str, Page], name: str) -> None:
        """Port 0: a free one. OSError."""
        self.pages = dict(pages)
        self.address_family = socket.getaddrinfo(host, port)[0][0]
        super().__init__((host, port), _Handler)
        address = f"[{host}]" if ":" in host else host
        self.url = f"http://{address}:{self.server_port}{next(iter(pages))}"
        self._thread = threading.Thread(target=self.serve_forever, args=(TICK_S,), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 10.0

    def do_GET(self) -> None:
        """404 without the page; 503 if it cannot be made now, so Prometheus keeps its list."""
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
