"""Whether a grammar can be kept, before its request is let in: compiled off the loop, in bounded time, the verdict remembered."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

from engine.errors import InvalidRequest, Overloaded
from engine.matcher import MAX_GRAMMAR_BYTES, Vocabulary

COMPILE_S = 2.0
QUEUE_S = 20.0  # behind others, whose time is not this grammar's
_REMEMBERED = 1024
_WAITING = 1024
_THREADS = 4  # one compiles in its turn; the others may still be at grammars that took too long


class GrammarCheck:
    """Compiles one grammar at a time, once `load` has made the vocabulary."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._vocabulary: Future[Vocabulary] = self._pool.submit(load)
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # what is wrong with a grammar; None: nothing
        self._waiting = 0
        self._turn = asyncio.Lock()

    async def check(self, rules: str, param: str) -> None:
        """Raises InvalidRequest that says under `param` what of the grammar cannot be kept; Overloaded: too many others wait."""
        if len(rules) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{param}: its grammar is larger than {MAX_GRAMMAR_BYTES} bytes", param=param)
        key = hashlib.sha256(rules.encode()).digest()
        if key not in self._verdicts:
            async with self._in_turn() as vocabulary:
                if key not in self._verdicts:  # another has asked for the same
                    self._verdicts[key] = await self._compiled(vocabulary, rules, param)
                    if len(self._verdicts) > _REMEMBERED:
                        self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        if (wrong := self._verdicts[key]) is not None:
            raise InvalidRequest(f"{param}: {wrong}", param=param)

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[Vocabulary]:
        """Wait until no other grammar is compiled, those that took too long aside. Overloaded: the queue is too long."""
        if self._waiting >= _WAITING:
            raise Overloaded("too many grammars are being compiled")
        self._waiting += 1
        try:
            async with asyncio.timeout(QUEUE_S):
                vocabulary = await asyncio.shield(asyncio.wrap_future(self._vocabulary))
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded("too many grammars are being compiled") from None
        finally:
            self._waiting -= 1
        try:
            yield vocabulary
        finally:
            self._turn.release()

    async def _compiled(self, vocabulary: Vocabulary, rules: str, param: str) -> str | None:
        compiling = self._pool.submit(vocabulary.complaint, rules)
        done, _ = await asyncio.wait([asyncio.wrap_future(compiling)], timeout=COMPILE_S)
        if done:
            return compiling.result()
        if compiling.cancel():
            raise Overloaded("other grammars take too long to compile")
        raise InvalidRequest(f"{param}: compiling it takes longer than {COMPILE_S:g} s", param=param)
