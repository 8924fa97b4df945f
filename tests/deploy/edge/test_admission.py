"""Who is let in: tickets are counted where they are promised, and slow senders, slow readers and long queues shut nobody out."""

import asyncio
import heapq
import json
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import httpx
import pytest

from deploy.edge.admission_control import ANSWERS_PER_CHOICE, AdmissionControl, AdmissionTicket
from deploy.edge.edge_settings import LimitSettings
from deploy.edge.guards import uploads
from deploy.edge.guards.uploads import Claim
from deploy.edge.http.scope import client_address
from engine.errors import Overloaded
from engine.front.stream import Clock
from engine.protocol import Output
from tests.conftest import Nano
from tests.support.edge.api_client import chat_body, error_of
from tests.support.edge.http_edge import Edge, Edges, until
from tests.support.edge.ready_engine import ReadyEngine

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"
BODY = chat_body(max_tokens=3)


class AdmissionModel:
    """Requests at random stages of their lives, and an engine that has some of their choices."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = ReadyEngine()
        self.admission = AdmissionControl(self.engine, choices=20, tokens=500, bytes=1 << 40)
        self.tickets: list[AdmissionTicket] = []
        self.most = 0

    def step(self) -> None:
        """One of them comes a stage further, or a new one enters."""
        with suppress(Overloaded):
            self._advance(self.rng.choice(["enter", "settle", "submit", "engine ends", "leave"]))
        self.most = max(self.most, self.admission.taken)

    def _advance(self, what: str) -> None:
        if what == "enter":
            self.tickets.append(self.admission.enter(self.rng.choice("abc")))
        elif what == "engine ends":
            self.engine.open = max(0, self.engine.open - 1)
        elif self.tickets:
            ticket = self.rng.choice(self.tickets)
            if what == "leave":
                ticket.leave()
                ticket.leave()
                self.tickets.remove(ticket)
            elif what == "settle" and ticket.tokens == 0:
                ticket.settle(self.rng.randint(1, 8), self.rng.randint(1, 300))
            elif what == "submit" and ticket._reserved and ticket.tokens:
                self.engine.open += ticket._reserved
                ticket.submitted([Clock(0.0, scheduled=self.rng.choice([None, 1.0]))], lambda: None)


@pytest.mark.parametrize("seed", range(20))
def test_no_more_is_promised_than_there_is(seed: int) -> None:
    """Over a thousand random steps never more than all are taken, at times too many for a request of eight, and all come back."""
    model = AdmissionModel(seed)
    for _ in range(1000):
        model.step()
        assert model.admission.taken <= 20
    assert model.most > 20 - 8, "the limit was never near: it was not tested"
    for ticket in model.tickets:
        ticket.leave()
    model.engine.open = 0
    assert (model.admission.taken, model.admission.waiting_tokens, model.admission._open_answers) == (0, 0, 0)


def test_a_place_that_is_kept_would_show() -> None:
    """The same count when one of the tickets is not given back."""
    model = AdmissionModel(0)
    kept = model.admission.enter("a")
    kept.settle(3, 10)
    assert (model.admission.taken, model.admission.waiting_tokens) == (3, 10)


def test_a_long_prompt_may_wait_alone() -> None:
    """Beyond the tokens that may wait, but nothing else does; the next one may not, until the first has begun."""
    model = AdmissionModel(0)
    long, short, later = (model.admission.enter("a") for _ in range(3))
    long.settle(1, 10_000)
    with pytest.raises(Overloaded, match="10000 tokens"):
        short.settle(1, 1)
    clock = Clock(0.0)
    long.submitted([clock], lambda: None)
    with pytest.raises(Overloaded):
        short.settle(1, 1)
    clock.scheduled = 1.0
    later.settle(1, 1)


def test_what_others_began_is_kept_for_clients_that_wait() -> None:
    """A client's choices elsewhere delay its next one here, and are forgotten once it waits for nothing."""
    admission = AdmissionControl(ReadyEngine(), choices=20, tokens=500, bytes=1000)
    waiting, other, next_one = (admission.enter(client) for client in "aba")
    waiting.settle(1, 1)
    admission.note_elsewhere({"a": 5, "b": 7})
    admission.note_elsewhere({})
    other.settle(1, 1)
    next_one.settle(1, 1)
    assert (waiting.turn, other.turn, next_one.turn) == (0, 0, 6)


