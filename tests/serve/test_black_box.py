"""What a client sees of two replicas, started by the CLI and by `ray start` with `serve deploy`: protocol, errors, limits, keys,
adapters."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from deploy.models.nano import TRAINED
from tests.support.stack.machines import CAN_MAKE, REASON, machines
from tests.support.stack.ray_cluster import RayCluster
from tests.support.stack.serve_process import Stack, free_port, wait

pytestmark = [pytest.mark.serve, pytest.mark.alone]

T = TypeVar("T")

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "nano-31b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ALL, READER, OTHER, FEW, ONE, TOKENS, LOADER = "sk-all", "sk-reader", "sk-other", "sk-few", "sk-one", "sk-tokens", "sk-loader"
LINES = {
    ALL: "all",
    READER: "reader, rights: [models]",
    OTHER: "other, models: [other]",
    FEW: "few, requests: 24",
    ONE: "one, concurrent: 3",
    TOKENS: "tokens, tokens: 400",
    LOADER: "loader, rights: [adapters]",
}
ARGS: dict[str, Any] = {
    "tp": 1,
    "mtp": {},
    "max_adapters": 2,
    "max_host_adapters": 2,
    "adapter_folder": str(TRAINED / "31b"),
    "limits": {"body_bytes": 100_000, "header_bytes": 8192, "body_timeout_s": 2.0, "hosts": None},
}
REPLICAS: dict[str, Any] = {"num_replicas": 2}


@dataclass
class Served:
    """A stack. `call` runs what it is given where the clients are."""

    url: str
    call: Callable[[Callable[[], Any]], Any]

    def ask(self, method: str, path: str, key: str | None = ALL, **more: Any) -> httpx.Response:
        """The reply to a request."""
        headers = more.pop("headers", {}) | ({"authorization": f"Bearer {key}"} if key else {})
        reply: httpx.Response = self.call(lambda: httpx.request(method, f"{self.url}{path}", headers=headers, timeout=60, **more))
        return reply

    def post(self, body: Any, key: str | None = ALL, path: str = CHAT, **more: Any) -> httpx.Response:
        """The reply to a POST of JSON."""
        return self.ask("POST", path, key, json=body, **more)

    def together(self, count: int, work: Callable[[], T]) -> list[T]:
        """What so many calls return that run at once."""
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda _: self.call(work), range(count)))


def write_keys(file: Path) -> None:
    file.write_text("".join(f"- {{sha256: {sha256(key.encode()).hexdigest()}, name: {rest}}}\n" for key, rest in LINES.items()))


@contextmanager
def by_cli(folder: Path) -> Iterator[Served]:
    """`quartet serve`."""
    write_keys(folder / "keys")
    args = ARGS | {"keys": {"file": str(folder / "keys")}, "metrics": {"discovery": {"port": free_port()}}}
    stack = Stack(folder, args=args, deployment=REPLICAS)
    try:
        stack.start(timeout_s=240)
        yield Served(stack.url, lambda work: work())
    finally:
        stack.clean_up()


@contextmanager
def by_ray_start(folder: Path) -> Iterator[Served]:
    """`quartet env`, `ray start`, `serve deploy`, on a machine of its own."""
    with machines(folder, 1) as made:
        cluster = RayCluster(made, {}, 0.0)
        cluster.args.update(ARGS | {"keys": {"file": "/tmp/keys"}})
        cluster.deployment.clear()
        cluster.deployment.update(REPLICAS | {"name": "Quartet", "ray_actor_options": {"num_cpus": 0.5, "num_gpus": 0}})
        write_keys(cluster.head.folder / "tmp" / "keys")
        cluster.start_head()
        cluster.deploy(paced=False)
        cluster.wait_replicas(2)
        served = Served(cluster.url(cluster.head), made.from_client)
        wait(lambda: served.ask("GET", "/health/ready").status_code == 200, 60)
        yield served


STARTS = {"cli": by_cli, "ray start": by_ray_start}


# The same tests again under the other start, with a boot of its own. `make test-nodes` starts Ray like that, too.
@pytest.fixture(scope="module", params=["cli", pytest.param("ray start", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "ray start" and not CAN_MAKE:
        pytest.skip(REASON)
    with STARTS[request.param](tmp_path_factory.mktemp("served")) as found:
        yield found


def error(reply: httpx.Response, status: int) -> dict[str, Any]:
    """The error of OpenAI's shape in a reply of that status."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"].startswith("application/json")
    found: dict[str, Any] = reply.json()["error"]
    assert {"message", "type", "code", "param"} <= found.keys()
    return found


def test_it_answers_in_every_api(served: Served) -> None:
    """Whole and streamed, in OpenAI's three shapes and Anthropic's, with an id of its own for each request."""
    assert served.post(BODY).json()["usage"]["completion_tokens"] > 0
    text = served.post(BODY | {"stream": True}).text
    assert text.rstrip().endswith("data: [DONE]")
    assert served.post({"model": "nano-31b", "prompt": "One", "max_tokens": 2}, path="/v1/completions").status_code == 200
    assert served.post({"model": "nano-31b", "input": "Hello", "max_output_tokens": 16}, path="/v1/responses").status_code == 200
    assert served.post(BODY, path="/v1/messages").json()["type"] == "message"
    assert [card["id"] for card in served.ask("GET", "/v1/models").json()["data"]] == ["nano-31b", "polite"]
    assert len({served.post(BODY).headers["x-request-id"] for _ in range(3)}) == 3


