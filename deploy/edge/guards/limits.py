"""ASGI middleware that refuses requests before they are read, around our app and around Serve
(`outermost`).

Bodies are read whole, so a slow sender holds nothing else. Headers that would steer Serve are
removed. The guard around Serve reads no body that key checks will refuse.
"""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.datastructures import Headers as DecodedHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.edge.apis import PROBES, error_shape_of
from deploy.edge.edge_settings import KEYS_VARIABLE, LIMITS_VARIABLE, KeySettings, LimitSettings
from deploy.edge.guards.http_protocol import WithoutWebSockets
from deploy.edge.guards.key_gate import sender
from deploy.edge.guards.recovery import Recovery, Routes
from deploy.edge.guards.uploads import Claim, Upload, Uploads, note_claim, noted_claim
from deploy.edge.http.bounded import bounded
from deploy.edge.http.error_response import refuse
from deploy.edge.http.http_errors import ForeignHost, HeadersTooLarge, TooLarge, WrongMediaType
from deploy.edge.http.scope import BEGAN, CLAIM, RECORD, REQUEST_ID_FORM, Headers, client_address, note_server_send, values_of
from deploy.edge.keys.key_ring import KeyRing
from engine.errors import InvalidRequest, Overloaded, QuartetError

STRIPPED_HEADERS = frozenset(
    {b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"serve_multiplexed_model_id", b"x-session-id"}
)
LOOK_S = 0.5  # a client that looks for an answer while it sends has stopped by then
_PROBES = (*PROBES, "/-/healthz")  # of HAProxy, which takes out a replica that refuses two
_HOST = re.compile(rb"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")


@dataclass
class UnreadBody:
    """The answer ends only with the body: clients that send everything first would lose it."""

    send: Send
    is_held: bool = False

    async def answer(self, message: Message) -> None:
        self.is_held = message["type"] == "http.response.body" and not message.get("more_body")
        await self.send({**message, "more_body": True} if self.is_held else message)

    async def end(self, receive: Receive, timeout_s: float) -> None:
        """Discard the rest of the body for at most `timeout_s`, then end the answer."""
        if not self.is_held:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if (await receive()).get("more_body"):
                    await asyncio.sleep(LOOK_S)
                    while (await receive()).get("more_body"):
                        pass
        await self.send({"type": "http.response.body"})


@dataclass
class Limits:
    app: ASGIApp
    limits: LimitSettings
    # returns the client by API key, or None if the application will refuse the request, so that its
    # body is not read. Without it there are no keys
    check_key: Callable[[Scope], Awaitable[str | None]] | None = None
    is_guard: bool = False  # around Serve: a client that takes nothing for write_timeout_s is dropped here
    _open: int = 0

    def __post_init__(self) -> None:
        self._uploads = Uploads(self.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = scope.get(BEGAN, time.monotonic())
        self._open += 1
        upload = None
        unread = UnreadBody(send)
        try:
            try:
                client = await self._client(scope)
                upload = Upload(self._claim(client or ""), bool(values_of(scope["headers"], b"expect")))
                if client is not None:
                    await self._read(scope, receive, upload)
            except QuartetError as error:  # the app's own are its own business
                await refuse(error, error_shape_of(scope), scope, receive, unread.answer)
            except ClientDisconnect:
                if RECORD in scope:  # the access log tells by it that the client has gone; a server would log a traceback
                    raise
            else:
                written = unread.answer if client is None else send
                if self.is_guard:
                    note_server_send(send)
                    written = self._bounded(written)
                scope = {**scope, "headers": _kept(scope["headers"]), BEGAN: began, CLAIM: upload.claim}
                await self.app(scope, upload.replayed(receive), written)
        finally:
            if upload is not None:
                upload.claim.release()
                upload.body.clear()
            self._open -= 1
        await unread.end(receive, self.limits.body_timeout_s)

    def _bounded(self, send: Send) -> Send:
        """TimeoutError for a slow write; Serve's own proxy would buffer without bound."""
        return lambda message: bounded(send(message), self.limits.write_timeout_s)

    async def _client(self, scope: Scope) -> str | None:
        if self._open > self.limits.requests and not scope["path"].endswith(_PROBES):
            raise Overloaded("Too many requests at once; please try again shortly.")
        check_head(scope, self.limits)
        if self.check_key is None:
            return client_address(scope, self.limits.proxies)
        return await self.check_key(scope)

    def _claim(self, client: str) -> Claim:
        if self.is_guard:
            claim = Claim(self._uploads, client)
            note_claim(claim)
            return claim
        return noted_claim() or Claim(self._uploads, client)

    async def _read(self, scope: Scope, receive: Receive, upload: Upload) -> None:
        lengths = [int(value) for value in values_of(scope["headers"], b"content-length")]
        length = max(lengths, default=0)
        if scope.get("method") == "POST" or length or values_of(scope["headers"], b"transfer-encoding"):
            await self._uploads.read(upload, receive, length)


def check_head(scope: Scope, limits: LimitSettings) -> None:
    """Raises the kind of InvalidRequest that applies."""
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
    """Refuse foreign names: a page of another site can reach a loopback server by its own name."""
    for host in hosts:
        match = _HOST.fullmatch(host)
        if match is None or len(hosts) > 1:
            raise InvalidRequest("the Host header is not one host name")
        if limits.hosts is not None and match[1].decode().lower() not in map(str.lower, limits.hosts):
            raise ForeignHost("this server is not known by the name in the Host header; limits.hosts lists its names")


def outermost(routes: Callable[[], Routes] | None = None) -> list[Middleware]:
    """Outermost last, by the environment's settings. `routes`: for Recovery."""
    keys = os.environ.get(KEYS_VARIABLE)
    limits = msgspec.json.decode(os.environ.get(LIMITS_VARIABLE) or "{}", type=LimitSettings)
    ring = KeyRing(msgspec.json.decode(keys, type=KeySettings)) if keys else None
    check_key = partial(sender, ring, proxies=limits.proxies) if ring is not None else None
    guard = Middleware(Limits, limits=limits, check_key=check_key, is_guard=True)
    around = [guard, Middleware(with_cors, limits=limits), Middleware(WithoutWebSockets)]
    if routes:
        return [Middleware(Recovery, routes=routes), *around]
    return around


def with_cors(app: ASGIApp, limits: LimitSettings) -> ASGIApp:
    if not (origins := limits.cors_origins):
        return app
    shown = ["x-request-id", "request-id", "retry-after", "x-should-retry"]
    return _Cors(app, origins, ["GET", "POST"], allow_headers=["*"], expose_headers=shown)


class _Cors(CORSMiddleware):
    """Avoids a second `Vary: Origin` where an inner middleware has sent one."""

    async def send(self, message: Message, send: Send, request_headers: DecodedHeaders) -> None:
        if "headers" in message:
            message["headers"] = [header for header in message["headers"] if tuple(header) != (b"vary", b"Origin")]
        await super().send(message, send, request_headers)


def _kept(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Drop stripped headers and a malformed x-request-id; ours replaces it."""
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in STRIPPED_HEADERS and (name.lower() != b"x-request-id" or REQUEST_ID_FORM.fullmatch(value))
    ]
