"""Media by http(s): from whom, by which address, how large, how long."""

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

from deploy.edge.media import fetching
from deploy.edge.media.tasks import DecodeTask, fetch, prepare
from deploy.edge.processes.side_pool import SidePool
from engine.errors import InvalidRequest

pytestmark = pytest.mark.pure

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
PUBLIC, INSIDE = "93.184.215.14", "127.0.0.1"


class Site(ThreadingHTTPServer):
    """Answers by path; `asked`: the paths and Host headers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((INSIDE, 0), Handler)
        self.asked: list[tuple[str, str]] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{INSIDE}:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Host"]))
        match self.path.partition("?")[0].split("/")[1]:
            case "png":
                self._answer(200, PNG)
            case "large":
                self._answer(200, PNG + bytes(5000))
            case "to":
                self._answer(302, b"", self.path.removeprefix("/to/"))
            case "raw":  # a header's bytes may be UTF-8
                self._answer(302, b"", unquote(self.path.removeprefix("/raw/"), "latin-1"))
            case "slow":
                self.send_response(200)
                self.end_headers()
                while not self.server.over.wait(0.05):
                    self.wfile.write(b"x")
            case _:
                self._answer(404, b"")

    def _answer(self, status: int, body: bytes, location: str | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if location is not None:
            self.send_header("location", location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def rules(*hosts: str, most_bytes: int = 4096, timeout_s: float = 5.0) -> DecodeTask:
    return DecodeTask(is_remote=True, fetch=hosts, fetch_bytes=most_bytes, fetch_timeout_s=timeout_s)


def test_a_named_host_is_asked(site: Site) -> None:
    """Also one inside, also by a redirect; what it answers is what comes."""
    assert fetching.fetched(f"{site.url}/png?a=1", rules(INSIDE)) == PNG
    assert fetching.fetched(f"{site.url}/to//png", rules(INSIDE)) == PNG
    assert site.asked[0] == ("/png?a=1", f"{INSIDE}:{site.server_port}")


def test_a_host_is_named_in_any_case(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the settings as in the URL, whose host counts in lower case. Planted: the settings' names as they are written."""
    url = f"http://LocalHost:{site.server_port}/png"
    assert fetching.fetched(url, rules("Localhost")) == PNG
    monkeypatch.setattr(fetching, "map", lambda _, names: names, raising=False)
    with pytest.raises(InvalidRequest, match="nothing is fetched from 'localhost' here"):
        fetching.fetched(url, rules("Localhost"))


def test_a_url_need_not_be_encoded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A space and what is not ASCII are encoded, also where a site redirects to them; what is encoded stays. Planted: nothing."""
    assert fetching.fetched(f"{site.url}/png/\u00fc a%2F?b=\u00e9&c=%26", rules(INSIDE)) == PNG
    assert fetching.fetched(f"{site.url}/raw//png/\u00fc a", rules(INSIDE)) == PNG
    assert [path for path, _ in site.asked if path.startswith("/png")] == ["/png/%C3%BC%20a%2F?b=%C3%A9&c=%26", "/png/%C3%BC%20a"]
    monkeypatch.setattr(fetching, "quote", lambda text, *_: text)
    for path, error in (("\u00fc", UnicodeEncodeError), ("a b", InvalidRequest)):
        with pytest.raises(error):
            fetching.fetched(f"{site.url}/png/{path}", rules(INSIDE))


@pytest.mark.parametrize("hosts", [(), ("*",), ("example.com",)])
def test_nothing_inside_is_asked_otherwise(site: Site, hosts: tuple[str, ...]) -> None:
    """By whatever name for the loopback address; the site hears nothing."""
    port = site.server_port
    for host in (INSIDE, "localhost", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "[::ffff:127.0.0.1]", "[::1]", "127.0.0.1."):
        with pytest.raises(InvalidRequest, match=r"nothing is fetched|cannot be fetched"):
            fetching.fetched(f"http://{host}:{port}/png", rules(*hosts))
    assert not site.asked


def test_the_guard_is_what_keeps_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every address is public."""
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    assert fetching.fetched(f"http://localhost:{site.server_port}/png", rules("*")) == PNG


