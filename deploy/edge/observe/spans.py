"""OpenTelemetry spans: a trace per request, made at its end.

A `traceparent`'s sampled flag decides, else `sample_ratio`. Spans hold no prompt, answer or
client's name.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deploy.edge.edge_settings import TracingSettings
from deploy.edge.observe.record import RequestRecord
from engine.front.stream import Clock

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

BATCH_WAIT_MS = 1000
_PROPAGATOR = TraceContextTextMapPropagator()


SpanPhase = tuple[str, float, float, Mapping[str, Any]]  # name, begin and end on the monotonic clock in seconds, attributes


class Tracer:
    """The SDK's thread gives ended requests' spans to `exporter`."""

    def __init__(self, settings: TracingSettings, about: Mapping[str, str], exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(settings.sample_ratio),
            resource=Resource.create({"service.name": settings.service_name, **about}),
            shutdown_on_exit=False,
        )
        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=BATCH_WAIT_MS)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("quartet")

    def trace(self, record: RequestRecord) -> str | None:
        """The trace id of an ended request, or None if not sampled."""
        offset_ns = time.time_ns() - time.monotonic_ns()

        def wall_ns(moment: float) -> int:
            return round(moment * 1e9) + offset_ns

        caller = _PROPAGATOR.extract({"traceparent": (record.traceparent or b"").decode("latin-1")}, Context())
        name = " ".join(filter(None, (record.operation, record.model)))
        server = self._tracer.start_span(name, caller, SpanKind.SERVER, _attributes(record), start_time=wall_ns(record.began))
        if not server.is_recording():
            return None
        inside = set_span_in_context(server, Context())
        for choice, clock in enumerate(record.clocks):
            for name, begin, end, attributes in phases_of(clock, record.ended, choice):
                self._tracer.start_span(name, inside, attributes=attributes, start_time=wall_ns(begin)).end(wall_ns(end))
        if record.failed:
            server.set_status(StatusCode.ERROR)
        server.end(wall_ns(record.ended))
        return f"{server.get_span_context().trace_id:032x}"

    def close(self, timeout_s: float) -> None:
        """Deliver waiting spans for at most `timeout_s`. Blocks. Idempotent."""
        closing = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(timeout_s)


def tracer(settings: TracingSettings, about: Mapping[str, str]) -> Tracer | None:
    if settings.endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Tracer(settings, about, OTLPSpanExporter(endpoint=settings.endpoint))


def phases_of(clock: Clock, ended: float, choice: int) -> Iterator[SpanPhase]:
    """Without a known start, the queue is part of prefill."""
    about = {"quartet.choice": choice}
    if clock.scheduled is not None or clock.first is None:
        yield "queue", clock.submitted, clock.scheduled or ended, about
    if clock.scheduled is not None or clock.first is not None:
        yield "prefill", clock.scheduled or clock.submitted, clock.first or ended, about
    if clock.first is not None:
        yield "decode", clock.first, clock.last or ended, {**about, "gen_ai.usage.output_tokens": clock.output_tokens}


def _attributes(record: RequestRecord) -> dict[str, Any]:
    attributes = {
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
        "error.type": type(record.error).__name__ if record.error else "client_gone" if record.gone else None,
        "quartet.request.id": record.id,
        "quartet.finish": record.finish,
    }
    return {name: value for name, value in attributes.items() if value is not None}
