"""Fetches media by http(s) from hosts in the settings, never from an internal address. It connects
to the checked address, since names may resolve differently later."""

import http.client
import ipaddress
import signal
import socket
import ssl
from string import punctuation
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from deploy.edge.edge_settings import MediaSettings
from engine.errors import InvalidRequest

REDIRECTS = 3
_HEADERS = {"User-Agent": "quartet", "Accept": "image/*, video/*, audio/*", "Accept-Encoding": "identity", "Connection": "close"}
# Addresses in which one of IPv4 hides, which may be any; and networks inside that Python calls global.
_TUNNELS = [ipaddress.ip_network(network) for network in (
    "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "::/96", "::ffff:0:0:0/96",
    "fec0::/10", "192.0.0.0/24", "168.63.129.16/32",
)]  # fmt: skip


def fetched(url: str, rules: MediaSettings) -> bytes:
    signal.setitimer(signal.ITIMER_REAL, rules.fetch_timeout_s)
    try:
        for _ in range(1 + REDIRECTS):
            answer = _get(_checked(url, rules), rules)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
    except (OSError, http.client.HTTPException) as error:
        raise InvalidRequest(f"it cannot be fetched: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    raise InvalidRequest(f"it cannot be fetched: more than {REDIRECTS} redirects")


def _checked(url: str, rules: MediaSettings) -> SplitResult:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError as error:
        raise InvalidRequest(f"its URL is invalid: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise InvalidRequest("its URL is not http(s)://HOST/...")
    if not _is_named(host, rules) and "*" not in rules.fetch:
        raise InvalidRequest(f"nothing is fetched from {host[:100]!r} here (media.fetch); send it as a data: URL")
    return parts


def _get(parts: SplitResult, rules: MediaSettings) -> bytes | str:
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = http.client.HTTPConnection(host, port)
    connection.sock = socket.create_connection((_address(host, port, rules), port))
    try:
        if parts.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(connection.sock, server_hostname=host)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", quote(target, punctuation), headers=_HEADERS | {"Host": parts.netloc.encode("idna")})
        reply = connection.getresponse()
        if reply.status in (301, 302, 303, 307, 308):
            return quote(reply.headers.get("Location", ""), punctuation, "latin-1")  # its bytes, which http.client reads as that
        if reply.status != http.HTTPStatus.OK:
            raise InvalidRequest(f"it cannot be fetched: its server answers {reply.status}")
        data = reply.read(rules.fetch_bytes + 1)
    finally:
        connection.close()
    if len(data) > rules.fetch_bytes:
        raise InvalidRequest(f"it is larger than {rules.fetch_bytes} bytes")
    return data


def _address(host: str, port: int, rules: MediaSettings) -> str:
    addresses = [str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not _is_named(host, rules) and not all(map(is_public, addresses)):
        raise InvalidRequest(f"nothing is fetched from {host[:100]!r}: its address is not public")
    return addresses[0]


def _is_named(host: str, rules: MediaSettings) -> bool:
    return host in map(str.lower, rules.fetch)


def is_public(address: str) -> bool:
    """Whether it is an Internet address, and not of a tunnel."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _TUNNELS)
