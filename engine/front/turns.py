"""Fair sharing among clients: bounded amounts, and places in turn."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class Share:
    """An amount of `most`. A client may hold up to what is left free: alone half, two a third each."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = Counter[str]()
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    def take(self, client: str, amount: int) -> bool:
        """False, without effect, if the client may not hold more."""
        if self._held[client] + amount > self.most - self._total:
            return False
        self._held[client] += amount
        self._total += amount
        return True

    def give_back(self, client: str, amount: int) -> None:
        self._total -= amount
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]


class Turns:
    """Places for work. A free one goes to the waiting client with the fewest, then to the longest
    waiting; the last only to a client without any."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._running = Counter[str]()
        self._waiting: dict[asyncio.Future[None], str] = {}

    async def run(self, client: str, work: Callable[[], Awaitable[T]], wait_s: float | None = None) -> T:
        """TimeoutError: no place within `wait_s`. A cancelled caller leaves at once; its work keeps
        the place, since threads cannot be stopped."""
        async with asyncio.timeout(wait_s):
            await self._wait(client)
        task = asyncio.ensure_future(work())
        task.add_done_callback(lambda _: self._end(client))
        return await asyncio.shield(task)

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        await self._wait(client)
        try:
            yield
        finally:
            self._end(client)

    async def _wait(self, client: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = client
        self._pass_on()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:  # the turn came in the same moment
                self._end(client)
            raise

    def _end(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._pass_on()

    def _pass_on(self) -> None:
        while waiting := [item for item in self._waiting.items() if not item[0].done()]:
            turn, client = min(waiting, key=lambda item: self._running[item[1]])
            free = self._places - self._running.total()
            is_kept = free == 1 < self._places and self._running[client] > 0
            if free < 1 or is_kept:
                return
            del self._waiting[turn]
            self._running[client] += 1
            turn.set_result(None)
