"""What HAProxy answers by itself and says of its servers, through the real binary and the wrapper that Serve starts it by."""

import asyncio
import fcntl
import json
import socket
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.guards import http_protocol, uploads
from deploy.edge.guards.limits import Limits
from deploy.edge.guards.uploads import Claim
from deploy.edge.http.scope import client_address
from deploy.environment import WRAPPER, haproxy_binary
from deploy.haproxy_status import routed
from engine.errors import EngineDead, Overloaded
from tests.support.edge import haproxy_errors
from tests.support.edge.api_client import error_of
from tests.support.edge.http_edge import asgi_server
from tests.support.stack.haproxy_process import PLAIN, haproxy
from tests.support.stack.serve_process import free_port, wait

pytestmark = [pytest.mark.pure, pytest.mark.skipif(haproxy_binary() is None, reason="no HAProxy here")]


def test_the_committed_errors_are_those_of_the_edge() -> None:
    """`python -m tests.support.edge.haproxy_errors` would change nothing. Planted: another sentence is another file."""
    committed = {path.name: path.read_bytes() for path in haproxy_errors.FOLDER.iterdir()}
    assert committed == haproxy_errors.files()
    assert haproxy_errors.reply(EngineDead("x")) == committed["503.http"] != haproxy_errors.reply(Overloaded("x"))


def test_where_no_replica_answers_the_error_is_openais(tmp_path: Path) -> None:
    """Nobody behind it: 503 with Retry-After and the code of a lost engine; Serve's own file is a plain-text 500."""
    with haproxy(tmp_path, free_port()) as url:
        reply = httpx.get(f"{url}/v1/models")
    error = error_of(reply, 503)
    assert (error["code"], "starting or stopping" in error["message"]) == ("engine_restarting", True)
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.headers["content-type"] == "application/json"
    with haproxy(tmp_path, free_port(), PLAIN) as url:
        assert httpx.get(f"{url}/v1/models").text == "Internal Server Error"


def test_where_there_is_no_application_the_error_is_that_of_a_lost_engine(tmp_path: Path) -> None:
    """HAProxy that is started anew, Serve's proxy at a drain, and after a deployment that failed: 503 with Retry-After in OpenAI's
    shape. Planted: Serve's configuration, a 404, and a 503 in plain text."""
    for wrapper, status in ((WRAPPER, 503), (PLAIN, 404)):
        with asgi_server(say_missing) as behind, haproxy(tmp_path, behind, wrapper, route="") as url:
            unknown = httpx.post(f"{url}/v1/chat/completions", json={})
        with asgi_server(say_missing) as behind, haproxy(tmp_path, behind, wrapper) as url:
            replies = [unknown, httpx.get(f"{url}/text/plain"), httpx.get(f"{url}/application/json")]
            failed = [httpx.get(f"{url}/{kind}?status=503") for kind in ("text/plain", "application/json")]
        assert [reply.status_code for reply in replies] == [status, status, 404]
        assert [reply.headers.get("retry-after") for reply in replies] == [*["5" if status == 503 else None] * 2, None]
        assert [reply.status_code for reply in failed] == [503, 503]
        assert [reply.headers.get("retry-after") for reply in failed] == ["5" if wrapper == WRAPPER else None, None]
        if wrapper == WRAPPER:
            assert error_of(failed[0], 503)["code"] == "engine_restarting"


def test_a_replica_that_is_killed_or_hangs_is_said_so(tmp_path: Path) -> None:
    """A connection that is closed before the reply is 503, one that stays silent is 504."""
    for closes, status, code in ((True, 503, "engine_restarting"), (False, 504, "deadline_exceeded")):
        waits = "10s" if closes else "300ms"
        with silent_server(closes=closes) as port, haproxy(tmp_path, port, server_timeout=waits) as url:
            reply = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=20)
        assert error_of(reply, status)["code"] == code