def test_a_redirect_is_looked_at_as_the_first_url(site: Site) -> None:
    """To another name of an address inside, to another scheme, again and again."""
    for target, says in (
        (f"http://localhost:{site.server_port}/png", "'localhost'"),
        ("file:///etc/passwd", "is not http"),
        ("/to//to//to//to//png", "more than 3 redirects"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            fetching.fetched(f"{site.url}/to/{target}", rules(INSIDE))
    assert all(not path.startswith("/png") for path, _ in site.asked)


def resolving(monkeypatch: pytest.MonkeyPatch, answers: list[list[str]]) -> None:
    """Names resolve to each of these in turn."""

    def resolve(host: str, port: int, *_: Any, **_named: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_what_was_looked_at_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is inside when it is asked for again gains nothing: it is asked for once."""
    resolving(monkeypatch, [[PUBLIC], [INSIDE]])
    connected = []

    def connect(address: tuple[str, int]) -> socket.socket:
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(InvalidRequest, match="cannot be fetched"):
        fetching.fetched("http://rebound.example/a.png", rules("*"))
    assert connected == [(PUBLIC, 80)]


def test_a_name_of_any_script_is_asked_by_its_ascii(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As browsers do."""
    resolving(monkeypatch, [[INSIDE], [INSIDE]])
    fetching.fetched(f"http://\u4f8b\u3048.jp:{site.server_port}/png", rules("\u4f8b\u3048.jp"))
    assert site.asked == [("/png", f"xn--r8jz45g.jp:{site.server_port}")]


def test_one_address_inside_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name with several."""
    resolving(monkeypatch, [[PUBLIC, "10.0.0.7"]])
    with pytest.raises(InvalidRequest, match="not public"):
        fetching.fetched("https://half.example/a.png", rules("*"))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
        *("255.255.255.255", "::", "::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"),
        *("2002:a00:1::", "2001:0:a00:1::", "fec0::2", "::127.0.0.1", "::ffff:0:127.0.0.1", "168.63.129.16", "192.0.0.192"),
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    """Loopback, private, link-local (where clouds tell secrets), shared, multicast, and IPv4 inside IPv6."""
    assert not fetching.is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:4700::1111"])
def test_addresses_that_are_public(address: str) -> None:
    assert fetching.is_public(address)


@pytest.mark.parametrize(
    ("path", "says"), [("large", "larger than 4096"), ("absent", "answers 404"), ("png@evil", "answers 404")]
)
def test_what_cannot_be_had_is_said(site: Site, path: str, says: str) -> None:
    """And nothing of the answer."""
    with pytest.raises(InvalidRequest, match=says):
        fetching.fetched(f"{site.url}/{path}", rules(INSIDE))


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "http:///a", "http://user:secret@127.0.0.1/", "http://[::1", "http://a:99999/"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    """Before any name is looked up, or where the request is made."""
    with pytest.raises(InvalidRequest):
        fetching.fetched(url, rules(INSIDE))


def test_a_side_process_fetches_and_gives_up(site: Site) -> None:
    """The image comes; a server that never ends is left when its time is over, whatever drips in."""
    pool = SidePool("deploy.edge.media.media_process")
    try:
        file = fetch(pool, rules(INSIDE), f"{site.url}/png".encode())
        assert prepare(pool, DecodeTask(media_type=None), file).shape == (384, 384, 3)
        began = time.monotonic()
        with pytest.raises(InvalidRequest, match="too much time"):
            fetch(pool, rules(INSIDE, timeout_s=0.5), f"{site.url}/slow".encode())
        assert time.monotonic() - began < 8
    finally:
        pool.close()
