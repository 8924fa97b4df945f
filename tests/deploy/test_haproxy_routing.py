"""Where HAProxy sends requests, by the configuration that haproxy_routing.py edits, through the real binary and toy replicas."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from deploy.environment import WRAPPER, haproxy_binary, haproxy_paths
from deploy.routing import ConversationSettings, ServedName, routing_of
from tests.support.edge.http_edge import asgi_server
from tests.support.stack.serve_process import free_port, wait

pytestmark = [pytest.mark.pure, pytest.mark.skipif(haproxy_binary() is None, reason="no HAProxy here")]

RESYNC_S = 11.0  # a new HAProxy asks for tables for 10 s before it is whole; a reload before that loses them
CONFIG = """global
    stats socket {folder}/admin.sock mode 666 level admin expose-fd listeners
    tune.bufsize 16384
defaults
    mode http
    timeout connect 1s
    timeout client 30s
    timeout server 30s
    option redispatch 1
    retry-on conn-failure
    balance leastconn
frontend prometheus
    bind :{metrics}
    http-request return status 200
frontend http_frontend
    bind 127.0.0.1:{port}
    acl is_http-b path_beg /models/b/
    acl is_http-a path_beg /
    use_backend http-b if is_http-b
    use_backend http-a if is_http-a
    default_backend http-a
backend http-a
    http-reuse always
    # Servers in this backend
{a}
    server fallback {head}:9 backup