@pytest.mark.parametrize("keeps_alive", [True, False])
def test_a_replica_that_is_lost_after_a_request_is_said_so(tmp_path: Path, keeps_alive: bool) -> None:
    """One that has answered and is gone when the next request comes: 503, on the client's connection of before and on a new one.

    Planted: Serve's configuration as it is, by which the client's connection is closed without a reply.
    """
    headers = {} if keeps_alive else {"connection": "close"}

    def second(url: str) -> httpx.Response:
        with httpx.Client(base_url=url, headers=headers) as client:
            assert client.post("/v1/completions", json={"prompt": "x"}).text == "ok"
            return client.post("/v1/completions", json={"prompt": "x"})

    with silent_server(closes=True, answers=1) as port, haproxy(tmp_path, port) as url:
        assert second(url).json()["error"]["code"] == "engine_restarting"
    unanswered = pytest.raises(httpx.RemoteProtocolError, match="without sending a response")
    with silent_server(closes=True, answers=1) as port, haproxy(tmp_path, port, PLAIN) as url, unanswered:
        second(url)


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nX-Slow: a"])
def test_a_connection_without_a_whole_head_ends(tmp_path: Path, said: bytes) -> None:
    """A client that says nothing, or not all, has a bound, and not the hour of silence that a stream may have.

    Planted: Serve's configuration as it is. HAProxy's own 400 and 408 of what it cannot read have no file: they are HTML.
    """
    for wrapper, ends in ((WRAPPER, True), (PLAIN, False)):
        with haproxy(tmp_path, free_port(), wrapper, head_timeout="300ms") as url:
            assert answered(url, said, 20 if ends else 1).startswith(b"HTTP/1.1 408") == ends


def test_a_replica_hears_that_a_client_has_gone(tmp_path: Path) -> None:
    """Also of one whose body came after its head, and that leaves before its answer. Planted: Serve's configuration as it is."""
    for wrapper, hears in ((WRAPPER, True), (PLAIN, False)):
        with socket.create_server(("127.0.0.1", 0)) as replica, haproxy(tmp_path, replica.getsockname()[1], wrapper) as url:
            client = socket.create_connection(address(url), timeout=20)
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
            made, _ = replica.accept()
            head = b""
            while not head.endswith(b"\r\n\r\n") and (more := made.recv(1)):
                head += more
            client.sendall(b"{}")  # the head is with the replica: the body goes by itself
            assert whole_request(made)
            client.close()
            made.settimeout(20 if hears else 1)
            with made, suppress(ConnectionResetError) if hears else pytest.raises(TimeoutError):
                assert made.recv(1) == b""


@pytest.mark.parametrize(("wrapper", "most"), [(WRAPPER, 1 << 20), (PLAIN, None)])
def test_little_of_an_unread_body_is_taken(tmp_path: Path, wrapper: str, most: int | None) -> None:
    """Of 64 MB for a replica that reads none less than 1 MB leaves the client. Planted: Serve's own configuration takes more."""
    with socket.create_server(("127.0.0.1", 0)) as replica, haproxy(tmp_path, replica.getsockname()[1], wrapper) as url:
        replica.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, http_protocol.RECEIVED_BYTES)
        with socket.create_connection(address(url), timeout=1) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 64000000\r\n\r\n")
            with suppress(TimeoutError):
                sent = 0
                while sent < 64_000_000:
                    sent += client.send(bytes(65536))
            taken = sent - struct.unpack("i", fcntl.ioctl(client, termios.TIOCOUTQ, bytes(4)))[0]
    print(wrapper, taken)
    assert (taken < 1 << 20) == (most is not None)