def test_media_that_wait_are_bounded_in_bytes() -> None:
    """One request's always may, beside others only what fits; when it has begun there is room."""
    admission = AdmissionControl(ReadyEngine(), choices=20, tokens=500, bytes=1000)
    large, other, text = (admission.enter("a") for _ in range(3))
    large.settle(1, 10, 5000)
    with pytest.raises(Overloaded, match="5000 bytes of images"):
        other.settle(1, 10, 1)
    text.settle(1, 10)
    clock = Clock(0.0, scheduled=1.0)
    large.submitted([clock], lambda: None)
    other.settle(1, 10, 1)


def served_in_turn(arrivals: list[tuple[int, str]], slots: int, *, fault: bool = False) -> list[tuple[int, str, int]]:
    """(began, client, came) of each request, which keeps a slot for 10 ticks; `fault`: in order of arrival, whoever asks."""
    engine = ReadyEngine()
    admission = AdmissionControl(engine, choices=1 << 20, tokens=1 << 30, bytes=1 << 40)
    queue = []
    ends, begun, left = [0] * slots, [], list(enumerate(arrivals))
    for tick in range(1 << 20):
        while left and left[0][1][0] <= tick:
            number, (_, client) = left.pop(0)
            ticket, clock = admission.enter(client), Clock(0.0)
            ticket.settle(1, 1)
            ticket.submitted([clock], lambda: None)
            heapq.heappush(queue, (0 if fault else ticket.turn, number, client, clock))
        while queue and min(ends) <= tick:
            _, number, client, clock = heapq.heappop(queue)
            clock.scheduled = 1.0
            begun.append((tick, client, arrivals[number][0]))
            ends[ends.index(min(ends))] = tick + 10
        if not (left or queue):
            break
    return begun


def test_a_newcomer_waits_for_no_crowd() -> None:
    """200 requests of one client wait; each of another's, who comes later, has the next slot but one. Planted: in order of arrival
    it waits for all of them."""
    arrivals = [(0, "crowd")] * 200 + [(at, "newcomer") for at in range(25, 90, 20)]
    for fault, longest in ((False, 20), (True, 500)):
        waits = [began - came for began, client, came in served_in_turn(arrivals, 4, fault=fault) if client == "newcomer"]
        assert max(waits) <= longest
        assert fault is (min(waits) > 20), waits


