"""What is refused before anybody reads it: a pure ASGI middleware, around our app and, by `outermost`, around Ray Serve's own.

    headers too large            431        no Host, an odd one, or two       400        a Host that is not ours     403
    body too large               413, by Content-Length, or when the bytes exceed it     a compressed body           415
    body that does not come      408        too many requests at once         429
    no valid API key             401        a key without the right           403        a holder's quota            429

A body is read here, whole, before anybody else hears of its request: whoever sends slowly holds no place but one of `uploads`, and
the oldest of those gives way to a newcomer. Its bytes count until it has been parsed, and are let go then, however long the answer
takes. Headers by which a client would steer Ray Serve's own deadlines and routing are taken out. It must stand around Serve too,
where Serve lets it: Serve reads those headers, and gives a request a place, before it calls an app. Where there are API keys, that
guard reads no body of whoever the application will refuse.
"""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.datastructures import Headers as DecodedHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.edge.apis import PROBES, error_shape_of
from deploy.edge.bounded import bounded
from deploy.edge.edge_settings import KEYS_VARIABLE, LIMITS_VARIABLE, KeySettings, LimitSettings
from deploy.edge.error_response import refuse
from deploy.edge.http_errors import ForeignHost, HeadersTooLarge, TooLarge, TooSlow, WrongMediaType
from deploy.edge.http_protocol import WithoutWebSockets
from deploy.edge.key_gate import may_send
from deploy.edge.keys.key_ring import KeyRing
from deploy.edge.recovery import Recovery, Routes
from deploy.edge.scope import BEGAN, RECORD, REQUEST_ID_FORM, Headers, note_server_send, values_of
from engine.errors import InvalidRequest, Overloaded, QuartetError

