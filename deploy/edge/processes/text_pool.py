"""Threads for text work: a long prompt must not delay every stream."""

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deploy.edge.bodies.raw_json import ON_LOOP_BYTES, TEXT_BYTES, check_large, check_strings

TEXT_THREADS = 2

T = TypeVar("T")


class TextPool:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def read(self, reader: Callable[[bytes], T], body: bytes) -> T:
        body = body.removeprefix(BOM_UTF8)
        if len(body) <= ON_LOOP_BYTES:
            return reader(body)
        if len(body) > TEXT_BYTES:
            await self.run(lambda: check_large(body))
        check_strings(body)
        return await self.run(lambda: reader(body))
