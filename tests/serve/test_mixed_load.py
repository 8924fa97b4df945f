"""Five hundred requests of all kinds at once, through the whole stack: each one's end is known, on both sides."""

import asyncio
import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.stack.serve_process import Stack, figures, memory_mb, wait

pytestmark = [pytest.mark.serve, pytest.mark.slow]

CHAT = "/v1/chat/completions"
REQUESTS, CONCURRENCY = 500, 64
ABORTS, SLOW = 107, 35
WRITE_TIMEOUT_S = 6
LARGE: dict[str, Any] = {  # 30 MB, which is more than the kernel's buffers hold between replica, HAProxy and client
    "model": "nano-31b",
    "messages": [{"role": "user", "content": "Hello"}],
    "ignore_eos": True,
    "stream": True,
    "n": 8,
    "max_tokens": 1900,
    "logprobs": True,
    "top_logprobs": 20,
}
SEED = random.SystemRandom().randrange(1 << 30)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("mixed"), args={"limits": {"write_timeout_s": WRITE_TIMEOUT_S}})
    stack.start()
    yield stack
    stack.clean_up()


def counted(stack: Stack) -> dict[str, float]:
    """The exporter's counters of requests."""
    return {name: value for name, value in figures(stack).items() if re.match("quartet_requests_(received_)?total", name)}


def body(rng: random.Random, *, slow: bool) -> dict[str, Any]:
    """One request: short or long, whole or streamed, one choice or two; a slow reader's is large."""
    words = " ".join(rng.choices(["tell", "me", "a", "tiny", "story", "about", "rivers"], k=rng.randint(1, 60)))
    asked = {"model": "nano-31b", "messages": [{"role": "user", "content": words}], "ignore_eos": True}
    if slow:
        return asked | {"max_tokens": 200, "stream": True, "logprobs": True, "top_logprobs": 20}
    return asked | {"max_tokens": rng.randint(1, 24), "stream": rng.random() < 0.7, "n": rng.choice([1, 1, 1, 2])}


@asynccontextmanager
async def connected(stack: Stack, asked: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """A connection of its own with a small buffer, whose request is sent."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it connects: else the kernel lets it grow to megabytes
    sock.connect(("127.0.0.1", stack.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    data = json.dumps(asked).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    try:
        writer.write(head.encode() + data)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()


async def reads_nothing(stack: Stack, asked: dict[str, Any]) -> str:
    """Sends, takes nothing for seconds, and goes."""
    async with connected(stack, asked):
        await asyncio.sleep(4)
    return "slow"


async def leaves(stack: Stack, asked: dict[str, Any], after_s: float) -> str:
    """Goes before its answer is complete, perhaps before it has begun."""
    async with connected(stack, asked):
        await asyncio.sleep(after_s)
    return "left"


async def asks(client: httpx.AsyncClient, asked: dict[str, Any]) -> str:
    """An honest request: finished, refused in shape, or whatever else it was."""
    reply = await client.post(CHAT, json=asked)
    if reply.status_code == 200:
        whole = reply.text.rstrip().endswith("data: [DONE]") if asked["stream"] else reply.json()["choices"]
        return "finished" if whole else f"cut: {reply.text[-200:]}"
    shape = reply.headers.get("content-type") == "application/json" and set(reply.json()["error"]) >= {"message", "type", "code"}
    refused = reply.status_code in (429, 503) and int(reply.headers.get("retry-after", 0)) >= 1
    return "refused" if shape and refused else f"{reply.status_code}: {reply.text[:200]}"


async def load(stack: Stack) -> Counter[str]:
    """All of them, CONCURRENCY at once, in random order."""
    rng = random.Random(SEED)
    kinds = ["leaves"] * ABORTS + ["slow"] * SLOW + ["asks"] * (REQUESTS - ABORTS - SLOW)
    rng.shuffle(kinds)
    places = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, limits=httpx.Limits(max_connections=CONCURRENCY)) as client:

        async def one(kind: str) -> str:
            async with places:
                if kind == "asks":
                    return await asks(client, body(rng, slow=False))
                if kind == "slow":
                    return await reads_nothing(stack, body(rng, slow=True))
                return await leaves(stack, body(rng, slow=False), rng.uniform(0, 1))

        return Counter(await asyncio.gather(*map(one, kinds)))


def test_five_hundred_mixed_requests_are_accounted_for(stack: Stack) -> None:
    """Nine in ten of those that read finish, whoever does not hears 429 or 503 with Retry-After, and the engine loses none."""
    before, began = counted(stack), time.monotonic()
    ends = asyncio.run(load(stack))
    print(f"seed {SEED}: {dict(ends)} in {time.monotonic() - began:.0f} s")
    honest = REQUESTS - ABORTS - SLOW
    assert (ends["left"], ends["slow"]) == (ABORTS, SLOW)
    assert ends["finished"] + ends["refused"] == honest, ends
    assert ends["finished"] >= 0.9 * honest

    def balanced() -> bool:
        moved = {name: value - before.get(name, 0.0) for name, value in counted(stack).items()}
        received = moved.pop("quartet_requests_received_total")
        return received == sum(moved.values())

    wait(balanced, 60, stack.said)
    outcomes = {name: value - before.get(name, 0.0) for name, value in counted(stack).items()}
    print({name: value for name, value in outcomes.items() if value})
    assert not any(value for name, value in outcomes.items() if "error" in name or "dead" in name), outcomes


def ended(stack: Stack, before: dict[str, float]) -> dict[str, float]:
    """How many choices have ended since, by outcome."""
    moved = {name: value - before.get(name, 0.0) for name, value in counted(stack).items() if "outcome" in name}
    return {name.partition('"')[2].partition('"')[0]: count for name, count in moved.items() if count}


@pytest.mark.timeout(900)  # eight thousand tokens must be made before the buffers are full
def test_a_slow_reader_of_a_large_answer_is_ended(stack: Stack) -> None:
    """One that takes nothing is ended once the buffers are full, memory stays, and a stream beside it is whole.

    By the replica as a slow reader; as a client that has gone, where HAProxy did not know the replica yet and Serve's own proxy
    stood between.
    """
    before, memory = counted(stack), memory_mb(stack)
    whole = LARGE["n"] * LARGE["max_tokens"]

    async def held() -> tuple[str, int]:
        async with connected(stack, LARGE) as reader:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            async with httpx.AsyncClient(base_url=stack.url, timeout=300) as client:
                beside = await asks(client, body(random.Random(SEED), slow=False) | {"stream": True, "max_tokens": 200, "n": 1})
            known = await asyncio.to_thread(counted, stack)
            await asyncio.to_thread(wait, lambda: sum(ended(stack, known).values()) >= LARGE["n"], 400, lambda: str(counted(stack)))
            return beside, len(await reader.read(-1))

    beside, size = asyncio.run(held())
    outcomes = ended(stack, before)
    print(f"{outcomes} of {whole} tokens; {size / 1e6:.1f} MB in buffers; the replica holds {memory_mb(stack) - memory:+.0f} MB")
    assert beside == "finished"
    assert outcomes.pop("length") == 1, "the one beside it"
    assert outcomes in ({"slow_reader": LARGE["n"]}, {"client_gone": LARGE["n"]})
    assert memory_mb(stack) - memory < 150
    wait(lambda: kv_usage(stack) == 0, 10, stack.said)


def kv_usage(stack: Stack) -> float:
    """Of all KV groups, cached pages not counted."""
    return sum(value for name, value in figures(stack).items() if name.startswith("quartet_kv_usage_ratio"))
