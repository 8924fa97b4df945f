"""What is refused before it is read: sizes, slow bodies, odd hosts, steering headers."""

import asyncio
import contextlib
import json
import re
import socket
import time

import msgspec
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from deploy.edge import edge_settings
from deploy.edge.edge_settings import LIMITS_VARIABLE, LimitSettings, guard_limits
from deploy.edge.guards import limits
from deploy.edge.guards.limits import Limits, UnreadBody, check_head, outermost
from deploy.edge.http.error_response import JsonResponse
from deploy.edge.http.http_errors import ForeignHost
from deploy.edge.http.scope import RECORD
from tests.support.edge.http_edge import Edge, Edges, asgi_server, never

pytestmark = pytest.mark.pure

SMALL = LimitSettings(body_bytes=2048, header_bytes=1024, body_timeout_s=0.3)


@pytest.fixture(scope="module")
def small(edges: Edges) -> Edge:
    return edges(limits=SMALL)


def raw(edge: Edge, data: bytes, wait_s: float = 20.0) -> bytes:
    """What the server says to these bytes."""
    with socket.create_connection(("127.0.0.1", edge.port), timeout=wait_s) as sock:
        sock.sendall(data)
        reply = b""
        while not reply.endswith(b"}") and (part := sock.recv(4096)):  # every answer here is a JSON object
            reply += part
        return reply


def test_a_body_over_the_limit_is_413_by_its_announcement(small: Edge) -> None:
    """Content-Length is enough: not one byte of the body need come."""
    reply = raw(small, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"request_too_large" in reply


def test_a_chunked_body_without_end_is_413_as_soon_as_it_is_too_long(small: Edge) -> None:
    """Counted as it comes."""
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    reply = raw(small, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 3)
    assert reply.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("length", "begin", "status"), [
    ("Content-Length: 50000000", b"", 413),
    ("Transfer-Encoding: chunked", b"2faf080\r\n", 401),
])  # fmt: skip
def test_a_client_that_looks_when_it_has_sent_all_reads_why(
    monkeypatch: pytest.MonkeyPatch, length: str, begin: bytes, status: int, waits: bool
) -> None:
    """Refused by the guard or behind it: a connection that is closed while its client sends loses the answer, as Python's asyncio
    reads. Planted: an answer that ends at once."""
    if not waits:
        monkeypatch.setattr(UnreadBody, "answer", lambda unread, message: unread.send(message))

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await JsonResponse({}, 401)(scope, receive, send)

    async def nobody(scope: Scope) -> str | None:
        return None

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{length}\r\n\r\n".encode() + begin + b"x" * 50_000_000)
        await writer.drain()
        writer.write(b"\r\n0\r\n\r\n")
        reply = await reader.readline()
        writer.close()
        return reply

    with asgi_server(Limits(refuse, LimitSettings(body_bytes=2048), nobody)) as port:
        if waits:
            assert asyncio.run(ask(port)).startswith(f"HTTP/1.1 {status}".encode())
        else:
            with pytest.raises(OSError, match=r"reset|Broken pipe"):
                asyncio.run(ask(port))


@pytest.mark.parametrize("path", ["/-/healthz", "/health/live", "/llm/health/live"])
def test_a_probe_is_answered_by_a_full_server(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy takes out a replica that refuses its probe. Planted: it is a request as any."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.1)
        await JsonResponse({}, 200)(scope, receive, send)

    async def statuses() -> list[int]:
        guard, given = Limits(app, LimitSettings(requests=16, body_timeout_s=0.1)), list[int]()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                given.append(message["status"])

        scope = {"type": "http", "method": "GET", "headers": [(b"host", b"a")], "http_version": "1.1"}
        await asyncio.gather(*(guard(scope | {"path": at}, never, send) for at in [*["/v1/models"] * 17, path]))
        return sorted(given)

    assert asyncio.run(statuses()) == [200] * 17 + [429]
    monkeypatch.setattr("deploy.edge.guards.limits._PROBES", ())
    assert asyncio.run(statuses()) == [200] * 16 + [429] * 2


@pytest.mark.parametrize("logs", [False, True])
def test_a_client_that_leaves_amid_its_body_is_no_error(logs: bool) -> None:
    """Nobody is there to be answered, and a server would log a traceback for each. Planted: inside the access log it is raised."""
    sent, scope = list[Message](), {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"a")]}
    begun = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Message:
        return next(begun)

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nobody hears of it")

    asked = Limits(app, LimitSettings())(scope | ({RECORD: None} if logs else {}), receive, send)
    with pytest.raises(ClientDisconnect) if logs else contextlib.nullcontext():
        asyncio.run(asked)  # type: ignore[arg-type]
    assert not sent


