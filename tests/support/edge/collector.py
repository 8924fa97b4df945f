"""A collector of OpenTelemetry spans: a real HTTP server that decodes OTLP's protobuf, or one that takes and never answers."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Spans by arrival; `hang`: it reads, and answers nobody. `status`: what it answers."""

    def __init__(self, *, hang: bool = False, status: int = 200) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.requests = 0
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, self._released if hang else None, status))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="collector")

    @property
    def endpoint(self) -> str:
        """For the settings."""
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, body: bytes) -> None:
        """Decode one request."""
        message = ExportTraceServiceRequest.FromString(body)
        for group in message.resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in group.resource.attributes})
            for scope in group.scope_spans:
                self.spans += scope.spans
        self.bodies.append(body)

    def wait(self, spans: int, timeout_s: float = 20.0) -> list[Span]:
        """The spans, once there are so many."""
        deadline = time.monotonic() + timeout_s
        while len(self.spans) < spans:
            assert time.monotonic() < deadline, f"{len(self.spans)} spans, not {spans}: {[span.name for span in self.spans]}"
            time.sleep(0.01)
        return list(self.spans)


def attributes(span: Span) -> dict[str, Any]:
    """As plain values; lists as lists."""
    readers = {
        "string_value": str,
        "int_value": int,
        "double_value": float,
        "bool_value": bool,
        "array_value": lambda value: [item.string_value for item in value.values],
    }
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = readers[kind](getattr(pair.value, kind))
    return found


def _handler(collector: Collector, released: threading.Event | None, status: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.requests += 1
            body = self.rfile.read(int(self.headers["content-length"]))
            if released is not None:
                released.wait()
                return
            if status == 200:
                assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
                collector.take(body)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    return Handler
