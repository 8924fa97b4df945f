"""OpenTelemetry spans of a request, when configured: one trace a request, made at its end from its record.

    chat gemma-4     |==========================================================|     server span: head read -> last byte
      queue                |=======|                                                  of each choice, on the engine's clock points
      prefill                      |===========|
      decode                                   |==============================|

A caller's `traceparent` is the parent, and its sampled flag decides; without one `sample_ratio` does. Serving never waits for the
collector: traces go through a bounded queue to a thread, and those that find it full, or that the collector does not take, are
counted, and logged once. Without an endpoint nothing of OpenTelemetry is imported. No prompt, no answer, nothing the client named.
"""

import logging
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deploy.edge.edge_settings import TracingSettings
from deploy.edge.observe.record import RequestRecord
from engine.front.client import Clock

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

BATCH_WAIT_S = 1.0  # how long a trace may wait for others to travel with
BATCH = 128  # traces
GRACE_S = 0.1
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_QUIET = ("opentelemetry.exporter.otlp", "opentelemetry.sdk")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TraceContext:
    """Where a trace hangs: `span` 0 where nobody called with one."""

    trace: int
    span: int
    sampled: bool


@dataclass(frozen=True)
class ChildSpan:
    """A child span of one choice; seconds on the monotonic clock."""

    name: str
    begin: float
    end: float
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """All that the spans of one request need; `offset_ns` takes the monotonic clock to the wall's, the same for all of them."""

    parent: TraceContext
    name: str
    begin: float
    end: float
    attributes: Mapping[str, Any]
    failed: bool
    phases: tuple[ChildSpan, ...]
    offset_ns: int

    def wall_ns(self, moment: float) -> int:
        """Unix nanoseconds."""
        return round(moment * 1e9) + self.offset_ns


class SpanSink(Protocol):
    """Where traces leave: blocks for as long as the collector takes; False: it did not take them."""

    def send(self, traces: Sequence[Trace]) -> bool: ...

    def close(self) -> None: ...


class Tracer:
    """Takes records on the event loop, and hands traces to `sink` on a thread of its own.

    `lost` counts the traces that no collector got.
    """

    def __init__(self, settings: TracingSettings, sink: SpanSink) -> None:
        self.lost = 0
        self._settings = settings
        self._sink = sink
        self._draw = random.Random()  # noqa: S311 - ids, not secrets
        self._complained = False
        self._waiting: queue.Queue[Trace | None] = queue.Queue(settings.queue)
        self._closing = False
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._deliver, name="spans", daemon=True)
        self._thread.start()

    def trace(self, record: RequestRecord) -> str | None:
        """Hand over a request that has ended; its trace id, or None where it is not sampled."""
        parent = parent_of(record.traceparent) or self._root()
        if not parent.sampled:
            return None
        try:
            if self._closing:
                raise queue.Full
            self._waiting.put_nowait(trace_of(record, parent))
        except queue.Full:
            self._lose(1)
        return f"{parent.trace:032x}"

    def close(self, timeout_s: float) -> None:
        """Deliver what waits, for `timeout_s` at most; blocks. What is left then is lost. Idempotent."""
        if self._closing:
            return
        self._closing = True
        deadline = time.monotonic() + timeout_s
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._sink.close()  # ends the pause between two attempts, if that is where the thread is
        self._thread.join(GRACE_S)
        if self._thread.is_alive():
            self._lose(self._waiting.qsize())
        if self.lost:
            logger.warning("%d traces were lost in all", self.lost)

    def _root(self) -> TraceContext:
        """A trace that begins here, sampled by its id, as OpenTelemetry's own sampler does it."""
        trace = self._draw.getrandbits(128) or 1
        return TraceContext(trace, 0, (trace & (2**64 - 1)) < self._settings.sample_ratio * 2**64)

    def _deliver(self) -> None:
        while batch := self._batch():
            traces = [trace for trace in batch if trace is not None]
            if traces and not self._sink.send(traces):
                self._lose(len(traces))
            if None in batch:
                return

    def _batch(self) -> list[Trace | None]:
        """The next trace, and those that come while it lingers; None among them: it is the last."""
        found = [self._waiting.get()]
        deadline = time.monotonic() + BATCH_WAIT_S
        while None not in found[-1:] and len(found) < BATCH:
            try:
                found.append(self._waiting.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        return found

    def _lose(self, traces: int) -> None:
        with self._counting:
            self.lost += traces
            complain, self._complained = bool(traces) and not self._complained, self._complained or bool(traces)
        if complain:
            logger.warning(
                "traces are lost: %s does not take them, or not fast enough; logged once, they are counted",
                self._settings.endpoint,
            )


def tracer(settings: TracingSettings, about: Mapping[str, str]) -> Tracer | None:
    """The tracer that the settings ask for; `about`: attributes of the resource, beside those of OTEL_RESOURCE_ATTRIBUTES."""
    return None if settings.endpoint is None else Tracer(settings, Otlp(settings, about))


def parent_of(header: bytes | None) -> TraceContext | None:
    """A W3C traceparent; None where it is none, and the trace begins here."""
    found = _TRACEPARENT.fullmatch(header or b"")
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
        return None
    trace, span = int(found[2], 16), int(found[3], 16)
    return TraceContext(trace, span, bool(int(found[4], 16) & 1)) if trace and span else None


def trace_of(record: RequestRecord, parent: TraceContext) -> Trace:
    """What the spans of an ended request say."""
    name = " ".join(filter(None, (record.operation, record.model)))
    offset_ns = time.time_ns() - time.monotonic_ns()
    phases = tuple(phase for index, clock in enumerate(record.clocks) if clock for phase in phases_of(clock, record.ended, index))
    return Trace(parent, name, record.began, record.ended, _attributes(record), record.failed, phases, offset_ns)


def phases_of(clock: Clock, ended: float, choice: int) -> Iterator[ChildSpan]:
    """Queue, prefill and decode of one choice without a gap, as far as it came; before its first token it lasts until `ended`.

    Where the front never heard when the core began, the queue is part of prefill.
    """
    about = {"quartet.choice": choice}
    if clock.scheduled is not None or clock.first is None:
        yield ChildSpan("queue", clock.submitted, clock.scheduled or ended, about)
    begun = clock.submitted if clock.scheduled is None else clock.scheduled
    if clock.first is not None:
        yield ChildSpan("prefill", begun, clock.first, about)
        yield ChildSpan("decode", clock.first, clock.last or ended, {**about, "gen_ai.usage.output_tokens": clock.output_tokens})
    elif clock.scheduled is not None:
        yield ChildSpan("prefill", begun, ended, about)


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """By OpenTelemetry's conventions for GenAI and HTTP where they have a name; what does not apply is left out."""
    error = type(record.error).__name__ if record.error is not None else None
    found = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "quartet",
        "gen_ai.request.model": record.model,
        "gen_ai.request.choice.count": record.choices,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.answer,
        "gen_ai.response.finish_reasons": [reason for _, reason in sorted(record.finishes.items())] or None,
        "gen_ai.response.time_to_first_chunk": record.first("first"),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.tokens,
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "error.type": error or ("client_gone" if record.gone else None),
        "quartet.request.id": record.id,
        "quartet.finish": record.finish,
    }
    return {name: value for name, value in found.items() if value is not None}


