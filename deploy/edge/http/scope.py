"""What the ASGI scope keeps of a request, and the request's id."""

import asyncio
import contextlib
import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from contextvars import ContextVar

from starlette.types import Scope, Send

Headers = Iterable[tuple[bytes, bytes]]

RECORD = "quartet.record"  # the scope's key for its request's RequestRecord
BEGAN = "quartet.began"  # and for when its head was read, by the monotonic clock
SEND = "quartet.send"  # and for the `send` that the access log was given
CLAIM = "quartet.claim"  # and for what its client holds for its body (uploads.py)
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

_SERVER_SEND: ContextVar[tuple[asyncio.AbstractEventLoop, Send] | None] = ContextVar("server_send", default=None)

REQUEST_ID_FORM = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def request_id(headers: Headers) -> str:
    """The client's x-request-id if well-formed, else a new one."""
    given = only(headers, b"x-request-id")
    if given is not None and REQUEST_ID_FORM.fullmatch(given):
        return given.decode()
    return secrets.token_hex(16)


def note_server_send(send: Send) -> None:
    """Note the HTTP server's `send` of this request, which bypasses Serve."""
    _SERVER_SEND.set((asyncio.get_running_loop(), send))


def server_send() -> Send | None:
    """None if this process has no HTTP server, or it runs on another loop."""
    loop, send = _SERVER_SEND.get() or (None, None)
    if loop is asyncio.get_running_loop():
        return send
    return None


def values_of(headers: Headers, lower_name: bytes) -> list[bytes]:
    return [value for name, value in headers if name.lower() == lower_name]


def only(headers: Headers, lower_name: bytes) -> bytes | None:
    values = values_of(headers, lower_name)
    if len(values) == 1:
        return values[0]
    return None


def is_from_loopback(scope: Scope) -> bool:
    """Whether the connection and a proxy's X-Forwarded-For come from this machine."""
    return _is_loopback(_client_host(scope, ()))


def client_name(scope: Scope, key: str | None, proxies: Sequence[str]) -> str:
    if key is None:
        return client_address(scope, proxies)
    return f"key {key}"


def client_address(scope: Scope, proxies: Sequence[str] = ()) -> str:
    """For IPv6 its network, since a client may have every address of it."""
    host = _client_host(scope, proxies)
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return host


def _client_host(scope: Scope, proxies: Sequence[str]) -> str:
    """The peer or, if that is a proxy, the last name in its X-Forwarded-For. uvicorn replaces a
    loopback peer by that name, with port 0."""
    host, port = scope.get("client") or ("", None)
    if port != 0 and not _is_loopback(host) and not _is_of(host, proxies):
        return host
    named = ",".join(value.decode("latin-1") for value in values_of(scope["headers"], b"x-forwarded-for"))
    for address in map(str.strip, reversed(named.split(","))):
        if address and not _is_of(address, proxies):
            return address
    return host


def _is_of(host: str, networks: Sequence[str]) -> bool:
    if not networks:
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in ipaddress.ip_network(network, strict=False) for network in networks)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