STRIPPED_HEADERS = frozenset(
    {b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve_multiplexed_model_id", b"x-session-id"}
)
_PROBES = (*PROBES, "/-/healthz")  # of HAProxy, which takes out a replica that refuses two
_HOST = re.compile(rb"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")


@dataclass(eq=False)
class Upload:
    """A request's body. `timeout`: while it is on its way."""

    body: bytearray = field(default_factory=bytearray)
    held: int = 0
    timeout: asyncio.Timeout | None = None


@dataclass
class UnreadBody:
    """The answer to a request whose body nobody reads. It is sent at once, and ends when no more of the body comes.

    A connection that is closed before loses the answer to a client that looks for it once it has sent all.
    """

    send: Send
    is_held: bool = False

    async def answer(self, message: Message) -> None:
        """Send all of it, without its end."""
        self.is_held = message["type"] == "http.response.body" and not message.get("more_body")
        await self.send({**message, "more_body": True} if self.is_held else message)

    async def end(self, receive: Receive, timeout_s: float) -> None:
        """Let go what comes of the body, for `timeout_s` at most, and end an answer that was sent."""
        if not self.is_held:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (await receive()).get("more_body"):
                    pass
        await self.send({"type": "http.response.body"})


@dataclass
class Limits:
    """Wraps an ASGI app.

    check_key      whether a request's body is read, or raises where it is refused; none: every body is
    bounds_writes  a client that takes nothing for write_timeout_s is given up here, whatever the app thinks of it
    """

    app: ASGIApp
    limits: LimitSettings
    check_key: Callable[[Scope], Awaitable[bool]] | None = None
    bounds_writes: bool = False
    _open: int = 0

    def __post_init__(self) -> None:
        self._uploads = Uploads(self.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request's head, read its body, pass both on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = scope.get(BEGAN, time.monotonic())
        self._open += 1
        upload = Upload()
        unread = UnreadBody(send)
        try:
            try:
                written = send if await self._take_in(scope, receive, upload) else unread.answer
            except QuartetError as error:  # the app's own are its own business
                await refuse(error, error_shape_of(scope), scope, receive, unread.answer)
            except ClientDisconnect:
                if RECORD in scope:  # the access log tells by it that the client has gone; a server would log a traceback
                    raise
            else:
                if self.bounds_writes:
                    note_server_send(send)
                    written = self._bounded(written)
                body = self._uploads.replayed(upload, receive)
                await self.app({**scope, "headers": _kept(scope["headers"]), BEGAN: began}, body, written)
        finally:
            self._uploads.release(upload)
            self._open -= 1
        await unread.end(receive, self.limits.body_timeout_s)

    def _bounded(self, send: Send) -> Send:
        """TimeoutError where a write takes too long: Serve's own proxy would wait for ever, and pile up what comes."""
        return lambda message: bounded(send(message), self.limits.write_timeout_s)

    async def _take_in(self, scope: Scope, receive: Receive, upload: Upload) -> bool:
        """Whether nothing of the body is left to be sent."""
        if self._open > self.limits.requests and not scope["path"].endswith(_PROBES):
            raise Overloaded("Too many requests at once; please try again shortly.")
        check_head(scope, self.limits)
        known = self.check_key is None or await self.check_key(scope)
        sent = (value != b"0" for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding"))
        if known and (scope.get("method") == "POST" or any(sent)):
            await self._uploads.read(upload, receive)
        return known


class Uploads:
    """Bodies that are on their way, the oldest first, and those that have come and that nobody has read yet.

    On its way one ends by its own deadline, or when others need its room.
    """

    def __init__(self, limits: LimitSettings) -> None:
        self._limits = limits
        self._coming: dict[Upload, None] = {}
        self._bytes = 0

    async def read(self, upload: Upload, receive: Receive) -> None:
        """The whole body. TooLarge, TooSlow, Overloaded; ClientDisconnect when the client leaves before its end."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._limits.body_timeout_s
        try:
            async with asyncio.timeout_at(ends) as upload.timeout:
                await self._receive(upload, receive)
        except TimeoutError as error:
            why = "gave way to newer ones" if loop.time() < ends else f"did not arrive within {self._limits.body_timeout_s:g} s"
            raise TooSlow(f"the body {why}") from error

    async def _receive(self, upload: Upload, receive: Receive) -> None:
        self._coming[upload] = None
        if len(self._coming) > self._limits.uploads:
            self._end_oldest()
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                upload.body += message.get("body", b"")
                more = message.get("more_body", False)
                self._count(upload)
        finally:
            del self._coming[upload]

    def release(self, upload: Upload) -> None:
        """Let the body go, and its count. Idempotent."""
        self._bytes -= upload.held
        upload.held = 0
        upload.body.clear()

    def replayed(self, upload: Upload, receive: Receive) -> Receive:
        """A `receive` that gives the body first, and then that the client has gone; more of its body, that nobody wants, is let go.

        Whoever asks for more has read the body.
        """
        is_read = False

        async def again() -> Message:
            nonlocal is_read
            if not is_read:
                is_read = True
                body, upload.body = bytes(upload.body), bytearray()  # the app's from now on
                return {"type": "http.request", "body": body, "more_body": False}
            self.release(upload)
            message = await receive()
            while message["type"] == "http.request":
                message = await receive()
            return message

        return again

    def _count(self, upload: Upload) -> None:
        self._bytes += len(upload.body) - upload.held
        upload.held = len(upload.body)
        if upload.held > self._limits.body_bytes:
            raise TooLarge(f"the body exceeds the limit of {self._limits.body_bytes} bytes")
        if self._bytes > self._limits.upload_bytes:
            if len(self._coming) == 1:
                raise Overloaded("Too many large bodies wait to be read; please try again shortly.")
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Let the oldest time out at its reader's next turn."""
        waiting = (upload.timeout for upload in self._coming if upload.timeout is not None and not upload.timeout.expired())
        next(waiting).reschedule(asyncio.get_running_loop().time())


def check_head(scope: Scope, limits: LimitSettings) -> None:
    """Raises InvalidRequest, of the kind that says why."""
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    if size > limits.header_bytes:
        raise HeadersTooLarge(f"the headers have {size} bytes; the limit is {limits.header_bytes}")
    hosts = values_of(headers, b"host")
    if not hosts and scope.get("http_version") == "1.1":
        raise InvalidRequest("the Host header is missing")
    _check_host(hosts, limits)
    for value in values_of(headers, b"content-encoding"):
        if value.strip().lower() != b"identity":
            raise WrongMediaType("the body must not be compressed: leave the header Content-Encoding out")
    for value in values_of(headers, b"content-length"):
        if not value.isdigit():
            raise InvalidRequest("content-length is not a number")
        if len(value) > 18 or int(value) > limits.body_bytes:
            raise TooLarge(f"the body exceeds the limit of {limits.body_bytes} bytes")


def _check_host(hosts: list[bytes], limits: LimitSettings) -> None:
    """A page of another site reaches a loopback server by a name of its own that leads here: such names are refused."""
    for host in hosts:
        match = _HOST.fullmatch(host)
        if match is None or len(hosts) > 1:
            raise InvalidRequest("the Host header is not one host name")
        if limits.hosts is not None and match[1].decode().lower() not in map(str.lower, limits.hosts):
            raise ForeignHost("this server is not known by the name in the Host header; limits.hosts lists its names")


def outermost(routes: Callable[[], Routes] | None = None) -> list[Middleware]:
    """List what stands around Serve's servers, the outermost last, by settings in the environment. `routes`: Recovery's."""
    keys = os.environ.get(KEYS_VARIABLE)
    limits = msgspec.json.decode(os.environ.get(LIMITS_VARIABLE) or "{}", type=LimitSettings)
    check_key = partial(may_send, KeyRing(msgspec.json.decode(keys, type=KeySettings))) if keys else None
    guard = Middleware(Limits, limits=limits, check_key=check_key, bounds_writes=True)
    around = [guard, Middleware(with_cors, limits=limits), Middleware(WithoutWebSockets)]
    return [Middleware(Recovery, routes=routes), *around] if routes else around


def with_cors(app: ASGIApp, limits: LimitSettings) -> ASGIApp:
    """Let web pages of `cors_origins`, if there are any, read what `app` answers."""
    if not (origins := limits.cors_origins):
        return app
    shown = ["x-request-id", "request-id", "retry-after", "x-should-retry"]
    return _Cors(app, origins, ["GET", "POST"], allow_headers=["*"], expose_headers=shown)


class _Cors(CORSMiddleware):
    """Says once that an answer varies by Origin, where another that stands inside has said it."""

    async def send(self, message: Message, send: Send, request_headers: DecodedHeaders) -> None:
        """Send a message, with the headers for web pages if it begins an answer."""
        if "headers" in message:
            message["headers"] = [header for header in message["headers"] if tuple(header) != (b"vary", b"Origin")]
        await super().send(message, send, request_headers)


def _kept(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers but those, and an id that is none: nobody behind this sends it back, and the request gets one of our own."""
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in STRIPPED_HEADERS and (name.lower() != b"x-request-id" or REQUEST_ID_FORM.fullmatch(value))
    ]
