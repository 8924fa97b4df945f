"""Requests for another protocol over the server that Ray Serve starts: the body is read, and a WebSocket is refused with 426."""

import socket

import pytest
import uvicorn
import uvicorn.config
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.edge.guards import http_protocol
from deploy.edge.guards.http_protocol import WithoutWebSockets
from tests.support.edge.http_edge import asgi_server

pytestmark = pytest.mark.pure

H2C = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
SIZED = (b"Content-Length: 5\r\n\r\n", b"hello")
CHUNKED = (b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n")
PLAIN = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc"
WEBSOCKET = (
    b"GET /v1/responses HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Serve's processes; the table is restored afterwards."""
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    http_protocol.install()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """The body, or for a WebSocket a close, as Starlette answers it."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close"})
        return
    body = b""
    more = True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def answered(app: ASGIApp, *parts: bytes) -> bytes:
    """All that the server says to these parts, sent one after another, until it closes."""
    with asgi_server(app) as port, socket.create_connection(("127.0.0.1", port), 20) as client:
        for part in parts:
            client.sendall(part)
        client.settimeout(1)
        said = b""
        try:
            while data := client.recv(65536):
                said += data
        except TimeoutError:
            pass
        return said


@pytest.mark.parametrize("body", [SIZED, CHUNKED])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.usefixtures("installed")
def test_an_upgrade_to_http2_is_read_past(body: tuple[bytes, bytes], apart: bool) -> None:
    """The body arrives, with its head or after it, and the next request of the connection is served."""
    parts = (H2C + body[0], body[1]) if apart else (H2C + body[0] + body[1],)
    assert answered(echo, *parts, PLAIN).split(b"\r\n\r\n")[1].startswith(b"hello")
    assert answered(echo, *parts, PLAIN).endswith(b"\r\n\r\nabc")


def test_without_it_the_body_is_lost() -> None:
    """The planted fault of the test above: uvicorn alone."""
    assert b"hello" not in answered(echo, H2C + b"".join(SIZED))


@pytest.mark.usefixtures("installed")
def test_an_upgrade_without_end_is_refused() -> None:
    """CONNECT would be an upgrade for each new parser."""
    assert answered(echo, b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n").startswith(b"HTTP/1.1 400")


@pytest.mark.usefixtures("installed")
def test_a_websocket_is_refused_by_its_name() -> None:
    """426 in the API's shape, by which Codex goes on over HTTP. Planted: Starlette's answer is 403."""
    said = answered(WithoutWebSockets(echo), WEBSOCKET)
    assert said.startswith(b"HTTP/1.1 426")
    assert b'"code":"upgrade_required"' in said
    assert answered(echo, WEBSOCKET).startswith(b"HTTP/1.1 403")
