"""How streams end: finished, aborted, late, too slow, or with the engine; each ends once and the engine knows."""

import asyncio
import json
import socket
import threading
import time
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.guards.limits import Limits
from deploy.edge.routes import create_app
from tests.conftest import Nano
from tests.support.edge.api_client import chat_body, error_of, whole_and_streamed
from tests.support.edge.http_edge import Edge, Edges, until

pytestmark = [pytest.mark.pure, pytest.mark.alone]

BODY = chat_body(stream=True, max_tokens=200)
CHAT = "/v1/chat/completions"


def outcomes(edge: Edge) -> list[str]:
    return [end.outcome for end in edge.ends]


def test_the_first_token_is_not_held_back(edge: Edge) -> None:
    """It arrives while the next one is still far away."""
    edge.core.delay_s = 10.0
    with edge.stream(CHAT, BODY | {"max_tokens": 2}) as reply:
        first = next(reply.iter_raw())
        assert edge.core.sent == 1
        assert first.count(b"data: ") == 2  # the role and the first text, in one write
    until(lambda: outcomes(edge) == ["client_gone"], "the end of what the client left")


@whole_and_streamed
def test_a_client_that_leaves_ends_its_request(edge: Edge, *, stream: bool) -> None:
    """The engine is told client_gone, mid-stream and while a whole answer is awaited."""
    edge.core.answer_endlessly(0.02)
    edge.configure(max_len=10**6)
    body = json.dumps(BODY | {"stream": stream, "max_tokens": 100_000}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", edge.port)) as sock:
        sock.sendall(head + body)
        until(lambda: edge.core.sent > 3, "tokens")
        if stream:
            assert b"data:" in sock.recv(65536)
    until(lambda: edge.core.abort_reasons == ["client_gone"], "the abort")
    until(lambda: outcomes(edge) == ["client_gone"], "its count")
    until(lambda: edge.service.open == 0, "the end of the answer")


def test_what_has_piled_up_goes_out_as_one_chunk(edge: Edge) -> None:
    """Two hundred steps that come at once need few events, and no token is lost. Planted: a core that gives each by itself."""
    edge.core.forever = edge.core.at_once = True
    reply = edge.post(CHAT, BODY)
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line and "[DONE]" not in line]
    assert len(chunks) <= 5
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    tokens = [token for _ in range(67) for token in (300, 301, 302)][:200]
    assert text == edge.text.decode(tokens)
    assert text != edge.text.decode(tokens[:-1]), "the comparison would not notice a lost token"
    edge.core.at_once, edge.core.delay_s = False, 0.002
    assert edge.post(CHAT, BODY).text.count("data:") > 50


@pytest.fixture(scope="module")
def short_deadline(edges: Edges) -> Edge:
    """An edge with little patience."""
    limits = LimitSettings(request_timeout_s=1.5)
    return edges(limits=limits, max_len=10**6)


def test_a_deadline_ends_a_stream_with_one_error_event(short_deadline: Edge) -> None:
    """And the engine is told why."""
    short_deadline.reset()
    short_deadline.core.answer_endlessly(0.05)
    reply = short_deadline.post(CHAT, BODY | {"max_tokens": 10_000})
    data = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert sum("error" in line for line in data) == 1
    assert json.loads(data[-1])["error"]["code"] == "deadline_exceeded"
    until(lambda: short_deadline.core.abort_reasons == ["deadline"], "the abort")


def test_a_deadline_before_the_first_token_is_504(short_deadline: Edge) -> None:
    """A plain reply, not to be retried."""
    short_deadline.reset()
    short_deadline.core.steps = []
    short_deadline.core.forever = False
    reply = short_deadline.post(CHAT, BODY)
    assert reply.status_code == 504
    assert reply.headers["x-should-retry"] == "false"