class Otlp:
    """The sink that speaks OTLP over HTTP, by OpenTelemetry's own SDK and exporter. Imports them when it is made."""

    def __init__(self, settings: TracingSettings, about: Mapping[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.CRITICAL)  # it would say every failure; we count them
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=settings.timeout_s)
        self._scope = InstrumentationScope("quartet")
        self._resource = Resource.create({"service.name": settings.service_name, **about})
        self._draw: Callable[[int], int] = random.Random().getrandbits  # noqa: S311 - ids, not secrets

    def send(self, traces: Sequence[Trace]) -> bool:
        """One request to the collector."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = [span for trace in traces for span in self.spans(trace)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """No more attempts."""
        self._exporter.shutdown()

    def spans(self, trace: Trace) -> "Iterator[ReadableSpan]":
        """The SDK's spans of one trace, the server's first."""
        above = self._context(trace, trace.parent.span, remote=True) if trace.parent.span else None
        server = self._context(trace, self._draw(64) or 1)
        whole = ChildSpan(trace.name, trace.begin, trace.end, trace.attributes)
        yield self._span(trace, whole, server, above, failed=trace.failed)
        for phase in trace.phases:
            yield self._span(trace, phase, self._context(trace, self._draw(64) or 1), server)

    def _context(self, trace: Trace, span: int, *, remote: bool = False) -> "SpanContext":
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(trace.parent.trace, span, remote, TraceFlags(TraceFlags.SAMPLED))

    def _span(
        self, trace: Trace, phase: ChildSpan, context: "SpanContext", above: "SpanContext | None", *, failed: bool = False
    ) -> "ReadableSpan":
        """Made ended: all is known, and a tracer of the SDK would open and close each in turn at ten times the cost."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode

        return ReadableSpan(
            phase.name,
            context=context,
            parent=above,
            resource=self._resource,
            attributes=phase.attributes,
            kind=SpanKind.INTERNAL if above is not None and not above.is_remote else SpanKind.SERVER,
            status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
            start_time=trace.wall_ns(phase.begin),
            end_time=trace.wall_ns(phase.end),
            instrumentation_scope=self._scope,
        )
