"""Checks a grammar before its request is admitted, in bounded time."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable

from engine.errors import InvalidRequest, Overloaded
from engine.front.turns import Share, Turns
from engine.matcher import MAX_GRAMMAR_BYTES

QUEUE_S = 20.0  # for a turn, while other grammars are compiled
_REMEMBERED = 1024
_WAITING = 512
_AT_ONCE = 4


class GrammarCheck:
    """`complaint` says why a grammar is invalid, or None. It runs in threads, clients in turn."""

    def __init__(self, complaint: Callable[[str], str | None]) -> None:
        self._complaint = complaint
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._tasks: dict[tuple[str, bytes], asyncio.Task[str | None]] = {}
        self._turns = Turns(_AT_ONCE)
        self._waiting = Share(_WAITING)

    async def check(self, rules: str, param: str, client: str) -> None:
        """InvalidRequest names `param`. Overloaded: too many wait."""
        if len(rules) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{param}: its grammar is larger than {MAX_GRAMMAR_BYTES} bytes", param=param)
        key = hashlib.sha256(rules.encode()).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            wrong = self._verdicts[key]
        else:
            wrong = await asyncio.shield(self._task(rules, key, client))
        if wrong is not None:
            raise InvalidRequest(f"{param}: {wrong}", param=param)

    def _task(self, rules: str, key: bytes, client: str) -> asyncio.Task[str | None]:
        """The client's own compilation: another client's may come late."""
        if (client, key) not in self._tasks:
            if not self._waiting.take(client, 1):
                raise Overloaded("too many grammars are being compiled")
            task = self._tasks[client, key] = asyncio.create_task(self._verdict(rules, key, client))
            task.add_done_callback(lambda _: self._forget(client, key))
        return self._tasks[client, key]

    def _forget(self, client: str, key: bytes) -> None:
        del self._tasks[client, key]
        self._waiting.give_back(client, 1)

    async def _verdict(self, rules: str, key: bytes, client: str) -> str | None:
        try:
            wrong = await self._turns.run(client, lambda: asyncio.to_thread(self._complaint, rules), QUEUE_S)
        except TimeoutError:
            raise Overloaded("too many grammars are being compiled") from None
        self._verdicts[key] = wrong
        if len(self._verdicts) > _REMEMBERED:
            self._verdicts.popitem(last=False)
        return wrong