def test_errors_have_the_apis_shape(served: Served) -> None:
    """What is wrong is named, in the shape of the API that was asked; planted: the same body without the fault is answered."""
    assert error(served.post(BODY | {"model": "none"}), 404)["code"] == "model_not_found"
    assert error(served.post(BODY | {"temperature": 9}), 400)["param"] == "temperature"
    assert error(served.post({"model": "nano-31b"}), 400)["param"] == "messages"
    assert served.post(BODY | {"model": "none"}, path="/v1/messages").json()["error"]["type"] == "not_found_error"
    error(served.ask("POST", CHAT, content=b"{", headers={"content-type": "application/json"}), 400)
    error(served.ask("POST", CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415)
    error(served.ask("GET", "/nothing"), 404)
    error(served.ask("GET", CHAT), 405)
    assert served.post(BODY).status_code == 200


def test_limits_hold(served: Served) -> None:
    """Large bodies by their length and by their bytes, large heads, compressed bodies and bodies that do not come are refused."""
    error(served.post(BODY | {"user": "x" * 200_000}), 413)
    chunks = [b"x" * 10_000] * 20
    error(served.ask("POST", CHAT, content=iter(chunks), headers={"content-type": "application/json"}), 413)
    error(served.post(BODY, headers={"x-long": "x" * 10_000}), 431)
    error(served.post(BODY, headers={"content-encoding": "gzip"}), 415)
    assert b" 408 " in served.call(lambda: half_sent(served))
    assert served.post(BODY, headers={"x-request-timeout-seconds": "0.001"}).status_code == 200


def half_sent(served: Served) -> bytes:
    """The head of the answer to a body that does not come."""
    address = httpx.URL(served.url)
    with socket.create_connection((address.host, address.port), timeout=30) as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ALL}\r\n"
        sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{{".encode())
        return sock.recv(200)


def test_keys_hold(served: Served) -> None:
    """401 without a good key, 403 without the right or the model; health needs none."""
    for key in (None, "sk-wrong"):
        assert error(served.post(BODY, key), 401)["code"] == "invalid_api_key"
    error(served.post(BODY, READER), 403)
    assert "nano-31b" in error(served.post(BODY, OTHER), 403)["message"]
    assert served.ask("GET", "/v1/models", OTHER).json()["data"] == []
    assert served.ask("GET", "/v1/models", READER).status_code == 200
    for path in ("/health", "/health/live", "/health/ready"):
        assert served.ask("GET", path, None).status_code == 200


def test_one_call_loads_an_adapter_at_both_replicas(served: Served) -> None:
    """Each of 24 conversations at once then has an answer by its name, and after the unload none has. Planted: a key without the
    right loads none, so all get 404."""
    body = {"lora_name": "late", "lora_path": "polite"}

    def statuses() -> set[int]:
        """Of new conversations, which go to the replicas in turn."""
        numbers = count()

        def post() -> int:
            messages = [{"role": "user", "content": f"Hello {next(numbers)}"}]
            chat = BODY | {"model": "late", "messages": messages}
            return httpx.post(f"{served.url}{CHAT}", json=chat, headers=bearer(ALL), timeout=60).status_code

        return set(served.together(24, post))

    error(served.post(body, ALL, "/v1/load_lora_adapter"), 403)
    assert statuses() == {404}
    assert served.post(body, LOADER, "/v1/load_lora_adapter").status_code == 200
    assert statuses() == {200}
    assert served.post(body, LOADER, "/v1/unload_lora_adapter").status_code == 200
    assert statuses() == {404}


def test_two_replicas_give_one_quota(served: Served) -> None:
    """60 requests at once over both: of 24 a minute 24 begin, and one more in 2.5 s; the others hear when to come back. Tokens a
    minute likewise, within 10 % and one request; of eight requests at once three are open. Planted: a key without a limit."""
    replies = served.together(60, lambda: httpx.get(f"{served.url}/v1/models", headers=bearer(FEW), timeout=60))
    found = Counter(reply.status_code for reply in replies)
    print(found)
    assert found.keys() == {200, 429}
    assert 24 <= found[200] <= 24 * 1.1 + 1
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.status_code == 429)
    free = served.together(60, lambda: httpx.get(f"{served.url}/v1/models", headers=bearer(ALL), timeout=60))
    assert {reply.status_code for reply in free} == {200}
    body = BODY | {"max_tokens": 60, "ignore_eos": True}
    long = served.together(8, lambda: httpx.post(f"{served.url}{CHAT}", json=body, headers=bearer(ONE), timeout=60))
    assert Counter(reply.status_code for reply in long)[200] == 3
    used = 0
    began = time.monotonic()
    for _ in range(20):
        reply = served.post(body, TOKENS)
        if reply.status_code == 429:
            break
        used += reply.json()["usage"]["total_tokens"]
    filled = 400 * (1 + (time.monotonic() - began) / 60)  # a minute's amount at once, and what came since
    largest = reply_tokens(served)
    assert 400 <= used <= 1.1 * filled + largest


def reply_tokens(served: Served) -> int:
    """Tokens of one such request: the last may begin while one token is left."""
    used: int = served.post(BODY | {"max_tokens": 60, "ignore_eos": True}).json()["usage"]["total_tokens"]
    return used


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
