"""A node that loses its network without a word: HAProxy ends its streams, and answers 503 where nothing had been answered."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from deploy.environment import WRAPPER
from tests.support.stack.haproxy_process import PLAIN, haproxy
from tests.support.stack.machines import CAN_MAKE, REASON, Machine, Machines, machines
from tests.support.stack.serve_process import wait

pytestmark = [
    pytest.mark.pure,
    pytest.mark.skipif(not CAN_MAKE, reason=REASON),
    pytest.mark.skipif(not PLAIN, reason="no HAProxy here"),
]

PORT = 9000
BOUND_S = 10.0
PATIENCE_S = 13.0
# Answers /stream with the head and one chunk, and anything else with nothing; then it is silent.
SERVER = f"""
import http.server, socketserver, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\\r\\nfirst\\r\\n")
        time.sleep(60)
socketserver.ThreadingTCPServer(("", {PORT}), Handler).serve_forever()
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Machines, Machine]]:
    """A machine with the silent server."""
    with machines(tmp_path, 1) as there:
        machine = there.machines[0]
        (machine.folder / "tmp" / "server.py").write_text(SERVER)
        server = subprocess.Popen(machine.command(f"exec {sys.executable} /tmp/server.py"), stderr=subprocess.DEVNULL)
        wait(lambda: there.from_client(lambda: _listens(machine.address)), 10)
        yield there, machine
        server.kill()
        server.wait(10)


def _listens(address: str) -> bool:
    try:
        httpx.post(f"http://{address}:{PORT}/", timeout=0.2)
    except httpx.ReadTimeout:
        return True
    except httpx.ConnectError:
        return False
    raise AssertionError("the server has answered")


def ended(url: str, path: str, begun: list[str]) -> tuple[float, str]:
    """When a request ended, and how: its status where that was all, else the exception."""
    try:
        with httpx.stream("POST", url + path, timeout=PATIENCE_S) as reply:
            begun.extend(reply.iter_text())
            return time.monotonic(), str(reply.status_code)
    except httpx.TransportError as error:
        return time.monotonic(), type(error).__name__


def test_a_lost_nodes_requests_end_within_ten_seconds(tmp_path: Path, two: tuple[Machines, Machine]) -> None:
    """A stream is cut, and a request without an answer gets a 503.

    Planted: Serve's configuration as it is, by which both wait until the client gives up.
    """
    there, machine = two
    inside = ("ip", "netns", "exec", there.switch)
    long = {"server_timeout": "1h", "client_timeout": "1h", "connect_timeout": "5s"}
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        urls = {}
        for name, wrapper in (("ours", WRAPPER), ("plain", PLAIN)):
            (folder := tmp_path / name).mkdir()
            started = haproxy(folder, PORT, wrapper, address=machine.address, namespace=inside, **long)
            urls[name] = stack.enter_context(started)
        begun: list[str] = []
        asked = {
            (name, path): pool.submit(there.from_client, lambda url=url, path=path: ended(url, path, begun))
            for name, url in urls.items()
            for path in ("/stream", "/silent")
        }
        wait(lambda: begun == ["first"] * 2, 10)
        time.sleep(0.5)
        machine.unplug()
        lost = time.monotonic()
        took = {key: (future.result()[0] - lost, future.result()[1]) for key, future in asked.items()}
    assert took["ours", "/stream"][1] == "RemoteProtocolError"
    assert took["ours", "/silent"][1] == "503"
    assert max(took["ours", path][0] for path in ("/stream", "/silent")) < BOUND_S, took
    assert {took["plain", path][1] for path in ("/stream", "/silent")} == {"ReadTimeout"}, took


def test_a_request_in_flight_to_a_lost_node_ends_too(tmp_path: Path, two: tuple[Machines, Machine]) -> None:
    """Bytes that nobody acknowledges stop keepalive's probes: `tcp-ut` ends these connections. Planted: without it they wait."""
    there, machine = two
    inside = ("ip", "netns", "exec", there.switch)
    long = {"server_timeout": "1h", "client_timeout": "1h", "connect_timeout": "5s"}
    without = tmp_path / "without.sh"
    without.write_text(WRAPPER.read_text().replace("& tcp-ut 8s", "&").replace("$(dirname \"$0\")", str(WRAPPER.parent)))
    without.chmod(0o755)

    def upload(url: str) -> tuple[float, str]:
        """A request whose body goes on while the link is down."""

        def body() -> Iterator[bytes]:
            yield b"a" * 1000
            time.sleep(1.5)
            yield b"b" * 1000

        try:
            reply = httpx.post(f"{url}/silent", content=body(), headers={"content-length": "2000"}, timeout=PATIENCE_S)
            return time.monotonic(), str(reply.status_code)
        except httpx.TransportError as error:
            return time.monotonic(), type(error).__name__

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        asked = {}
        for name, wrapper in (("ours", WRAPPER), ("without", without)):
            (folder := tmp_path / name).mkdir(exist_ok=True)
            url = stack.enter_context(haproxy(folder, PORT, wrapper, address=machine.address, namespace=inside, **long))
            asked[name] = pool.submit(there.from_client, lambda url=url: upload(url))
        time.sleep(0.7)
        machine.unplug()
        lost = time.monotonic()
        took = {name: (future.result()[0] - lost, future.result()[1]) for name, future in asked.items()}
    assert took["ours"][1] == "503", took
    assert took["ours"][0] < BOUND_S + 1, took
    assert took["without"][1] == "ReadTimeout", took
