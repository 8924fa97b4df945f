"""Spans as a collector gets them over HTTP: times, attributes, parents, and a collector that is dead."""

import asyncio
import math
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_trace_id
from starlette.types import ASGIApp

from deploy.edge.edge_settings import TracingSettings
from deploy.edge.media.media_preparer import MediaPreparer
from deploy.edge.observe import spans
from deploy.edge.observe.record import RequestRecord
from deploy.edge.observe.spans import SpanPhase, Tracer, phases_of, tracer
from deploy.edge.routes import create_app
from deploy.edge.serving.service import Service
from engine.events import Event, FirstToken, RequestFinished, Scheduled
from engine.front.grammar_check import GrammarCheck
from engine.front.stream import Clock
from engine.front.text import TextProcessor
from engine.matcher import Vocabulary
from tests.conftest import Nano
from tests.support.edge.api_client import chat_body, whole_and_streamed
from tests.support.edge.collector import Collector, attributes
from tests.support.edge.http_edge import Edge, Edges, until
from tests.support.edge.ready_engine import ReadyEngine, request
from tests.support.edge.scripted_core import ScriptedCore
from tests.support.edge.served_settings import service_settings
from tests.support.engine.outcomes import no_sink
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"
BODY = chat_body(max_tokens=3)
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
EPSILON_S = 2e-6  # a span's two ends are rounded to nanoseconds, from floats of some 1e5 s


@pytest.fixture(scope="module")
def paced(edges: Edges) -> Edge:
    return edges()


class Traced:
    """An edge whose spans go to a collector."""

    def __init__(self, edge: Edge, collector: Collector, tracer: Tracer) -> None:
        self.edge, self.collector, self.tracer = edge, collector, tracer

    @property
    def core(self) -> ScriptedCore:
        return self.edge.core

    def post(self, body: dict[str, Any] = BODY, **headers: str) -> httpx.Response:
        return self.edge.post(CHAT, body, headers=headers)

    def spans(self) -> list[Span]:
        """All there are, delivered."""
        self.edge.settle()
        self.tracer.close(5)
        return self.collector.spans


def settings(endpoint: str, **values: Any) -> TracingSettings:
    return TracingSettings(endpoint=endpoint, **values)


@contextmanager
def tracing(edge: Edge, endpoint: str, **values: Any) -> Iterator[Tracer]:
    """Spans of the edge's requests go to `endpoint`."""
    edge.reset()
    made = tracer(settings(endpoint, **values), {"service.instance.id": "r1"})
    assert made is not None
    edge.service.tracer = made
    try:
        yield made
        edge.settle()
    finally:
        edge.service.tracer = None


@pytest.fixture
def traced(paced: Edge) -> Iterator[Traced]:
    with Collector() as collector, tracing(paced, collector.endpoint) as made:
        yield Traced(paced, collector, made)
        made.close(1)


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


def complaints(spans: Sequence[Span], events: Sequence[Event]) -> list[str]:
    """What is wrong with one request's four spans, held against each other and against the engine's own events."""
    named = {span.name: span for span in spans}
    root, queue, prefill, decode = (named[name] for name in ("chat nano", "queue", "prefill", "decode"))
    found = []
    if {span.trace_id for span in spans} != {root.trace_id} or {span.parent_span_id for span in spans} != {b"", root.span_id}:
        found.append("not one trace")
    found += [f"a gap of {later.start_time_unix_nano - earlier.end_time_unix_nano} ns before {later.name}"
              for earlier, later in ((queue, prefill), (prefill, decode))
              if later.start_time_unix_nano != earlier.end_time_unix_nano]  # fmt: skip
    if queue.start_time_unix_nano < root.start_time_unix_nano or decode.end_time_unix_nano > root.end_time_unix_nano:
        found.append("a phase outside the request")
    (scheduled,) = (event for event in events if isinstance(event, Scheduled))
    (first,) = (event for event in events if isinstance(event, FirstToken))
    (ended,) = (event for event in events if isinstance(event, RequestFinished))
    assert ended.tpot_s is not None
    true = (scheduled.queue_s, first.ttft_s - scheduled.queue_s, ended.tpot_s * (ended.output_tokens - 1))
    for span, value in zip((queue, prefill, decode), true, strict=True):
        if abs(seconds(span) - value) > EPSILON_S:
            found.append(f"{span.name} takes {seconds(span)} s, the engine says {value}")
    return found


