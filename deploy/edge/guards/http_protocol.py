"""Changes uvicorn in Serve's processes.

`Upgrade: h2c`, which Java's client sends first, is ignored (RFC 9110); uvicorn over httptools would
lose the body. A WebSocket gets 426, after which Codex continues over HTTP. The kernel receives
little of an unread body.
"""

import asyncio
import socket
from dataclasses import dataclass

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deploy.edge.apis import error_shape_of
from deploy.edge.http.error_response import plain_error

RECEIVED_BYTES = 64 << 10  # by the kernel before they are read; it takes twice as much memory


def install() -> None:
    """Servers started in this process use UpgradeIgnored: uvicorn reads the class name from this
    table."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{UpgradeIgnored.__name__}"


class UpgradeIgnored(HttpToolsProtocol):
    """httptools stops at a head that asks for an upgrade: a new parser gets the head without it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_BYTES)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if super()._should_upgrade():
                self.handle_websocket_upgrade()
            elif self.scope["method"] == "CONNECT":
                self.send_400_response("CONNECT is not supported here.")
            else:
                self._begin_again(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _should_upgrade(self) -> bool:
        """Always True: the parser that finds an upgrade must begin no request."""
        return True

    def _begin_again(self, rest: bytes) -> None:
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*head, b"", b""]) + rest)


@dataclass
class WithoutWebSockets:
    """A WebSocket gets an error of its API."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        message = "There are no WebSockets here: send the request as HTTP, with stream: true."
        reply = plain_error(error_shape_of(scope), 426, message, "upgrade_required", {"upgrade": "HTTP/1.1"})
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close"})
            return
        await send({"type": "websocket.http.response.start", "status": 426, "headers": reply.raw_headers})
        await send({"type": "websocket.http.response.body", "body": reply.body})