def test_a_body_that_never_ends_is_408(small: Edge) -> None:
    """A slow sender holds nothing for longer than body_timeout_s."""
    before = time.monotonic()
    reply = raw(small, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    assert reply.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - before > 0.2


def test_headers_over_the_limit_are_431(small: Edge) -> None:
    """All of them together."""
    assert small.get("/v1/models", headers={"x-a": "y" * 1500}).status_code == 431
    assert small.get("/v1/models", headers={"x-a": "y" * 300}).status_code == 200


GOOD_HOSTS = ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:80", "a-b.example")
BAD_HOSTS = ("a/b", "a?b", "a#b", "a@b", "a\\b", "a b", "", "a\r\nHost: a")  # the last: two, which agree


@pytest.mark.parametrize(
    ("head", "status"),
    [
        *((f"1.1\r\nHost: {host}", 200) for host in GOOD_HOSTS), *((f"1.1\r\nHost: {host}", 400) for host in BAD_HOSTS),
        ("1.1", 400), ("1.0", 200),
    ],
)
def test_a_host_that_is_none_is_400(small: Edge, head: str, status: int) -> None:
    """Nobody downstream may parse it differently. Without one it is 400 too, but for HTTP/1.0, which has none."""
    assert raw(small, f"GET /v1/models HTTP/{head}\r\n\r\n".encode()).startswith(f"HTTP/1.1 {status}".encode())


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 400), ("Identity", 400)])
def test_a_compressed_body_is_415(small: Edge, coding: str, status: int) -> None:
    """By its head, before it comes; one that is not compressed is read, and here is no JSON."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Encoding: {coding}\r\n"
    reply = raw(small, f"{head}Content-Length: 1\r\n\r\n{'' if status == 415 else '{'}".encode())
    assert reply.startswith(f"HTTP/1.1 {status}".encode()), reply


@pytest.mark.parametrize(
    ("request_id", "kept"), [("abc-1.2_3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)]
)
def test_request_ids_are_plain(small: Edge, request_id: str, *, kept: bool) -> None:
    """What ends up in logs and headers is short and harmless: an odd id gives way to ours, before Ray Serve would send it back."""
    reply = small.get("/v1/models", headers={b"x-request-id": request_id.encode()})
    assert reply.status_code == 200
    assert (reply.headers["x-request-id"] == request_id) is kept
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", reply.headers["x-request-id"])
    header = (b"X-Request-Id", request_id.encode())
    assert passed_on(header) == ([header] if kept else [])


def passed_on(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """The headers of a request that the application behind the guard sees."""
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(scope["headers"])

    async def unused(*_: Message) -> Message:
        raise AssertionError("there is no body, and no answer")

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [*headers]}
    asyncio.run(Limits(app, LimitSettings())(scope, unused, unused))  # type: ignore[arg-type]
    return seen


def test_the_guard_around_serve_has_the_applications_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve reads whole bodies before it calls an app: the application's limits hold there too."""
    monkeypatch.setenv(LIMITS_VARIABLE, guard_limits(LimitSettings(body_bytes=4096, uploads=512), "127.0.0.1"))
    middleware, *_ = outermost()
    assert middleware.cls is Limits
    guard = middleware.kwargs["limits"]
    assert (guard.body_bytes, guard.header_bytes, guard.body_timeout_s, guard.uploads) == (4096, 32768, 30.0, 512)


