"""What is refused before anybody reads it: a pure ASGI middleware around the whole app.

    headers too large            431        a Host that is none, or two       400
    body too large               413, by Content-Length, or when the bytes exceed it; nothing is buffered here
    body that does not come      408
    x-request-id that is none    400

Headers by which a client would steer Ray Serve's own deadlines and routing are taken out.
"""

import asyncio
import re
from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai.errors import HeadersTooLarge, TooLarge, TooSlow, response_of
from deploy.settings import LimitSettings
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
        try:
            headers: Headers = list(scope["headers"])
            check_head(headers, self._limits)
        except InvalidRequest as error:
            await response_of(error)(scope, receive, send)
            return
        await self._app(dict(scope, headers=_kept(headers)), _Body(receive, self._limits), send)


def check_head(headers: Headers, limits: LimitSettings) -> None:
    """Raises InvalidRequest, of the kind that says why."""
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


class StripHeaders:
    """Takes out what would steer Ray Serve itself; around everything, because Serve reads its headers before our app is called."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on with fewer headers."""
        if scope["type"] == "http":
            scope = dict(scope, headers=_kept(scope["headers"]))
        await self._app(scope, receive, send)


def outermost() -> list[Middleware]:
    """What RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names."""
    return [Middleware(StripHeaders)]


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in STRIPPED]


class _Body:
    """`receive` that counts, and that waits for a body's end no longer than it may."""

    def __init__(self, receive: Receive, limits: LimitSettings) -> None:
        self._receive = receive
        self._limits = limits
        self._size = 0
        self._whole = False
        self._deadline: float | None = None

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        self._deadline = self._deadline or now + self._limits.body_timeout_s
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
