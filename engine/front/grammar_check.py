"""Whether a grammar can be kept, before its request is let in: compiled elsewhere, in bounded time, the verdict remembered."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable

from engine.errors import InvalidRequest, Overloaded
from engine.matcher import MAX_GRAMMAR_BYTES

QUEUE_S = 20.0  # behind others, whose time is not this grammar's
_REMEMBERED = 1024
_WAITING = 512
_AT_ONCE = 4


class GrammarCheck:
    """`complaint` says, in bounded time, what of a grammar cannot be kept; None: nothing. It is called in threads."""

    def __init__(self, complaint: Callable[[str], str | None]) -> None:
        self._complaint = complaint
        self._verdicts: OrderedDict[bytes, asyncio.Task[str | None]] = OrderedDict()
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def check(self, rules: str, param: str) -> None:
        """Raises InvalidRequest that says under `param` what of the grammar cannot be kept; Overloaded: too many others wait."""
        if len(rules) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{param}: its grammar is larger than {MAX_GRAMMAR_BYTES} bytes", param=param)
        key = hashlib.sha256(rules.encode()).digest()
        task = self._verdicts.get(key)
        if task is None or (task.done() and task.exception()):
            if sum(not task.done() for task in self._verdicts.values()) >= _WAITING:
                raise Overloaded("too many grammars are being compiled")
            task = self._verdicts[key] = asyncio.create_task(self._verdict(rules))
            if len(self._verdicts) > _REMEMBERED:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        if (wrong := await asyncio.shield(task)) is not None:
            raise InvalidRequest(f"{param}: {wrong}", param=param)

    async def _verdict(self, rules: str) -> str | None:
        try:
            async with asyncio.timeout(QUEUE_S):
                await self._turns.acquire()
        except TimeoutError:
            raise Overloaded("too many grammars are being compiled") from None
        try:
            return await asyncio.to_thread(self._complaint, rules)
        finally:
            self._turns.release()
