"""What clients share: a bounded amount of something, and places that they have in turn.

No client can take all of it, and what a client does not use the others may have.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class Share:
    """An amount of `most`. A client may hold as much as is left free: alone it gets half, two clients get a third each.

    A client that holds nothing may take all that is free.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._held = Counter[str]()
        self._total = 0

    @property
    def total(self) -> int:
        """What all clients hold."""
        return self._total

    def take(self, client: str, amount: int) -> bool:
        """Give the client so much more; False, and nothing changes, if it may not have it."""
        if self._held[client] + amount > self.most - self._total:
            return False
        self._held[client] += amount
        self._total += amount
        return True

    def give_back(self, client: str, amount: int) -> None:
        """Take so much back from the client."""
        self._total -= amount
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]


class Turns:
    """Places that clients have in turn, each for one piece of work.

    A free place goes to the waiting client that has the fewest, and among those to the one that has waited longest. The last free
    place is for a client that has none, so a newcomer need not wait until another client's work ends.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._running = Counter[str]()
        self._waiting: dict[asyncio.Future[None], str] = {}

    async def run(self, client: str, work: Callable[[], Awaitable[T]], wait_s: float | None = None) -> T:
        """Return what `work` returns. TimeoutError: no place was free for the client within `wait_s`.

        A caller that is cancelled leaves at once. Work that has begun goes on then, and keeps its place: threads cannot be stopped.
        """
        async with asyncio.timeout(wait_s):
            await self._wait(client)
        task = asyncio.ensure_future(work())
        task.add_done_callback(lambda _: self._end(client))
        return await asyncio.shield(task)

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """Hold a place of the client's, once it has its turn."""
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
        """Give free places to those that wait."""
        while waiting := [item for item in self._waiting.items() if not item[0].done()]:
            turn, client = min(waiting, key=lambda item: self._running[item[1]])
            free = self._places - self._running.total()
            is_kept = free == 1 < self._places and self._running[client] > 0
            if free < 1 or is_kept:
                return
            del self._waiting[turn]
            self._running[client] += 1
            turn.set_result(None)
