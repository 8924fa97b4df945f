"""Drives a load: who is sent when, and the ledger that must balance afterwards.

    closed   `concurrency` clients, each sends its next request when its last one has ended
    open     Poisson arrivals of `rate` a second, however long the answers take: what users do

What is sent is counted where it is sent, and what ended where it ended; `Ledger.balance` holds one against the other.
"""

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import numpy as np

from deploy.load.problem import LoadError
from deploy.load.request import ENDS, Endpoint, RequestResult, ask, own

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work number night point home water room mother area money story fact month"
)
_WORDS = _TEXT.split()
_PROBES = (4, 36)  # words of the two first requests
_TICK_S = 0.02


@dataclass(frozen=True)
class Level:
    """One load: exactly one of `concurrency` and `rate` (requests a second); ends after `requests`, or after `seconds`."""

    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency else f"rate {self.rate:g}/s"


@dataclass(frozen=True)
class Lengths:
    """Tokens, drawn evenly from [low, high]."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True)
class Scale:
    """How many tokens a prompt of so many words has: `base` for what the template adds, `per_word` for each word."""

    base: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int) -> int:
        """Words for a prompt of about `tokens` tokens; at least one."""
        return max(1, round((tokens - self.base) / self.per_word))


class Prompts:
    """Random prompts of about the asked length, no two with a common beginning, so that no prefix cache flatters the figures."""

    def __init__(self, lengths: Lengths, output: Lengths, scale: Scale, seed: int) -> None:
        self._lengths, self._output, self._scale = lengths, output, scale
        self._rng = np.random.default_rng(seed)

    def next(self) -> tuple[str, int]:
        """(prompt, output tokens to ask for)."""
        words = self._scale.words(self._lengths.draw(self._rng))
        return text(self._rng, words), self._output.draw(self._rng)

    def wait(self, rate: float) -> float:
        """Seconds to the next Poisson arrival."""
        return float(self._rng.exponential(1.0 / rate))


def text(rng: np.random.Generator, words: int) -> str:
    """So many random words."""
    return " ".join(_WORDS[index] for index in rng.integers(0, len(_WORDS), words))


@dataclass
class Ledger:
    """Every request of a run. `sent` counts at the sender, `records` holds what ended; `lag`: how late the client itself was, s."""

    sent: int = 0
    records: list[RequestResult] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, record: RequestResult) -> None:
        """A request has ended."""
        self.records.append(record)

    def balance(self) -> dict[str, Any]:
        """sent = the sum over all ends, each number once: `conserved`, and the figures that show it."""
        ends = Counter(record.end or "unknown" for record in self.records)
        numbers = Counter(record.number for record in self.records)
        missing = sorted(set(range(self.sent)) - set(numbers))
        twice = sorted(number for number, times in numbers.items() if times > 1)
        known = sum(ends[end] for end in ENDS)
        conserved = known == self.sent and not missing and not twice
        return {"sent": self.sent, **{end: ends[end] for end in ENDS}, "missing": missing, "twice": twice, "conserved": conserved}


@asynccontextmanager
async def connected(target: Endpoint) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a bound on connections: the load decides how many there are."""
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(target.timeout_s, connect=10.0)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=not own(target.url)) as client:
        yield client


async def calibrate(client: httpx.AsyncClient, target: Endpoint, seed: int) -> Scale:
    """Two requests of one token, which also warm up the way: what a word costs, by the server's own count.

    LoadError when the endpoint does not answer them, with what it said.
    """
    rng, found = np.random.default_rng(seed), []
    for words in _PROBES:
        record = RequestResult(0, 1, time.perf_counter())
        await ask(client, target, record, text(rng, words))
        if record.end != "finished":
            raise LoadError(f"{target.address}: the first request ended as {record.end}: {record.detail}")
        if not record.prompt_tokens:
            raise LoadError(f"{target.address} reports no usage: its prompt and output tokens cannot be counted")
        found.append(record.prompt_tokens)
    per_word = max((found[1] - found[0]) / (_PROBES[1] - _PROBES[0]), 1e-3)
    return Scale(found[0] - _PROBES[0] * per_word, per_word)


class LoadRun:
    """One level against one target. `ended` is called at each end."""

    def __init__(self, client: httpx.AsyncClient, target: Endpoint, prompts: Prompts, ended: Callable[[], None]) -> None:
        self._client, self._target, self._prompts, self._ended = client, target, prompts, ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._bugs: list[BaseException] = []
        self._numbers = count()
        self.ledger = Ledger()

    async def run(self, level: Level) -> Ledger:
        """Until everything that was sent has ended. SIGINT stops the sending and cancels what is open."""
        began = time.perf_counter()
        lag = asyncio.create_task(self._watch_lag())
        with _interruptible(self.interrupt):
            await (self._closed(level, began) if level.concurrency else self._open(level, began))
            await self._drain()
        lag.cancel()
        self.ledger.seconds = time.perf_counter() - began
        if self._bugs:
            raise self._bugs[0]
        return self.ledger

    def interrupt(self) -> None:
        """Send no more, and cancel what is open: it ends as `cancelled`."""
        self._stop.set()
        for task in self._tasks:
            task.cancel()

    @property
    def interrupted(self) -> bool:
        return self._stop.is_set()

    def _more(self, level: Level, began: float) -> bool:
        if self._stop.is_set() or (level.requests is not None and self.ledger.sent >= level.requests):
            return False
        return level.seconds is None or time.perf_counter() - began < level.seconds

    async def _closed(self, level: Level, began: float) -> None:
        async def client() -> None:
            while self._more(level, began):
                await asyncio.wait({self._send()})

        assert level.concurrency is not None
        await asyncio.gather(*(client() for _ in range(level.concurrency)))

    async def _open(self, level: Level, began: float) -> None:
        """Arrivals are laid out on the clock: a late one does not put off those behind it."""
        assert level.rate is not None
        due = began
        while self._more(level, began):
            self.ledger.lag.append(max(0.0, time.perf_counter() - due))
            self._send()
            due += self._prompts.wait(level.rate)
            await _until(self._stop, due)

    def _send(self) -> asyncio.Task[None]:
        """Count a request, and start it."""
        prompt, tokens = self._prompts.next()
        record = RequestResult(next(self._numbers), tokens, time.perf_counter())
        self.ledger.sent += 1
        task = asyncio.create_task(ask(self._client, self._target, record, prompt))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._book(done, record))
        return task

    def _book(self, task: asyncio.Task[None], record: RequestResult) -> None:
        """A request has ended, whichever way: a task that was cancelled before it ran has an end, too."""
        self._tasks.discard(task)
        if task.cancelled():
            record.end = "cancelled"
        elif (bug := task.exception()) is not None:
            self._bugs.append(bug)
        self.ledger.add(record)
        self._ended()

    async def _drain(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _watch_lag(self) -> None:
        """A client that is late itself measures itself: its loop's delay is part of the report."""
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.ledger.lag.append(max(0.0, time.perf_counter() - due))


async def _until(stop: asyncio.Event, due: float) -> None:
    """Sleep until `due`, or until `stop` is set."""
    try:
        async with asyncio.timeout(max(0.0, due - time.perf_counter())):
            await stop.wait()
    except TimeoutError:
        return


@contextmanager
def _interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT calls `stop`, where signals can be taken: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