@whole_and_streamed
def test_the_phases_are_the_engines_and_fill_the_request(traced: Traced, *, stream: bool) -> None:
    """queue, prefill and decode touch, lie within the server's span, and last as long as the engine's events say; so to 2 us."""
    traced.core.queue_s, traced.core.prefill_s, traced.core.delay_s = 0.03, 0.05, 0.02
    before = time.time_ns()
    assert traced.post(BODY | {"stream": stream}).status_code == 200
    spans = traced.spans()
    assert sorted(span.name for span in spans) == ["chat nano", "decode", "prefill", "queue"]
    assert complaints(spans, traced.edge.events) == []
    named = {span.name: span for span in spans}
    assert seconds(named["queue"]) >= 0.03
    assert seconds(named["prefill"]) >= 0.05
    assert seconds(named["decode"]) >= 0.04
    assert before <= named["chat nano"].start_time_unix_nano <= named["chat nano"].end_time_unix_nano <= time.time_ns()


@pytest.mark.parametrize("fault", ["late prefill", "long queue", "other parent", "early end"])
def test_a_phase_that_is_off_by_a_millisecond_shows(traced: Traced, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The check above sees each planted fault, a thousand microseconds being 500 times its bound."""
    traced.core.queue_s, traced.core.prefill_s, traced.core.delay_s = 0.01, 0.01, 0.01

    def off(clock: Clock, ended: float, choice: int) -> Iterator[SpanPhase]:
        for name, begin, end, about in phases_of(clock, ended, choice):
            late = 1e-3 if (fault, name) == ("late prefill", "prefill") else 0.0
            long = 1e-3 if (fault, name) == ("long queue", "queue") else 0.0
            past = 60.0 if (fault, name) == ("early end", "decode") else 0.0
            yield name, begin + late, end + long + past, about

    monkeypatch.setattr("deploy.edge.observe.spans.phases_of", off)
    if fault == "other parent":
        monkeypatch.setattr("deploy.edge.observe.spans.set_span_in_context", lambda span, context: context)
    traced.post(BODY)
    assert complaints(traced.spans(), traced.edge.events) != []


def test_the_servers_span_says_what_the_reply_says(traced: Traced) -> None:
    """Names by the GenAI and HTTP conventions; token counts and finish reasons equal the reply's, and not its neighbours'."""
    traced.core.steps = [[300], [301, 302], [303]]
    reply = traced.post(BODY | {"max_tokens": 4, "n": 2}, **{"x-request-id": "abc-1"})
    spans = traced.spans()
    (root,) = (span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
    said, usage = attributes(root), reply.json()["usage"]
    assert usage["completion_tokens"] == 8
    tokens = [usage["prompt_tokens"], usage["completion_tokens"]]
    assert [said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]] == tokens
    assert [said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"] + 1] != tokens
    assert said["gen_ai.response.finish_reasons"] == [choice["finish_reason"] for choice in reply.json()["choices"]]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quartet",
        "gen_ai.request.model": "nano",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": reply.json()["id"],
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "quartet.request.id": "abc-1",
        "quartet.finish": "length",
    }
    assert expected.items() <= said.items()
    assert sorted((span.name, attributes(span)["quartet.choice"]) for span in spans if span is not root) == [
        (name, choice) for name in ("decode", "prefill", "queue") for choice in (0, 1)
    ]
    counts = {attributes(span)["gen_ai.usage.output_tokens"] for span in spans if span.name == "decode"}
    assert counts == {4}
    assert traced.collector.resources[0].items() >= {("service.name", "quartet"), ("service.instance.id", "r1")}


@pytest.mark.parametrize("sampled", [True, False])
def test_the_callers_trace_is_continued_and_its_decision_kept(traced: Traced, *, sampled: bool) -> None:
    """TraceContext and trace id are those of `traceparent`; its flag 0 means no spans."""
    traced.post(BODY, traceparent=f"{CALLER}-0{int(sampled)}")
    spans = traced.spans()
    assert len(spans) == (4 if sampled else 0)
    for span in spans:
        assert span.trace_id.hex() == CALLER[3:35]
    roots = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [span.parent_span_id.hex() for span in roots] == [CALLER[36:]] * len(roots)


@pytest.mark.parametrize(
    ("header", "good"),
    [
        (f"{CALLER}-01", True),
        (CALLER, False),
        ("x" * 100_000, False),
    ],
)
def test_a_traceparent_that_is_none_begins_a_trace(header: str, *, good: bool) -> None:
    """By the W3C's rules, which OpenTelemetry knows."""
    exporter = InMemorySpanExporter()
    made = Tracer(settings("http://a/"), {}, exporter)
    made.trace(_record(header.encode()))
    made.close(5)
    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    assert (format_trace_id(span.context.trace_id) == CALLER[3:35]) == (span.parent is not None) == good


def test_a_request_that_never_began_has_a_queue_and_nothing_else(traced: Traced) -> None:
    """Its client left; the span ends with the request, and says so."""
    traced.core.queue_s = 30.0
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{traced.edge.url}{CHAT}", json=BODY | {"stream": True}, timeout=httpx.Timeout(10, read=1.0))
    until(lambda: traced.core.aborts != [], "the abort")
    named = {span.name: span for span in traced.spans()}
    assert sorted(named) == ["chat nano", "queue"]
    assert named["queue"].end_time_unix_nano == named["chat nano"].end_time_unix_nano
    said = attributes(named["chat nano"])
    assert (said["error.type"], said["quartet.finish"]) == ("client_gone", "client_gone")
    assert "http.response.status_code" not in said
    assert named["chat nano"].status.code == Status.STATUS_CODE_UNSET


def test_a_refusal_is_a_span_and_our_failure_an_error(traced: Traced) -> None:
    """A 404 is the client's and leaves the status unset; NaN logits are ours; probes and lists have no spans."""
    traced.post(BODY | {"model": "other"})
    traced.edge.get("/health")
    traced.edge.get("/v1/models")
    traced.core.fail_after = 1
    traced.post(BODY | {"stream": True})
    spans = traced.spans()
    roots = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    told = [(attributes(span)["error.type"], attributes(span)["http.response.status_code"], span.status.code) for span in roots]
    assert told == [("ModelNotFound", 404, Status.STATUS_CODE_UNSET), ("GenerationFailed", 200, Status.STATUS_CODE_ERROR)]
    assert len(spans) == 5


def test_no_text_of_a_request_is_in_its_spans(traced: Traced) -> None:
    """Neither the prompt nor the answer, nor a model that the client made up; the id is there, so the search would find them."""
    traced.core.steps = [[token] for token in range(300, 330)]
    body = BODY | {"max_tokens": 30, "messages": [{"role": "user", "content": "canaryprompt"}]}
    reply = traced.post(body, **{"x-request-id": "canaryid"})
    traced.post(body | {"model": "canarymodel"})
    traced.spans()
    sent = b"".join(traced.collector.bodies)
    assert b"canaryid" in sent
    assert b"canaryprompt" not in sent
    assert b"canarymodel" not in sent
    answer = reply.json()["choices"][0]["message"]["content"]
    assert len(answer) >= 30
    assert answer.encode() not in sent


@pytest.mark.parametrize("ratio", [0, 1])
def test_the_ratio_is_sampled(ratio: int) -> None:
    """Every trace id that is told has its trace."""
    exporter = InMemorySpanExporter()
    made = Tracer(settings("http://a/", sample_ratio=ratio), {}, exporter)
    ids = [name for name in (made.trace(_record()) for _ in range(9)) if name is not None]
    made.close(5)
    assert len(ids) == 9 * ratio
    assert ids == [format_trace_id(span.context.trace_id) for span in exporter.get_finished_spans() if span.context]


def _record(traceparent: bytes | None = None) -> RequestRecord:
    return RequestRecord("a", "POST", CHAT, 1.0, math.inf, "chat", ended=2.0, status=200, traceparent=traceparent)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the SDK logs: `logs.install` sends it to Serve's log."""
    import logging

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines = []
    handler, logger = Keep(), logging.getLogger("opentelemetry")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_a_dead_collector_costs_traces_and_nothing_else(
    paced: Edge, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens there: requests are served without it, and the log says so."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.socket() as bound, ExitStack() as stack:
        bound.bind(("127.0.0.1", 0))  # kept, lest another listens there
        made = stack.enter_context(tracing(paced, f"http://127.0.0.1:{bound.getsockname()[1]}/v1/traces"))
        for _ in range(3):
            assert paced.post(CHAT, BODY).status_code == 200
    made.close(20)
    assert any("Failed to export spans batch" in line for line in said), said


@pytest.mark.alone
def test_a_collector_that_hangs_holds_up_neither_requests_nor_the_end(
    paced: Edge, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and never answers: a queue of 16 fills up, what does not fit is lost, and close keeps its time."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    with Collector(hang=True) as collector, tracing(paced, collector.endpoint) as made:
        assert paced.post(CHAT, BODY).status_code == 200
        until(lambda: collector.requests == 1, "the export that hangs")
        for _ in range(4):
            assert paced.post(CHAT, BODY).status_code == 200
        paced.settle()
        assert said == []
        assert paced.post(CHAT, BODY).status_code == 200
        until(lambda: said != [], "the word about what does not fit")
        began = time.monotonic()
        made.close(0.3)
        assert time.monotonic() - began < 15
    made._processor.span_exporter.shutdown()  # else it goes on trying, beside the tests that follow
    assert "Queue full" in said[0]


@pytest.mark.parametrize("status", [400, 200])
def test_a_collector_that_refuses_is_in_the_log(paced: Edge, said: list[str], status: int) -> None:
    """A 400 is not tried again; with the same requests a good collector gets all spans, and nothing is said."""
    with Collector(status=status) as collector:
        with tracing(paced, collector.endpoint) as made:
            for _ in range(3):
                paced.post(CHAT, BODY)
        made.close(5)
        assert len(collector.spans) == (0 if status == 400 else 12)
        assert bool(said) == (status == 400)


def test_the_end_delivers_what_waits(paced: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """close hands over the last trace at once, not after the time for which it would linger; a trace after that is lost."""
    monkeypatch.setattr(spans, "BATCH_WAIT_MS", 3_600_000)
    with Collector() as collector, tracing(paced, collector.endpoint) as made:
        for _ in range(2):
            assert paced.post(CHAT, BODY).status_code == 200
            paced.settle()
            made.close(20)
            assert len(collector.spans) == 4


def calls(app: ASGIApp, tokens: int) -> dict[str, int]:
    """How often a stream of so many tokens calls the functions of each file of ours."""
    found = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "deploy"):
            found[path.name] += 1

    async def watched() -> None:
        sys.setprofile(note)
        try:
            assert await request(app, tokens) >= tokens
        finally:
            sys.setprofile(None)

    asyncio.run(watched())
    return found


def test_a_token_costs_neither_logs_nor_spans_a_call(nano: Nano) -> None:
    """Three hundred tokens more call nothing more in access log, record, scope and spans; in the stream's own file they do."""
    text = TextProcessor.load(nano("31b"))
    traced = Tracer(settings("http://a/"), {}, InMemorySpanExporter())
    grammars = GrammarCheck(Vocabulary(text.pieces, text.eos_ids, text.vocab_size).complaint)
    service = Service(
        service_settings("nano", 1024, 1024), text, ReadyEngine(), grammars, MediaPreparer(), None, no_sink, traced, {}
    )
    app = create_app(service)
    calls(app, 1)  # what is done once a process
    few, many = calls(app, 10), calls(app, 310)
    service.tracer.close(5)
    ours = ("access_log.py", "record.py", "scope.py", "spans.py")
    assert {name: few[name] for name in ours} == {name: many[name] for name in ours}
    assert all(few[name] > 0 for name in ours)
    assert many["http_answer.py"] >= few["http_answer.py"] + 300


def test_without_an_endpoint_nothing_is_imported() -> None:
    """Neither SDK nor exporter (FastAPI brings the API); making a tracer imports both, so the question is a good one."""
    code = """
import sys
from deploy.edge import routes
from deploy.edge.observe import spans
from deploy.edge.edge_settings import TracingSettings
ours = lambda: sum(name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "requests")) for name in sys.modules)
made = spans.tracer(TracingSettings(), {})
print(made, ours())
made = spans.tracer(TracingSettings(endpoint="http://127.0.0.1:1/v1/traces"), {})
print(type(made).__name__, ours() > 20)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["None 0", "Tracer True"]
