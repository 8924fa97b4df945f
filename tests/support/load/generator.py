"""Drives a closed load: clients that send their next request when the last has ended, and the ledger that must balance afterwards.

What is sent is counted where it is sent, and what ended where it ended; `Ledger.balance` holds one against the other.
"""

import asyncio
import base64
import io
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import numpy as np
from PIL import Image

from tests.support.load.request import ENDS, Content, Endpoint, RequestResult, ask

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work number night point home water room mother area money story fact month"
)
_WORDS = _TEXT.split()
FIRST_ID = 300  # of random ids: below are special tokens
_PROBES = (4, 36)  # words of the two first requests


@dataclass(frozen=True)
class Level:
    """One load of `concurrency` clients; ends after `requests`, or after `seconds`."""

    concurrency: int
    requests: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Lengths:
    """Tokens, drawn evenly from [low, high]."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))


@dataclass(frozen=True)
class Scale:
    """How many tokens a prompt of so many words has: `base` for what the template adds, `per_word` for each word."""

    base: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int) -> int:
        """Words for a prompt of about `tokens` tokens; at least one."""
        return max(1, round((tokens - self.base) / self.per_word))


def load_lengths(load: str, most: int) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request of the load `mixed` or `long`; `most` of both together, for small models."""
    if load == "long":
        return [(min(8000, most * 8 // 9), min(1000, most // 9))] * 40
    drawn = np.random.RandomState(0)
    inputs, outputs = drawn.randint(1, 1025, 400), drawn.randint(1, 1025, 400)
    return [(min(int(n), most // 2), min(int(m), most // 2)) for n, m in zip(inputs, outputs, strict=True)]


@dataclass(frozen=True)
class Pictures:
    """Beside each prompt so many pictures of random pixels, as JPEG."""

    count: int
    width: int
    height: int

    def draw(self, rng: np.random.Generator) -> list[dict[str, Any]]:
        """The parts of a message."""
        parts = []
        for _ in range(self.count):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (self.height, self.width, 3), np.uint8)).save(file, "jpeg")
            url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        return parts


class Prompts:
    """Random prompts of about the asked length, no two with a common beginning, so that no prefix cache flatters the figures.
    lengths: instead of drawn ones, (prompt tokens, output tokens) of each request; ids: prompts are token ids below that."""

    def __init__(
        self,
        prompt: Lengths,
        output: Lengths,
        scale: Scale,
        seed: int = 0,
        pictures: Pictures | None = None,
        lengths: Iterable[tuple[int, int]] | None = None,
        ids: int | None = None,
    ) -> None:
        self._prompt, self._output, self._scale, self._pictures, self._ids = prompt, output, scale, pictures, ids
        self._rng = np.random.default_rng(seed)
        self._lengths = iter(lengths) if lengths is not None else None

    def next(self) -> tuple[Content, int]:
        """(prompt, output tokens to ask for)."""
        if self._lengths is not None:
            prompt, output = next(self._lengths)
        else:
            prompt, output = self._prompt.draw(self._rng), self._output.draw(self._rng)
        if self._ids is not None:
            return self._rng.integers(FIRST_ID, self._ids, prompt).tolist(), output
        words = text(self._rng, self._scale.words(prompt))
        if self._pictures is None:
            return words, output
        return [*self._pictures.draw(self._rng), {"type": "text", "text": words}], output


def text(rng: np.random.Generator, words: int) -> str:
    """So many random words."""
    return " ".join(_WORDS[index] for index in rng.integers(0, len(_WORDS), words))


@dataclass
class Ledger:
    """Every request of a run: `sent` counts at the sender, `records` holds what ended."""

    sent: int = 0
    records: list[RequestResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def finished(self) -> list[RequestResult]:
        """Requests that got their whole answer."""
        return [record for record in self.records if record.end == "finished"]

    def add(self, record: RequestResult) -> None:
        """A request has ended."""
        self.records.append(record)

    def balance(self) -> dict[str, Any]:
        """sent = the sum over all ends, each number once: `conserved`, and the figures that show it."""
        ends = Counter(record.end for record in self.records)
        numbers = Counter(record.number for record in self.records)
        missing = sorted(set(range(self.sent)) - set(numbers))
        twice = sorted(number for number, times in numbers.items() if times > 1)
        known = sum(ends[end] for end in ENDS)
        conserved = known == self.sent and not missing and not twice
        return {"sent": self.sent, **{end: ends[end] for end in ENDS}, "missing": missing, "twice": twice, "conserved": conserved}


@asynccontextmanager
async def connected(target: Endpoint) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a bound on connections, and without a proxy: the load decides how many there are."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(target.timeout_s, connect=10.0)
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
        yield client


async def calibrate(client: httpx.AsyncClient, target: Endpoint, seed: int) -> Scale:
    """Send two requests of one token, which also warm up the way: what a word costs, by the server's own count."""
    rng = np.random.default_rng(seed)
    tokens = []
    for words in _PROBES:
        record = RequestResult(0, 1, time.perf_counter())
        await ask(client, target, record, text(rng, words))
        assert record.end == "finished", f"{target.url}: the first request ended as {record.end}: {record.detail}"
        assert record.prompt_tokens, f"{target.url} reports no usage: its tokens cannot be counted"
        tokens.append(record.prompt_tokens)
    per_word = max((tokens[1] - tokens[0]) / (_PROBES[1] - _PROBES[0]), 1e-3)
    return Scale(tokens[0] - _PROBES[0] * per_word, per_word)


class LoadRun:
    """One level against one target."""

    def __init__(self, client: httpx.AsyncClient, target: Endpoint, prompts: Prompts) -> None:
        self._client, self._target, self._prompts = client, target, prompts
        self._numbers = count()
        self.ledger = Ledger()
        self.over = False  # nothing more is sent

    async def run(self, level: Level) -> Ledger:
        """Until everything that was sent has ended."""
        began = time.perf_counter()
        await asyncio.gather(*(self._send_all(level, began) for _ in range(level.concurrency)))
        self.ledger.seconds = time.perf_counter() - began
        return self.ledger

    async def _send_all(self, level: Level, began: float) -> None:
        """What one client does."""
        while (
            not self.over
            and (level.requests is None or self.ledger.sent < level.requests)
            and (level.seconds is None or time.perf_counter() - began < level.seconds)
        ):
            prompt, tokens = self._prompts.next()
            record = RequestResult(next(self._numbers), tokens, time.perf_counter())
            self.ledger.sent += 1
            await ask(self._client, self._target, record, prompt)
            self.ledger.add(record)