@pytest.mark.parametrize("waits", [(3.0,) * 4, (12.0,)])
def test_an_upload_that_waits_keeps_its_connection(
    tmp_path: Path, waits: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the 8 s after which HAProxy gives up a replica that takes nothing. Planted: no piece is read meanwhile."""
    monkeypatch.setattr(uploads, "WAITS_S", waits)
    limits = Limits(say_address, LimitSettings(body_bytes=4 << 20, upload_bytes=4 << 20))
    other = Claim(limits._uploads, "another")
    other.grow(4 << 20)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            asyncio.get_running_loop().call_later(10.0, other.release)
        await limits(scope, receive, send)

    said = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 4000000\r\n\r\n" + bytes(4_000_000)
    reply = b""
    with asgi_server(app) as port, haproxy(tmp_path, port) as url, suppress(OSError):
        reply = answered(url, said, 40)
    assert reply.startswith(b"HTTP/1.1 200") == (len(waits) == 4), reply


@pytest.mark.parametrize(("line", "status"), [("OPTIONS *", 404), ("GET health", 404), ("FOO /v1/models", 405)])
def test_what_no_replica_is_asked_is_refused_in_shape(tmp_path: Path, line: str, status: int) -> None:
    """A path of no application, a method that HTTP lacks: OpenAI's error object. Planted: Serve's configuration as it is."""
    said = f"{line} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
    with haproxy(tmp_path, free_port()) as url:
        head, _, body = answered(url, said).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert (b"allow: GET, POST" in head) == (status == 405)
    with haproxy(tmp_path, free_port(), PLAIN) as url:
        assert b'"error"' not in answered(url, said)


@pytest.mark.parametrize("fault", [False, True])
def test_methods_that_http_lacks_are_one_label(tmp_path: Path, fault: bool) -> None:
    """Ray makes a label of the method that HAProxy logs: whatever clients invent is OTHER. Planted: Serve's own configuration."""
    log = tmp_path / "log.sock"
    form = '"%{+Q,+E}o [serve@1 method=%HM status=%ST]"'
    route = f"option httplog\n    log {log} format rfc5424 local1 debug\n    log-format-sd {form}"
    wrapper = PLAIN if fault else WRAPPER
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.settimeout(20)
        heard.bind(str(log))
        with haproxy(tmp_path, free_port(), wrapper, route=route) as url:
            methods = list[str]()
            for method in (b"GET", b"POST", b"AAAA1", b"AAAA2"):
                answered(url, method + b" /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                while b" method=" not in (line := heard.recv(8192)):  # it says, too, that it has started
                    pass
                methods.append(json.loads(line.partition(b"method=")[2].partition(b" ")[0]))
    log.unlink()
    assert methods == ["GET", "POST", *(["AAAA1", "AAAA2"] if fault else ["OTHER"] * 2)]


@pytest.mark.parametrize(("wrapper", "open_to_all"), [(WRAPPER, False), (PLAIN, True)])
def test_the_api_listens_where_it_was_told_to_and_metrics_on_loopback(tmp_path: Path, wrapper: str, open_to_all: bool) -> None:
    """The API at every address, HAProxy's own metrics at 127.0.0.1 alone. Planted: Serve's configuration as it is opens both."""
    metrics_port = free_port()
    with haproxy(tmp_path, free_port(), wrapper, metrics_port=metrics_port) as url:
        assert httpx.get(url.replace("127.0.0.1", "127.0.0.2")).status_code >= 500
        assert httpx.get(f"http://127.0.0.1:{metrics_port}").status_code == 200
        with nullcontext() if open_to_all else pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.2:{metrics_port}")


def test_an_address_may_hold_so_many_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond QUARTET_CONNECTIONS_PER_ADDRESS one is closed at once, until another ends; others are served. Planted: no limit."""

    def answered_on(url: str, source: str = "127.0.0.1") -> socket.socket | None:
        """A connection that had an answer, and is open."""
        made = socket.socket()
        made.settimeout(20)
        made.bind((source, 0))
        with suppress(ConnectionError):
            made.connect(address(url))
            made.sendall(b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n")
            if made.recv(4096):
                return made
        made.close()
        return None

    def taken(url: str, held: list[socket.socket], source: str = "127.0.0.1") -> bool:
        made = answered_on(url, source)
        held += [made] if made else []
        return made is not None

    for limit in ("3", ""):
        monkeypatch.setenv("QUARTET_CONNECTIONS_PER_ADDRESS", limit)
        held = []
        with haproxy(tmp_path, free_port()) as url:
            wait(lambda url=url, held=held: taken(url, held) and len(held) == 3, 20)  # the first may meet the probe's connection
            assert [taken(url, held) for _ in range(3)] == [not limit] * 3
            assert taken(url, held, "127.0.0.2")
            for made in held:
                made.close()
            wait(lambda url=url, held=held: taken(url, held), 20)
            held[-1].close()


def test_an_application_is_routed_when_haproxy_has_a_replica_of_it(tmp_path: Path) -> None:
    """Not when only the fallback is left, which is Serve's own proxy; and none is once HAProxy has gone."""
    admin = tmp_path / "admin.sock"
    assert routed(admin) == 0
    with haproxy(tmp_path, free_port()):
        assert routed(admin) == 1
    assert routed(admin) == 0


@pytest.mark.parametrize("said", [[], ["6.6.6.6"], ["6.6.6.6, 127.0.0.1", "10.0.0.1"]])
def test_a_client_is_known_by_its_connection(tmp_path: Path, said: list[str]) -> None:
    """Whatever it says in X-Forwarded-For: HAProxy has the last word. Planted: asked without HAProxy, uvicorn believes it."""
    head = b"".join(b"X-Forwarded-For: %b\r\n" % value.encode() for value in said)
    with asgi_server(say_address) as port, haproxy(tmp_path, port) as url:
        for source in ("127.0.0.1", "127.0.0.2"):
            with socket.create_connection(address(url), timeout=20, source_address=(source, 0)) as made:
                made.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n")
                assert made.recv(65536).endswith(source.encode())
        direct = answered(f"http://127.0.0.1:{port}", b"GET / HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n")
        assert direct.endswith(b"127.0.0.1") is not bool(said)


async def say_address(scope: Scope, receive: Receive, send: Send) -> None:
    """Whose request it is."""
    body = client_address(scope).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


async def say_missing(scope: Scope, receive: Receive, send: Send) -> None:
    """Nothing is here, in the content type that the path names; 503 where the query asks for it."""
    headers = [(b"content-type", scope["path"].removeprefix("/").encode())]
    status = 503 if b"503" in scope["query_string"] else 404
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def stream_two(scope: Scope, receive: Receive, send: Send) -> None:
    """Two events, and no length."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for number in range(2):
        await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def address(url: str) -> tuple[str, int]:
    return "127.0.0.1", int(url.rpartition(":")[2])


def answered(url: str, said: bytes, timeout_s: float = 20, *, whole: bool = False) -> bytes:
    """What comes first on a new connection, if anything does in time; `whole`: all until its end."""
    with suppress(TimeoutError), socket.create_connection(address(url), timeout=timeout_s) as made:
        made.sendall(said)
        return b"".join(iter(lambda: made.recv(65536), b"")) if whole else made.recv(65536)
    return b""


def whole_request(connection: socket.socket) -> bool:
    """Reads one with a JSON body; False when the connection ends before it, or is reset."""
    found = b""
    with suppress(ConnectionResetError):
        while not found.endswith(b"}") and (more := connection.recv(4096)):
            found += more
    return found.endswith(b"}")


@contextmanager
def silent_server(*, closes: bool, answers: int = 0) -> Iterator[int]:
    """A port that gives so many answers in all; connections are closed once another request has come, or never answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []
        left = iter(range(answers))

        def accept() -> None:
            while True:
                try:
                    made, _ = listener.accept()
                except OSError:
                    return
                kept.append(made)
                while whole_request(made) and next(left, None) is not None:
                    made.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                if closes:
                    made.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for made in kept:
            made.close()