@pytest.mark.parametrize("seed", range(5))
def test_clients_share_alike(seed: int) -> None:
    """While all of three wait, however many requests each has, they begin in turn; alone a client has all, in order."""
    rng = random.Random(seed)
    counts = {"a": 300, "b": 40, "c": 40}
    arrivals = [(0, client) for client, count in counts.items() for _ in range(count)]
    rng.shuffle(arrivals)
    began = served_in_turn(arrivals, 4)
    shares = Counter(client for _, client, _ in began[4:90])
    assert max(shares.values()) - min(shares.values()) <= 2 + 4, shares
    alone = [(at // 3, "a") for at in range(100)]
    assert served_in_turn(alone, 4) == served_in_turn(alone, 4, fault=True), "in order, and no slot stays empty"


def test_the_last_of_the_greediest_gives_way(nano: Nano) -> None:
    """All tickets wait for one address: the newest of them is refused in shape for another address' request, which is served.
    Planted: for one of the same address none is, and it is refused itself."""
    with Edge(nano("31b")) as edge, ThreadPoolExecutor(8) as pool:
        edge.service.admission.choices = 8
        edge.core.queue_s = 20.0

        def ask(address: str) -> httpx.Response:
            return edge.post(CHAT, BODY, headers={"x-forwarded-for": f"9.9.9.9, {address}"})

        waiting = []
        for count in range(1, 9):
            waiting.append(pool.submit(ask, "10.0.0.1"))
            until(lambda count=count: len(edge.core.requests) == count, "it waits")
        edge.core.queue_s = 0.0
        assert (ask("10.0.0.1").status_code, edge.core.aborts) == (429, [])
        assert ask("10.0.0.2").status_code == 200
        refused = waiting[-1].result(20)
        assert (refused.status_code, refused.headers["retry-after"], "other clients" in refused.text) == (429, "1", True)
        assert [request for request, _ in edge.core.aborts] == [edge.core.requests[7].id]
        priorities = [request.priority for request in edge.core.requests]
        assert priorities == [*range(8), 0], "the newcomer's turn is beside the first's"
        edge.on_loop(lambda: edge.client.fail("the end of the test"))


@pytest.mark.parametrize(
    ("client", "forwarded", "address"),
    [
        ("10.0.0.9:1", [], "10.0.0.9"),
        ("10.0.0.9:0", ["10.0.0.9"], "10.0.0.9"),
        ("127.0.0.1:1", ["10.0.0.9"], "10.0.0.9"),
        ("6.6.6.6:0", ["6.6.6.6", "127.0.0.1"], "127.0.0.1"),
        ("10.0.0.9:0", ["6.6.6.6", "10.0.0.9"], "10.0.0.9"),
        ("10.0.0.9:1", ["6.6.6.6"], "10.0.0.9"),
        ("10.0.0.9:1", ["127.0.0.1"], "10.0.0.9"),
        ("10.0.0.9:1", ["127.0.0.7, 127.0.0.8"], "10.0.0.9"),
        ("10.1.0.1:1", ["10.0.0.9"], "10.0.0.9"),
        ("127.0.0.1:1", ["6.6.6.6, 10.0.0.9, 10.1.0.1"], "10.0.0.9"),
        ("127.0.0.1:1", ["10.1.0.1"], "127.0.0.1"),
        ("2001:db8:1:2:3::4:1", [], "2001:db8:1:2::/64"),
        ("2001:db8:1:2:9::9:1", [], "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.9:1", [], "::ffff:10.0.0.9"),
        ("somebody:1", [], "somebody"),
    ],
)
def test_whose_request_it_is(client: str, forwarded: list[str], address: str) -> None:
    """The connection's or, where that is of loopback or a proxy of the settings, whom it names last. uvicorn has port 0 where it
    has put such a name in the connection's place; what a client says of itself does not count."""
    host, _, port = client.rpartition(":")
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    scope = {"type": "http", "client": (host, int(port)), "headers": headers}
    assert client_address(scope, ["10.1.0.0/16", "fd00::1"]) == address


def test_a_proxy_that_nobody_has_named_is_a_client() -> None:
    """Planted: without the setting, the address that the proxy names does not count."""
    scope = {"type": "http", "client": ("10.1.0.1", 1), "headers": [(b"x-forwarded-for", b"10.0.0.9")]}
    assert client_address(scope) == "10.1.0.1"
    with pytest.raises(ValueError, match=r"10\.1\.0\.x"):
        LimitSettings(proxies=("10.1.0.x",))


def test_a_burst_gets_what_there_is(nano: Nano) -> None:
    """144 requests of eight choices at 128 tickets: 16 are served, and each other is refused in shape, with Retry-After, before."""
    replies = []

    async def burst(edge: Edge) -> None:
        async def ask() -> None:
            replies.append(await client.post(f"{edge.url}{CHAT}", json=BODY | {"n": 8}))

        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=200)) as client:
            await asyncio.gather(*(ask() for _ in range(144)))

    async def answer_later(*outputs: Output, **more: Any) -> None:
        while len(replies) < 128:  # noqa: ASYNC110 - appended by another thread
            await asyncio.sleep(0.01)
        await send(*outputs, **more)

    with Edge(nano("31b")) as edge:
        edge.service.admission.choices = 128
        send, edge.core.send = edge.core.send, answer_later  # type: ignore[method-assign]
        asyncio.run(burst(edge))
        assert Counter(reply.status_code for reply in replies) == {200: 16, 429: 128}
        assert len(edge.core.requests) == 128
        until(lambda: edge.service.admission.taken == 0, "every ticket back")
    for reply in replies:
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "overloaded"