def test_a_server_is_known_by_its_own_names_only() -> None:
    """Those of loopback and its own, unless the setting says others; any at a wildcard address, where nobody can know them."""

    def hosts(host: str, named: tuple[str, ...] | None) -> list[str] | None:
        return json.loads(guard_limits(LimitSettings(hosts=named), host))["hosts"]

    assert set(hosts("127.0.0.1", None) or ()) == {"127.0.0.1", "[::1]", "localhost"}
    assert set(hosts("10.0.0.7", None) or ()) == {"10.0.0.7", "127.0.0.1", "[::1]", "localhost"}
    assert hosts("127.0.0.1", ("llm.example",)) == ["llm.example"]
    assert hosts("0.0.0.0", None) is None


def answers_to(listens_on: str, named: bytes) -> bool:
    """Whether a server that listens there takes a request that names it so."""
    guard = msgspec.json.decode(guard_limits(LimitSettings(), listens_on), type=LimitSettings)
    try:
        check_head({"headers": [(b"host", named)]}, guard)
    except ForeignHost:
        return False
    return True


@pytest.mark.parametrize(
    ("listens_on", "named"), [("fd00::7", b"[fd00::7]:8000"), ("MyBox", b"mybox:8000"), ("MyBox", b"MyBox")]
)
def test_a_server_answers_to_where_it_listens(monkeypatch: pytest.MonkeyPatch, listens_on: str, named: bytes) -> None:
    """At an address of IPv6, which stands in brackets in URLs and in the Host header, and by a name in any case. Planted: without
    the brackets, and with the settings' own case."""
    assert answers_to(listens_on, named)
    assert not answers_to(listens_on, b"other.example")
    monkeypatch.setattr(edge_settings, "url_host", lambda host: host)
    monkeypatch.setattr(limits, "map", lambda _, names: names, raising=False)
    assert not answers_to(listens_on, named)


@pytest.mark.parametrize("looks", [True, False])
def test_a_client_that_looks_sends_little_in_vain(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a refused body nothing is read for a moment, in which the client stops. Planted: without the moment all is read."""
    if not looks:
        monkeypatch.setattr(limits, "LOOK_S", 0.0)
    taken = 0

    async def receive() -> Message:
        nonlocal taken
        await asyncio.sleep(0)
        if taken and looks and time.monotonic() > ends:
            return {"type": "http.disconnect"}
        taken += 1 << 20
        return {"type": "http.request", "body": b"", "more_body": taken < 50 << 20}

    async def send(message: Message) -> None:
        pass

    ends = time.monotonic() + 0.3
    unread = UnreadBody(send, is_held=True)
    asyncio.run(unread.end(receive, 30.0))
    assert taken == (1 << 20 if looks else 50 << 20)


@pytest.mark.parametrize("host", ["[:::]", "[1.2.3.4]"])
def test_a_host_that_no_parser_takes_costs_no_500(edge: Edge, host: str) -> None:
    """In brackets, but no address: an unknown path is a 404 nevertheless, where any name is answered to."""
    reply = raw(edge, f"GET /nothing HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert reply.startswith(b"HTTP/1.1 404"), reply


def test_serves_own_headers_are_taken_out() -> None:
    """A client cannot switch Serve's deadline off or choose its routing; other headers pass."""
    steering = [(b"X-Request-Timeout-Seconds", b"0"), (b"x-session-id", b"1"), (b"serve_multiplexed_model_id", b"m")]
    accept = (b"accept", b"*/*")
    assert passed_on(*steering, accept) == [accept]


@pytest.mark.parametrize("bounds_writes", [True, False])
def test_the_guard_around_serve_bounds_each_write(bounds_writes: bool) -> None:
    """A client that takes nothing: whoever sends hears TimeoutError. Planted: without the bound it waits on."""
    ends = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(1):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        except TimeoutError:
            ends.append("after the look" if asyncio.get_running_loop().time() - began > 0.9 else "in time")

    async def stuck(message: Message) -> None:
        await asyncio.Event().wait()

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def main() -> None:
        nonlocal began
        began = asyncio.get_running_loop().time()
        guard = Limits(app, LimitSettings(write_timeout_s=0.05), is_guard=bounds_writes)
        await guard({"type": "http", "method": "GET", "path": "/", "headers": []}, nothing, stuck)

    began = 0.0
    asyncio.run(main())
    assert ends == ["in time" if bounds_writes else "after the look"]
    assert outermost()[0].kwargs["is_guard"]
