"""A job runs without HTTP: its deltas go to a list, and everything that it held is given back however it ends."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.http.http_errors import DeadlineExceeded
from deploy.edge.observe.record import RequestRecord
from deploy.edge.requests.ask import Ask, RawPrompts, Sampling
from deploy.edge.serving.job_run import Deltas, JobRun
from engine.errors import EngineDead, GenerationFailed, Overloaded, QuartetError
from engine.front.generation import Delta
from tests.support.edge.http_edge import Edge, Edges, until

pytestmark = pytest.mark.pure

ASK = Ask(prompt=RawPrompts(["Hello"]), sampling=Sampling(n=2, max_tokens=3))
ENDLESS = Ask(prompt=RawPrompts(["Hello"]), sampling=Sampling(max_tokens=100))


class ListSink(list[Any]):
    """Keeps (choice, delta) pairs, then "end" or the error. `forgets`: it loses all that comes at once but the last."""

    put: Callable[[Any], Any] | None = None
    forgets = False

    def make(self, deltas: Deltas) -> list[tuple[int, Delta]]:
        return list(deltas)[-1 if self.forgets else 0 :]

    async def take(self, made: list[tuple[int, Delta]]) -> None:
        self.extend(made)

    async def end(self) -> None:
        self.append("end")

    async def fail(self, error: QuartetError) -> None:
        self.append(error)


async def run(edge: Edge, ask: Ask, sink: ListSink, deadline_s: float = 20.0) -> RequestRecord:
    """As a batch would run a line."""
    service = edge.service
    began = time.monotonic()
    record = RequestRecord("line-1", "POST", "/v1/completions", began, began + deadline_s, "text_completion")
    record.ticket = service.admission.enter("batch")
    try:
        job = await service.jobs.job(ask, record.ticket.client)
        await JobRun(service, job, record).run(sink)
    finally:
        service.settle(record)
    return record


def nothing_is_held(edge: Edge) -> bool:
    """No choice is open at the edge or in the engine, and the place is free."""
    service = edge.service
    return (service.open, service.admission.taken, service.admission._open_answers) == (0, 0, 0) and service.idle.is_set()


@pytest.fixture(scope="module")
def impatient(edges: Edges) -> Edge:
    return edges(limits=LimitSettings(queue_timeout_s=0.1))


@pytest.mark.parametrize("forgets", [False, True])
def test_a_list_gets_every_delta(edge: Edge, forgets: bool) -> None:
    """Both choices' tokens, the end, then usage and the record's figures. Planted: a list that loses what comes at once."""
    edge.core.at_once = forgets
    sink = ListSink()
    sink.forgets = forgets
    record = edge.run(run(edge, ASK, sink))
    tokens = {choice: [token for index, delta in sink[:-1] if index == choice for token in delta.tokens] for choice in (0, 1)}
    assert (tokens == {0: [300, 301, 302], 1: [300, 301, 302]}) is not forgets
    assert sink[-1] == "end"
    assert (record.finishes, record.output_tokens, record.choices, record.error) == ({0: "length", 1: "length"}, 6, 2, None)
    assert [end.outcome for end in edge.ends] == ["length", "length"]
    assert nothing_is_held(edge)


def test_a_cancelled_run_is_aborted(edge: Edge) -> None:
    """Cancelled between two tokens, the engine is told, and nothing is held. While it runs something is."""
    edge.core.answer_endlessly(0.01)
    sink = ListSink()
    running = edge.start(run(edge, ENDLESS, sink))
    until(lambda: len(sink) > 3, "some deltas")
    assert not nothing_is_held(edge)
    running.cancel()
    until(lambda: edge.core.abort_reasons == ["client_gone"], "the abort")
    until(lambda: nothing_is_held(edge), "everything given back")
    assert all(isinstance(delta, Delta) for _, delta in sink), "it has neither end nor error"


def test_a_run_without_a_turn_is_refused(impatient: Edge) -> None:
    """After queue_timeout_s in the engine's queue the sink gets Overloaded. One that has begun goes on."""
    impatient.reset()
    impatient.core.queue_s = 5.0
    sink = ListSink()
    record = impatient.run(run(impatient, ASK, sink))
    assert [type(entry) for entry in sink] == [Overloaded]
    assert record.error is sink[0]
    until(lambda: impatient.core.abort_reasons == ["queue_timeout"] * 2, "the aborts")
    until(lambda: nothing_is_held(impatient), "everything given back")
    impatient.reset()
    impatient.core.prefill_s = 0.3
    impatient.run(run(impatient, ASK, begun := ListSink()))
    assert begun[-1] == "end"


def test_a_full_engine_takes_no_run(edge: Edge) -> None:
    """More choices than there are places: the sink gets Overloaded, and the engine no request. With one place more it runs."""
    control = edge.service.admission
    places = control.choices
    try:
        control.choices = 1
        edge.run(run(edge, ASK, sink := ListSink()))
        assert [type(entry) for entry in sink] == [Overloaded]
        assert not edge.core.requests
        control.choices = 2
        edge.run(run(edge, ASK, sink := ListSink()))
        assert sink[-1] == "end"
    finally:
        control.choices = places


@pytest.mark.parametrize("late", [True, False])
def test_a_deadline_ends_a_run(edge: Edge, late: bool) -> None:
    """Past its deadline the sink has what came until then, and DeadlineExceeded. With time enough it ends."""
    edge.core.answer_endlessly(0.01)
    edge.run(run(edge, ENDLESS, sink := ListSink(), 0.3 if late else 20.0))
    assert len(sink) > 3
    assert (type(sink[-1]) is DeadlineExceeded) is late
    until(lambda: edge.core.abort_reasons == ["deadline"] * late, "the abort")
    until(lambda: nothing_is_held(edge), "everything given back")


def test_an_error_of_one_choice_ends_the_run(edge: Edge) -> None:
    """The sink gets the first error, and the other choice is aborted."""
    edge.core.fails = lambda request: request is edge.core.requests[0]
    edge.core.fail_after = 1
    edge.core.delay_s = 0.02
    edge.run(run(edge, ASK, sink := ListSink()))
    assert type(sink[-1]) is GenerationFailed
    until(lambda: edge.core.abort_reasons == ["sibling_failed"], "the abort")
    until(lambda: nothing_is_held(edge), "everything given back")


def test_the_group_dies_under_a_run(edges: Edges) -> None:
    """The sink gets EngineDead after what came, and that of a later run gets it at once."""
    edge = edges()
    edge.core.answer_endlessly(0.01)
    sink = ListSink()
    running = edge.start(run(edge, ENDLESS, sink))
    until(lambda: len(sink) > 3, "some deltas")
    edge.on_loop(lambda: edge.client.fail("a rank has died"))
    record = running.result(20)
    assert type(sink[-1]) is EngineDead
    assert record.finish == "dead"
    assert edge.service.idle.is_set()
    edge.run(run(edge, ASK, later := ListSink()))
    assert [type(entry) for entry in later] == [EngineDead]
