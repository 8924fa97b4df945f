"""A thousand pictures, a hundred at once, through the whole stack, beside streams of text: none is lost, and nothing grows."""

import asyncio
import base64
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import httpx
import pytest

from tests.support.stack.serve_process import Stack, descendants, process_mb
from training.pictures import Picture, drawn

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(1200)]

CHAT, MODEL = "/v1/chat/completions", "nano-31b"
PICTURES, CONCURRENCY, STREAMS = 1000, 100, 4
GROWTH_MB = 200.0
TEXT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hello"}],
    "stream": True,
    "ignore_eos": True,
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("images"), args={"tp": 1, "limits": {"queue_timeout_s": 900}})
    stack.start()
    yield stack
    stack.clean_up()


def memory_mb(stack: Stack) -> float:
    """Of all its processes, what they share counted once in each."""
    return sum(process_mb(pid, "VmRSS") for pid in descendants(stack.process.pid))


async def asked(client: httpx.AsyncClient, picture: Picture, places: asyncio.Semaphore) -> str:
    """How it ended."""
    url = f"data:image/png;base64,{base64.b64encode(picture.png).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": picture.question}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 16}
    async with places:
        reply = await client.post(CHAT, json=body)
    if reply.status_code != 200:
        return f"{reply.status_code}: {reply.text[:200]}"
    return "right" if reply.json()["choices"][0]["message"]["content"] == picture.answer else "wrong"


async def gaps(client: httpx.AsyncClient) -> list[float]:
    """Seconds between a stream's tokens."""
    async with client.stream("POST", CHAT, json=TEXT) as reply:
        lines = (line async for line in reply.aiter_lines() if line.startswith("data: {"))
        times = [time.monotonic() async for line in lines if json.loads(line[6:])["choices"]]
    return [later - earlier for earlier, later in pairwise(times[1:])]


async def streams(client: httpx.AsyncClient, until: asyncio.Task[Any] | None = None) -> list[float]:
    """Of STREAMS at once, and again until then."""
    all_gaps = []
    while True:
        all_gaps += chain.from_iterable(await asyncio.gather(*(gaps(client) for _ in range(STREAMS))))
        if until is None or until.done():
            return all_gaps


async def load(stack: Stack, pictures: list[Picture]) -> tuple[Counter[str], list[float], list[float], float]:
    """Ends, gaps of the streams alone and beside the pictures, seconds."""
    places = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY + STREAMS)
    async with httpx.AsyncClient(base_url=stack.url, timeout=900, limits=limits) as client:
        await streams(client)
        alone, began = await streams(client), time.monotonic()
        images = asyncio.ensure_future(asyncio.gather(*(asked(client, picture, places) for picture in pictures)))
        beside = await streams(client, images)
        return Counter(await images), alone, beside, time.monotonic() - began


def test_a_thousand_pictures_are_answered(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, nearly all rightly. How much longer the streams' tokens take is printed: on a CPU they share cores."""
    pictures = drawn(random.Random(0), PICTURES)
    asyncio.run(load(stack, pictures[:CONCURRENCY]))
    before = memory_mb(stack)
    ends, alone, beside, took = asyncio.run(load(stack, pictures))
    grown = memory_mb(stack) - before
    with capsys.disabled():
        print(f"\n{dict(ends)} in {took:.0f} s, {PICTURES / took:.1f} pictures a second; memory {before:.0f} {grown:+.0f} MB")
        for name, waits in (("alone", alone), ("beside", beside)):
            p50, p95, mean = statistics.median(waits), statistics.quantiles(waits, n=20)[-1], statistics.mean(waits)
            print(f"{STREAMS} streams {name}: p50 {p50 * 1e3:.1f} ms, p95 {p95 * 1e3:.1f} ms, mean {mean * 1e3:.1f}")
    assert ends["right"] + ends["wrong"] == PICTURES, ends
    assert ends["wrong"] <= PICTURES / 30, ends
    assert grown < GROWTH_MB
