"""Two models at one URL, on a real stack that has keys and runs next to another one: an application each, chosen by `model`."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import yaml

from tests.support.stack.serve_process import Stack, serves_again

pytestmark = pytest.mark.serve

LARGE = ("claude-sonnet", "large")
SMALL = ("claude-haiku", "small")
HELLO = [{"role": "user", "content": "Hello"}]
SHORT: dict[str, Any] = {"model": LARGE[0], "messages": HELLO, "max_tokens": 2}
KEY = {"authorization": "Bearer secret"}
STREAMS = 16


@contextmanager
def asked_without_key(stack: Stack) -> Iterator[Counter[int]]:
    """What requests without a key have heard, twenty a second."""
    statuses = Counter[int]()
    over = Event()

    def ask() -> None:
        while not over.wait(0.05):
            with suppress(httpx.TransportError):
                statuses[stack.chat(SHORT, 5).status_code] += 1

    asking = Thread(target=ask)
    asking.start()
    try:
        yield statuses
    finally:
        over.set()
        asking.join(10)


@pytest.fixture(scope="module")
def heard_at_boot() -> Counter[int]:
    """The statuses of requests without a key, while the stack boots."""
    return Counter()


@pytest.fixture(scope="module")
def stack(shared_stack: Stack, heard_at_boot: Counter[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("models")
    (folder / "keys").write_text(f"- {{sha256: {sha256(b'secret').hexdigest()}, name: alice}}\n")
    keys = {"file": str(folder / "keys")}
    shared: dict[str, Any] = {"tp": 1, "mtp": {}, "metrics": {"discovery": {"enabled": False}}, "keys": keys}
    stack = Stack(folder, args=shared | {"served_model_name": list(LARGE), "adapters": {}})
    config = yaml.safe_load(stack.config.read_text())
    small = yaml.safe_load(yaml.safe_dump(config["applications"][0]))
    small |= {"name": "small", "route_prefix": "/models/small"}
    small["args"] |= {"model": "nano:e2b", "served_model_name": list(SMALL), "adapters": {}}
    small["args"] |= {"max_seqs": 4, "max_queue": 0, "max_len": 1024}
    config["applications"].append(small)
    stack.config.write_text(yaml.safe_dump(config))
    try:
        with asked_without_key(stack) as statuses:
            stack.start(timeout_s=200)
        heard_at_boot.update(statuses)
        yield stack
        stack.end()
    finally:
        stack.clean_up()


def post(stack: Stack, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{stack.url}{path}", json=body, headers=KEY, timeout=120)


def get(stack: Stack, path: str) -> httpx.Response:
    return httpx.get(f"{stack.url}{path}", headers=KEY)


def chat(stack: Stack, model: str, **more: Any) -> httpx.Response:
    return post(stack, "/v1/chat/completions", {"messages": HELLO, "model": model, "max_tokens": 4} | more)


def test_the_list_is_the_union(stack: Stack) -> None:
    """Every name of both, with its own context, at either application."""
    for prefix in ("", "/models/small"):
        cards = get(stack, f"{prefix}/v1/models").json()["data"]
        assert {card["id"]: card["max_model_len"] for card in cards} == dict.fromkeys(LARGE, 2048) | dict.fromkeys(SMALL, 1024)
    assert get(stack, "/v1/models/small").json()["id"] == "small"
    assert get(stack, "/v1/models/none").status_code == 404


def test_a_name_of_no_model_is_said_so(stack: Stack) -> None:
    """404 in the API's shape. Planted: a body without `model` is answered by the application at /."""
    reply = chat(stack, "none")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    message = post(stack, "/v1/messages", {"messages": HELLO, "model": "none", "max_tokens": 4})
    assert (message.status_code, message.json()["error"]["type"]) == (404, "not_found_error")
    named = post(stack, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 4})
    assert named.json()["model"] == LARGE[0]


def test_none_is_answered_by_the_other(stack: Stack) -> None:
    """16 requests to each at once, by both names and in all APIs' paths: the answer has the name of the model asked."""
    asked = [name for _ in range(STREAMS // 2) for name in (*LARGE, *SMALL)]
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(lambda name: chat(stack, name), asked))
    answered = [(name, reply) for name, reply in zip(asked, replies, strict=True) if reply.status_code == 200]
    assert sum(name in LARGE for name, _ in answered) == STREAMS
    assert sum(name in SMALL for name, _ in answered) >= 4
    assert all(reply.json()["model"] == (LARGE if name in LARGE else SMALL)[0] for name, reply in answered)


def streamed(stack: Stack, model: str) -> tuple[set[str], bool]:
    """The names in a stream's chunks, and whether it ended; neither if it was refused."""
    body = {"messages": [{"role": "user", "content": f"Hello {model}"}], "model": model, "max_tokens": 12, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, headers=KEY, timeout=120) as reply:
        if reply.status_code == 429:
            return set(), False
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    names = {json.loads(line)["model"] for line in lines[:-1]}
    return names, lines[-1] == "[DONE]"


def test_no_stream_is_answered_by_the_other(stack: Stack) -> None:
    """16 streams to each at once: all chunks of one have the name of its own model. The small model, of four places, refuses some;
    those come again. Planted: the name of the other is not among them."""
    asked = [name for _ in range(STREAMS // 2) for name in (*LARGE, *SMALL)]
    done: list[tuple[str, set[str]]] = []
    ends = time.monotonic() + 150
    while asked:
        assert time.monotonic() < ends, asked
        with ThreadPoolExecutor(len(asked)) as pool:
            found = list(pool.map(lambda name: streamed(stack, name), asked))
        done += [(name, names) for name, (names, ended) in zip(asked, found, strict=True) if ended]
        asked = [name for name, (_, ended) in zip(asked, found, strict=True) if not ended]
    assert len(done) == 2 * STREAMS
    for name, names in done:
        assert names == {(LARGE if name in LARGE else SMALL)[0]}


def test_overload_of_one_is_not_the_others(stack: Stack) -> None:
    """The small model has four places and no queue: beyond them it refuses, while the large one answers all."""
    asked = ["small"] * STREAMS + ["large"] * STREAMS
    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(lambda name: chat(stack, name, max_tokens=80, ignore_eos=True), asked))
    assert {reply.status_code for reply in replies[:STREAMS]} == {200, 429}
    assert {reply.status_code for reply in replies[STREAMS:]} == {200}


def test_a_prefix_is_a_base_url(stack: Stack) -> None:
    """Below its prefix a model answers whatever the length of the body, and only to its own names."""
    path = "/models/small/v1/chat/completions"
    body = {"messages": HELLO, "max_tokens": 4}
    assert post(stack, path, body).json()["model"] == SMALL[0]
    assert post(stack, path, body | {"model": "large"}).status_code == 404


def test_no_other_stack_answers_for_it(stack: Stack, heard_at_boot: Counter[int]) -> None:
    """While it boots and while a replica is lost, nobody without a key is answered.

    The other stack has no keys, and its own proxy listens all the time: planted, one port for both proxies, it answers.
    """
    with asked_without_key(stack) as statuses:
        (replica,) = stack.find("ServeReplica:quartet:")
        os.kill(replica, signal.SIGKILL)
        serves_again(stack, SHORT, KEY)
    statuses += heard_at_boot
    assert statuses[401], statuses
    assert 200 not in statuses, statuses
