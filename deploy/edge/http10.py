"""For HTTP/1.0, which has no chunks: an answer whose length is not said ends with its connection. Old proxies and tools speak it.

uvicorn would send chunks over httptools nevertheless; over h11 it does not.
"""

from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.edge.scope import values_of


@dataclass
class Unchunked:
    """Wraps the outermost app, whose `send` is a method of uvicorn's request."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, without chunks."""
        await self.app(scope, receive, _until_close(send) if scope.get("http_version") == "1.0" else send)


def _until_close(send: Send) -> Send:
    cycle: Any = getattr(send, "__self__", None)
    if not hasattr(cycle, "chunked_encoding"):
        return send
    has_length = True

    async def unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = bool(values_of(message.get("headers", ()), b"content-length"))
        if not has_length:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return unchunked
