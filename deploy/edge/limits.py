"""What is refused before anybody reads it: a pure ASGI middleware, around our app and, by `outermost`, around Ray Serve's own.

    headers too large            431        a Host that is none, or two       400
    body too large               413, by Content-Length, or when the bytes exceed it; nothing is buffered here
    body that does not come      408
    x-request-id that is none    400

Headers by which a client would steer Ray Serve's own deadlines and routing are taken out. It must stand around Serve as well, where
Serve lets it: Serve reads those headers, and whole bodies, before it calls an app. A body that is refused midway is answered here;
whoever was reading it is told that the client has gone, and what it still says is dropped.
"""

import asyncio
import os
import re
from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.edge.edge_settings import LimitSettings
from deploy.edge.openai.error_response import HeadersTooLarge, TooLarge, TooSlow, response_of
from engine.errors import InvalidRequest

STRIPPED = frozenset(
    {b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve_multiplexed_model_id", b"x-session-id"}
)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_HOST = re.compile(rb"[A-Za-z0-9._-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")

Headers = list[tuple[bytes, bytes]]


class Limits:
    """Wraps an ASGI app."""

    def __init__(self, app: ASGIApp, limits: LimitSettings) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request's head, pass it on with its body counted."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._limits)
        try:
            check_head(scope["headers"], self._limits)
        except InvalidRequest as error:
            await exchange.refuse(error)
            return
        try:
            await self._app(dict(scope, headers=_kept(scope["headers"])), exchange.receive, exchange.send)
        except ClientDisconnect:
            if not exchange.refused:
                raise


def check_head(headers: Iterable[tuple[bytes, bytes]], limits: LimitSettings) -> None:
    """Raises InvalidRequest, of the kind that says why."""
    headers = list(headers)
    size = sum(len(name) + len(value) for name, value in headers)
    if size > limits.header_bytes:
        raise HeadersTooLarge(f"the headers have {size} bytes; the limit is {limits.header_bytes}")
    hosts = [value for name, value in headers if name.lower() == b"host"]
    if len(hosts) > 1 or not all(_HOST.fullmatch(host) for host in hosts):
        raise InvalidRequest("the Host header is not one host name")
    for name, value in headers:
        _check_header(name.lower(), value, limits)


def _check_header(name: bytes, value: bytes, limits: LimitSettings) -> None:
    if name == b"x-request-id" and not _REQUEST_ID.fullmatch(value):
        raise InvalidRequest("x-request-id: 1 to 128 of A-Z a-z 0-9 . _ -", param="x-request-id")
    if name != b"content-length":
        return
    if not value.isdigit():
        raise InvalidRequest("content-length is not a number")
    if len(value) > 18 or int(value) > limits.body_bytes:
        raise TooLarge(f"the body exceeds the limit of {limits.body_bytes} bytes")


def outermost() -> list[Middleware]:
    """What RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names; QUARTET_BODY_BYTES is the largest of the applications' limits."""
    body_bytes = os.environ.get("QUARTET_BODY_BYTES")
    limits = LimitSettings(body_bytes=int(body_bytes)) if body_bytes else LimitSettings()
    return [Middleware(Limits, limits=limits)]


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in STRIPPED]


class _Exchange:
    """One request's `receive`, counting and with a deadline for the body, and its `send`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: LimitSettings) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._size = 0
        self._whole = False
        self._started = False
        self._deadline: float | None = None
        self.refused = False

    async def receive(self) -> Message:
        """The next message; http.disconnect once the body has been refused."""
        if self.refused:
            return {"type": "http.disconnect"}
        if self._whole:
            return await self._receive()
        try:
            return await self._more()
        except InvalidRequest as error:
            await self.refuse(error)
            return {"type": "http.disconnect"}

    async def _more(self) -> Message:
        self._deadline = self._deadline or asyncio.get_running_loop().time() + self._limits.body_timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            raise TooSlow(f"the body did not arrive within {self._limits.body_timeout_s:g} s") from error
        self._size += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._size > self._limits.body_bytes:
            raise TooLarge(f"the body exceeds the limit of {self._limits.body_bytes} bytes")
        return message

    async def send(self, message: Message) -> None:
        """The app's messages, unless the answer was ours."""
        if self.refused:
            return
        self._started = True
        await self._send(message)

    async def refuse(self, error: InvalidRequest) -> None:
        """Answer, unless the app already has."""
        self.refused = True
        if not self._started:
            await response_of(error)(self._scope, self._receive, self._send)