backend http-b
{b}
"""


class Fleet:
    """HAProxy in front of toy replicas, each of which says its name, `x-quartet-home` and the path that it was asked."""

    def __init__(self, folder: Path, a: Mapping[str, int], b: Mapping[str, int], routing: str | None, *nodes: str) -> None:
        """`nodes`: this one's address, and the head's, where Serve's proxy is."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        node, self._head = nodes or ("127.0.0.1", "127.0.0.1")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._metrics = free_port()
        self._b = b
        self._raylet = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", f"--node_ip_address={node}"])
        self._environ = os.environ | haproxy_paths() | {"RAY_RAYLET_PID": str(self._raylet.pid)}
        if routing is not None:
            self._environ["QUARTET_ROUTING"] = routing
        self._processes = list[subprocess.Popen[bytes]]()
        self.load(a)

    def load(self, a: Mapping[str, int]) -> None:
        """Starts HAProxy with these servers of application a, as Serve does when its replicas change."""
        path = self.folder / "haproxy.cfg"
        path.write_text(
            CONFIG.format(
                folder=self.folder,
                metrics=self._metrics,
                port=self.port,
                head=self._head,
                a=_servers(a),
                b=_servers(self._b),
            )
        )
        old = [word for process in self._processes for word in ("-sf", str(process.pid))]
        command = [str(WRAPPER), "-db", "-f", str(path), *old]
        (self.folder / "admin.sock").unlink(missing_ok=True)
        self._processes.append(subprocess.Popen(command, env=self._environ, stderr=subprocess.DEVNULL))
        wait(lambda: _listens(self.folder / "admin.sock"), 10)

    def post(self, body: Any = None, **headers: str) -> list[str]:
        """The name of the replica that answered, what it was told of the conversation, and the path."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body or {}, headers=named, timeout=20).text.split(" ")

    def close(self) -> None:
        for process in [self._raylet, *self._processes]:
            process.kill()
            process.wait(10)
        for name in ("admin.sock", "peers.sock"):
            (self.folder / name).unlink(missing_ok=True)


def _servers(ports: Mapping[str, int]) -> str:
    return "\n".join(f"    server {name} 127.0.0.1:{port} check inter 200ms" for name, port in ports.items())


def _listens(admin: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as made:
        return made.connect_ex(str(admin)) == 0


def toy(name: str, seconds: float) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(seconds)
        home = dict(scope["headers"]).get(b"x-quartet-home", b"-").decode()
        body = f"{name} {home} {scope['path']}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    return app


def routing(prefixes: Mapping[str, str] | None = None, **settings: Any) -> str:
    names = [ServedName(name, prefix, 2048) for name, prefix in (prefixes or {}).items()]
    return routing_of(ConversationSettings(**settings), slots=16, body_timeout_s=1.0, names=names)


@contextmanager
def fleet(
    folder: Path, count: int = 4, *, told: str | None = None, slow: float = 0.0, nodes: Sequence[str] = ()
) -> Iterator[tuple[Fleet, dict[str, int], list[ExitStack]]]:
    """HAProxy, the ports of its servers by name, and what ends each of them. `slow`: seconds that the first takes to answer."""
    stacks = [ExitStack() for _ in range(count + 1)]
    ports = [stack.enter_context(asgi_server(toy(f"r{number}", 0.0 if number else slow))) for number, stack in enumerate(stacks)]
    a = {f"r{number}": port for number, port in enumerate(ports[:-1])}
    made = Fleet(folder, a, {f"r{count}": ports[-1]}, told, *nodes)
    try:
        sleep(0.5)  # the first health checks
        yield made, a, stacks
    finally:
        made.close()
        for stack in stacks:
            stack.close()


def rounds(made: Fleet, keys: int, turns: int) -> list[list[list[str]]]:
    """The answers to so many turns of so many conversations, by conversation."""
    answers = [[made.post(x_session_id=f"s{key}") for key in range(keys)] for _ in range(turns)]
    return [list(each) for each in zip(*answers, strict=True)]


@pytest.mark.parametrize("stay", [True, False])
def test_conversations_stay_and_are_spread(tmp_path: Path, stay: bool) -> None:
    """41 conversations of 3 turns stay on four replicas, some 10 on each. Planted: conversations.stay false, and they wander."""
    with fleet(tmp_path, told=routing(stay=stay)) as (made, _, _):
        answers = rounds(made, 41, 3)
    stayed = [turns for turns in answers if len({name for name, _, _ in turns}) == 1]
    assert (len(stayed) == 41) == stay
    if stay:
        assert set(Counter(turns[0][0] for turns in answers).values()) == {10, 11}
        assert [[home for _, home, _ in turns] for turns in answers] == [["new", "kept", "kept"]] * 41


LONG = [{"role": "assistant", "content": "y" * 300_000}]
USER = {"role": "user", "content": "the first turn"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "the first turn"}]}
SYSTEM = {"role": "system", "content": "the same for all"}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_cache_key": "one"},
        {"metadata": {"user_id": "x" * 200 + "one"}},
        {"messages": [USER]},
        {"messages": [PARTS]},
        {"messages": [SYSTEM, USER]},
        {"messages": [SYSTEM, PARTS]},
        {"input": "the first turn"},
        {"messages": [USER, *LONG]},
        {"prompt_cache_key": "one", "messages": [SYSTEM, *LONG]},
    ],
    ids=",".join,
)
def test_each_key_is_found(tmp_path: Path, body: dict[str, Any]) -> None:
    """Also in a body longer than the buffer. Planted: the same body with another key is a conversation of its own."""
    other = json.loads(json.dumps(body).replace("one", "two").replace("first", "2nd"))
    with fleet(tmp_path, told=routing()) as (made, _, _):
        assert [made.post(body)[1] for _ in range(3)] == ["new", "kept", "kept"]
        assert made.post(other)[1] == "new"


def test_clients_with_other_keys_have_other_conversations(tmp_path: Path) -> None:
    """The same first turn of two holders of API keys is two conversations. A body without a key is none, and nobody may say it."""
    body = {"messages": [USER]}
    with fleet(tmp_path, told=routing()) as (made, _, _):
        assert [made.post(body, authorization=f"Bearer {key}")[1] for key in "aab"] == ["new", "kept", "new"]
        assert made.post({"prompt": "x"}, x_quartet_home="kept")[1] == "-"


def test_one_replica_has_nothing_to_choose(tmp_path: Path) -> None:
    """No table, no buffer before the body. Planted: two replicas."""
    for count in (1, 2):
        with fleet(tmp_path, count, told=routing()) as (made, _, _):
            assert (made.post(x_session_id="one")[1] == "-") == (count == 1)
            assert ("stick-table" in (tmp_path / "haproxy.cfg").read_text()) == (count == 2)


def test_a_dead_replica_moves_only_its_own(tmp_path: Path) -> None:
    """Those of the other three stay, and the moved ones stay where they went."""
    with fleet(tmp_path, told=routing()) as (made, _, stacks):
        before = rounds(made, 40, 1)
        stacks[1].close()
        sleep(1.5)
        after = rounds(made, 40, 2)
    for was, now in zip(before, after, strict=True):
        if was[0][0] == "r1":
            assert [home for _, home, _ in now] == ["moved", "kept"]
        else:
            assert {name for name, _, _ in now} == {was[0][0]}


@pytest.mark.parametrize("waits", [True, False])
def test_a_reload_forgets_nobody(tmp_path: Path, waits: bool) -> None:
    """A fifth replica comes, and all 30 stay. Planted: a reload in the first seconds of a HAProxy, which has no whole table yet."""
    with fleet(tmp_path, told=routing()) as (made, a, _):
        before = rounds(made, 30, 1)
        if waits:
            sleep(RESYNC_S)
        made.load(a | {"r9": free_port()})
        sleep(1.5)
        after = rounds(made, 30, 1)
    kept = [now[0][:2] == [was[0][0], "kept"] for was, now in zip(before, after, strict=True)]
    assert all(kept) == waits


@pytest.mark.parametrize("knows", [True, False])
def test_the_ingress_of_another_node_knows_the_conversations(tmp_path: Path, knows: bool) -> None:
    """Those begun at one node's HAProxy stay at the other's, and after a reload of both. Planted: each knows of itself alone."""
    nodes = ("127.0.0.2", "127.0.0.3") if knows else ("127.0.0.1",) * 2
    told = routing(peer_port=free_port())
    with fleet(tmp_path / "one", told=told, nodes=nodes) as (one, a, _):
        other = Fleet(tmp_path / "other", a, {}, told, *reversed(nodes))
        try:
            sleep(RESYNC_S if knows else 0)
            before = rounds(one, 20, 1)
            sleep(1)
            met = [rounds(other, 20, 1)]
            for made in (one, other) if knows else ():
                made.load(a)
                sleep(1.5)
                met.append(rounds(made, 20, 1))
        finally:
            other.close()
    for after in met:
        kept = [now[0][:2] == [was[0][0], "kept"] for was, now in zip(before, after, strict=True)]
        assert all(kept) == knows


@pytest.mark.parametrize("lead", [32, 1])
def test_new_conversations_go_to_replicas_in_turn(tmp_path: Path, lead: int) -> None:
    """A slow replica gets as many as the others. Planted: a lead by which it is full, and gives its turn away."""
    with fleet(tmp_path, told=routing(lead=lead), slow=0.5) as (made, _, _), ThreadPoolExecutor(4) as pool:
        found = Counter(name for name, _, _ in pool.map(lambda key: made.post(x_session_id=f"s{key}"), range(40)))
    assert (max(found.values()) <= 11) == (lead == 32), found


@pytest.mark.parametrize("lead", [1, 1000])
def test_a_full_replica_gives_way(tmp_path: Path, lead: int) -> None:
    """With `lead` more requests than the mean its conversation moves. Planted: a lead that nobody has."""
    with fleet(tmp_path, told=routing(lead=lead)) as (made, _, _), ExitStack() as held:
        home = made.post(x_session_id="one")[0]
        for _ in range(4):
            open_ = held.enter_context(socket.create_connection(("127.0.0.1", made.port)))
            head = "POST / HTTP/1.1\r\nHost: a\r\nx-session-id: one\r\nContent-Length: 9\r\n\r\n"
            open_.sendall(head.encode())  # its body does not come
            sleep(0.2)
        name, told, _ = made.post(x_session_id="one")
    assert (told == "kept") == (lead == 1000)
    assert (name == home) == (lead == 1000)


def test_a_body_that_does_not_come_is_said_so(tmp_path: Path) -> None:
    """HAProxy looks into it for limits.body_timeout_s, and then says 408 in OpenAI's shape."""
    with fleet(tmp_path, told=routing()) as (made, _, _), socket.create_connection(("127.0.0.1", made.port), timeout=20) as late:
        late.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        head, _, body = late.recv(65536).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_the_model_chooses_the_application(tmp_path: Path) -> None:
    """Its prefix is put before the path; what is of no other application goes to that at /. Planted: without the names."""
    names = {"small": "/models/b", "an \\ odd \" one": "/models/b"}
    for prefixes in (names, {}):
        with fleet(tmp_path, 1, told=routing(prefixes)) as (made, _, _):
            for name in names:
                there = made.post({"messages": [USER], "model": name})
                assert there == (["r1", "-", "/models/b/v1/chat/completions"] if prefixes else ["r0", "-", "/v1/chat/completions"])
            assert made.post({"model": "large"})[0] == "r0"
            assert made.post({"messages": [USER]})[0] == "r0"
            assert httpx.get(f"{made.url}/models/b/v1/models").text == "r1 - /models/b/v1/models"
