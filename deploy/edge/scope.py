"""What the edge keeps of a request in its ASGI scope, and which id it has."""

import asyncio
import contextlib
import ipaddress
import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import Scope, Send

Headers = Iterable[tuple[bytes, bytes]]

RECORD = "quartet.record"  # the scope's key for its request's RequestRecord
BEGAN = "quartet.began"  # and for when its head was read, by the monotonic clock
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

_SERVER_SEND: ContextVar[tuple[asyncio.AbstractEventLoop, Send] | None] = ContextVar("server_send", default=None)

REQUEST_ID_FORM = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def request_id(headers: Headers) -> str:
    """The client's id, where it sent exactly one and it is 1 to 128 of A-Z a-z 0-9 . _ -; else a new one."""
    given = only(headers, b"x-request-id")
    return given.decode() if given is not None and REQUEST_ID_FORM.fullmatch(given) else secrets.token_hex(16)


def note_server_send(send: Send) -> None:
    """This request's `send` of the HTTP server in this process: what is sent there passes Ray Serve by."""
    _SERVER_SEND.set((asyncio.get_running_loop(), send))


def server_send() -> Send | None:
    """Return what was noted; None where this process has no HTTP server, or it runs on another loop."""
    loop, send = _SERVER_SEND.get() or (None, None)
    return send if loop is asyncio.get_running_loop() else None


def values_of(headers: Headers, lower_name: bytes) -> list[bytes]:
    """The values of all headers of that (lower-case) name."""
    return [value for name, value in headers if name.lower() == lower_name]


def only(headers: Headers, lower_name: bytes) -> bytes | None:
    """A header's value, where there is exactly one of that (lower-case) name."""
    values = values_of(headers, lower_name)
    return values[0] if len(values) == 1 else None


def is_from_loopback(scope: Scope) -> bool:
    """Whether the request comes from this machine: its connection does, and so does what a proxy before us says of it."""
    return all(map(_is_loopback, _peers(scope)))


def client_address(scope: Scope) -> str:
    """Whose request it is, where nobody has a key; of IPv6 the network, of which a client may have every address.

    Our HAProxy is on loopback, and is the last to say in X-Forwarded-For who its client is. uvicorn goes on to what that one says.
    """
    peers = _peers(scope)
    host = peers[-1] if any(map(_is_loopback, peers)) else peers[0]
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return host


def _peers(scope: Scope) -> list[str]:
    """Who is connected, as uvicorn says it, and the last in X-Forwarded-For."""
    client = scope.get("client")
    forwarded = values_of(scope["headers"], b"x-forwarded-for")
    last = forwarded[-1].decode("latin-1").rpartition(",")[2:] if forwarded else ()
    return [client[0] if client else "", *(peer.strip() for peer in last)]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