def half_sent(edge: Edge, body: bytes = b'{"m', length: int = 1_000_000) -> socket.socket:
    """A request whose body does not come."""
    sock = socket.create_connection(("127.0.0.1", edge.port), timeout=5)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def test_slow_bodies_shut_nobody_out(nano: Nano) -> None:
    """Two hundred requests whose bodies do not come hold no ticket: an honest one is served at once, at eight tickets."""
    with Edge(nano("31b")) as edge, ExitStack() as stack:
        edge.service.admission.choices = 8
        for _ in range(200):
            stack.enter_context(half_sent(edge))
        assert edge.post(CHAT, BODY).status_code == 200
        assert edge.service.admission.taken == 0


@pytest.fixture(scope="module")
def narrow(edges: Edges) -> Edge:
    limits = LimitSettings(uploads=4, body_bytes=1 << 20, upload_bytes=1 << 20, queue_timeout_s=1.0, request_timeout_s=5.0)
    return edges(limits=limits)


@pytest.mark.alone
@pytest.mark.parametrize("fault", [False, True])
def test_a_body_that_has_no_room_is_refused_before_it_is_sent(narrow: Edge, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One upload of a megabyte takes all bytes: the next, which may not wait for room, gets a 429 by its head, Retry-After, the
    first one still waits, and a small body is served. Planted: bodies that count as they come."""
    monkeypatch.setattr(uploads, "WAITS_S", (0.0,))
    if fault:
        monkeypatch.setattr(Claim, "grow", lambda claim, size: None)
    narrow.reset()
    with half_sent(narrow) as first, half_sent(narrow, b"") as second:
        second.settimeout(0.5)
        with pytest.raises(TimeoutError) if fault else nullcontext():
            reply = second.recv(4096)
            assert reply.startswith(b"HTTP/1.1 429")
            assert b"retry-after: 60" in reply
        first.settimeout(0.2)
        with pytest.raises(TimeoutError):
            first.recv(1)
        assert fault or narrow.post(CHAT, BODY).status_code == 200


@pytest.mark.alone
def test_a_client_has_half_of_the_uploads(narrow: Edge) -> None:
    """Of four: its third is refused, and another address' is served while its two wait."""
    narrow.reset()
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(half_sent(narrow, b"x", length=2))
        until(lambda: narrow.post(CHAT, BODY).status_code == 429, "a refusal")
        assert narrow.post(CHAT, BODY, headers={"x-forwarded-for": "10.0.0.2"}).status_code == 200


@pytest.mark.alone
def test_a_request_waits_its_time_and_no_longer(narrow: Edge) -> None:
    """One that has not begun after queue_timeout_s is refused with 429 and Retry-After, and counted so; one that has goes on."""
    narrow.reset()
    narrow.core.queue_s = 10.0
    begun = time.monotonic()
    reply = narrow.post(CHAT, BODY)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1"), "at its deadline it would be 504"
    assert time.monotonic() - begun > 0.2
    until(lambda: narrow.core.abort_reasons == ["queue_timeout"], "the abort")
    until(lambda: [end.outcome for end in narrow.ends] == ["queue_timeout"], "its count")
    narrow.reset()
    narrow.core.prefill_s = 1.5
    assert narrow.post(CHAT, BODY).status_code == 200


def test_too_many_requests_at_once_are_refused_in_shape(nano: Nano) -> None:
    """Of any kind, by the guard that stands outermost: whoever comes after them hears 429, and is served when they are gone."""
    with Edge(nano("31b"), limits=LimitSettings(requests=16)) as edge:
        with ExitStack() as stack:
            for _ in range(16):
                stack.enter_context(half_sent(edge))
            until(lambda: asked(edge) == 429, "a refusal")
        until(lambda: asked(edge) == 200, "room again")


def asked(edge: Edge) -> int:
    """The status of a small question."""
    reply = edge.get("/v1/models")
    assert reply.status_code == 200 or reply.json()["error"]["code"] == "overloaded"
    return reply.status_code


def test_rendering_is_part_of_the_deadline(nano: Nano) -> None:
    """A prompt that takes too long to render ends by the request's deadline, as one error, and reaches no engine."""
    with Edge(nano("31b"), limits=LimitSettings(request_timeout_s=0.3)) as edge:
        real, answered = edge.text.render_chat, threading.Event()
        edge.text.render_chat = lambda *args, **kwargs: answered.wait(20) and real(*args, **kwargs)  # type: ignore[method-assign]
        reply = edge.post(CHAT, BODY)
        answered.set()
        assert error_of(reply, 504)["code"] == "deadline_exceeded"
        assert edge.core.requests == []
        assert edge.service.admission.taken == 0


def test_the_others_of_a_failed_choice_are_not_the_clients_fault(nano: Nano) -> None:
    """One of three choices fails: the others are aborted as its siblings, and the client has gone nowhere."""
    with Edge(nano("31b")) as edge:
        edge.core.answer_endlessly(0.01)
        edge.core.fail_after = 3
        edge.core.fails = lambda request: request is edge.core.requests[0]
        reply = edge.post(CHAT, BODY | {"n": 3, "max_tokens": 200})
        assert reply.json()["error"]["code"] == "generation_failed"
        until(lambda: edge.core.abort_reasons == ["sibling_failed"] * 2, "the aborts")
        outcomes = Counter(end.outcome for end in edge.ends)
        assert outcomes == {"error": 1, "sibling_failed": 2}


def test_a_reader_holds_no_place_once_the_engine_is_done(nano: Nano) -> None:
    """Its answer waits for it outside the count: at as many tickets as it has choices, the next request is served meanwhile."""
    with Edge(nano("31b"), max_len=2048) as edge, socket.socket() as sock:
        edge.service.admission.choices = 4
        edge.core.forever = True
        body = json.dumps(BODY | {"stream": True, "n": 4, "max_tokens": 1900, "logprobs": True, "top_logprobs": 20}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", edge.port))
        sock.sendall(head.encode() + body)
        until(lambda: len(edge.core.requests) == 4 and edge.client.open == 0, "the engine's part", 20)
        assert edge.service.open == 4, "the answer was read: nothing is tested"
        reply = edge.post(CHAT, BODY)
        assert reply.status_code == 200


def test_a_newcomers_turn_is_of_those_that_run() -> None:
    """With the first that waits; where nobody waits, with the last that began. A turn of 0 would be before them all."""
    admission = AdmissionControl(ReadyEngine(), choices=20, tokens=500, bytes=1000)
    clocks = [Clock(0.0) for _ in range(5)]
    for clock in clocks:
        ticket = admission.enter("a")
        ticket.settle(1, 1)
        ticket.submitted([clock], lambda: None)
    for clock in clocks[:3]:
        clock.scheduled = 1.0
    second = admission.enter("b")
    second.settle(1, 1)
    assert second.turn == 3
    second.leave()
    for clock in clocks[3:]:
        clock.scheduled = 1.0
    third = admission.enter("c")
    third.settle(1, 1)
    assert third.turn == 4


def test_open_answers_are_bounded() -> None:
    """Requests that have not said yet what they ask for are refused beyond a number; one that leaves makes room for one."""
    admission = AdmissionControl(ReadyEngine(), choices=2, tokens=500, bytes=1000)
    tickets = [admission.enter("a") for _ in range(ANSWERS_PER_CHOICE * 2)]
    with pytest.raises(Overloaded):
        admission.enter("b")
    tickets[0].leave()
    admission.enter("b")
    with pytest.raises(Overloaded):
        admission.enter("b")