def test_a_reader_that_never_reads_is_dropped(nano: Nano) -> None:
    """Its request ends as slow_reader, what was produced for it stays bounded, and its answer does not wait until it leaves."""
    with Edge(nano("31b"), limits=LimitSettings(write_timeout_s=0.4), max_len=10**7) as edge:
        edge.core.forever, edge.core.steps = True, [[300] * 64]
        body = json.dumps(BODY | {"max_tokens": 9_000_000}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", edge.port))
            sock.sendall(head + body)
            until(lambda: edge.core.abort_reasons == ["slow_reader"], "the abort", 60)
            sent = edge.core.sent
            time.sleep(0.2)
            assert edge.core.sent == sent
            until(lambda: edge.service.open == 0, "the end of the answer")


async def ask(app: ASGIApp, body: dict[str, Any], send: Send) -> None:
    """A chat of a client that stays."""
    said = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive() -> Message:
        return next(said, None) or await asyncio.Future()

    heads = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    await app({"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": heads}, receive, send)


@pytest.mark.parametrize("stuck_at", ["head", "first chunk", "last chunk"])
def test_each_write_is_bounded(edge: Edge, stuck_at: str) -> None:
    """Where it never ends, the request does, as slow_reader, and nothing more is written."""
    sent = []
    edge.core.answer_endlessly(0.02)
    edge.configure(limits=LimitSettings(write_timeout_s=0.1))
    body = BODY | {"max_tokens": 4 if stuck_at == "last chunk" else 200}

    async def send(message: Message) -> None:
        is_last = message["type"] == "http.response.body" and not message["more_body"]
        sent.append("last chunk" if is_last else "first chunk" if sent else "head")
        if sent[-1] == stuck_at:
            await asyncio.Future()

    async def answered() -> None:
        async with asyncio.timeout(5):
            await ask(create_app(edge.service), body, send)

    edge.run(answered())
    assert sent.count(stuck_at) == 1
    assert sent[-1] == stuck_at
    until(lambda: outcomes(edge) == ["length" if stuck_at == "last chunk" else "slow_reader"], "the end")


def test_a_full_queue_is_429_at_once(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """In OpenAI's shape, with Retry-After, counted by choices; when a place is free again the same request is served."""
    edge.core.answer_endlessly(0.02)
    monkeypatch.setattr(edge.service.admission, "choices", 3)
    with edge.stream(CHAT, BODY | {"n": 2}) as reply:
        parts = reply.iter_raw()  # held: a forgotten iterator closes its connection
        next(parts)
        refused = edge.post(CHAT, BODY | {"n": 2})
        assert len(edge.core.requests) == 2, "it has waited for the engine"
        assert (error_of(refused, 429)["code"], refused.headers["retry-after"]) == ("overloaded", "1")
        assert edge.post(CHAT, BODY | {"max_tokens": 1}).status_code == 200
    until(lambda: edge.service.open == 0, "a free place")
    assert edge.post(CHAT, BODY | {"n": 3, "max_tokens": 1}).status_code == 200


def test_the_engines_end_is_one_error_event_on_every_stream(nano: Nano) -> None:
    """Eight open streams: eight error events, no [DONE]; then 503 with Retry-After, and health says so."""
    with Edge(nano("31b")) as edge:
        edge.core.answer_endlessly(0.1)
        replies = []

        def read() -> None:
            replies.append(edge.post(CHAT, BODY).text)

        readers = [threading.Thread(target=read) for _ in range(8)]
        for reader in readers:
            reader.start()
        until(lambda: len(edge.core.requests) == 8 and edge.core.sent > 30, "eight streams")
        edge.on_loop(lambda: edge.client.fail("rank 2 was killed by SIGKILL"))
        for reader in readers:
            reader.join(20)
        assert len(replies) == 8
        for reply in replies:
            assert reply.count('"error"') == 1
            assert "engine_restarting" in reply.rstrip().rpartition("\n\n")[2]
            assert "[DONE]" not in reply
            assert "SIGKILL" not in reply, "which process died is not for clients"
        late = edge.post(CHAT, BODY)
        assert (late.status_code, late.headers["retry-after"]) == (503, "5")
        assert edge.post("/tokenize", {"prompt": "Hi"}).status_code == 503
        for path in ("/health", "/health/live", "/health/ready"):
            assert edge.get(path).status_code == 503
        assert outcomes(edge) == ["dead"] * 8


@pytest.mark.parametrize("guarded", [True, False])
def test_only_a_streams_ends_pass_what_stands_around_the_app(edge: Edge, *, guarded: bool) -> None:
    """Its head and its last chunk do, for Serve's figures; the server gets all others, in order, none lost where it waits. Planted:
    without the guard that knows the server's `send`, all of them pass."""
    passed = []
    sent = []
    app = create_app(edge.service)
    edge.core.answer_endlessly(0.002)

    async def around(scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            passed.append(message)
            await send(message)

        await app(scope, receive, noted)

    async def send(message: Message) -> None:
        if len(sent) % 5 == 0:  # the client is slow now and then
            await asyncio.sleep(0.01)
        sent.append(message)

    edge.run(ask(Limits(around, LimitSettings(), is_guard=guarded), BODY | {"max_tokens": 40}, send))
    assert len(sent) > 10
    assert passed == ([sent[0], sent[-1]] if guarded else sent)
    chunks = b"".join(message["body"] for message in sent[1:]).decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    text = "".join(json.loads(chunk[6:])["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == edge.text.decode(([300, 301, 302] * 14)[:40])
    assert not sent[-1]["more_body"]
