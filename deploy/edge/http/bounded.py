"""Awaiting with a timeout, without a timer if nothing has to wait."""

import asyncio
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any


async def bounded(work: Awaitable[None], timeout_s: float) -> None:
    """Await `work`; TimeoutError after `timeout_s`."""
    await finish(start(work), timeout_s)


async def finish(rest: Awaitable[None] | None, timeout_s: float) -> None:
    if rest is not None:
        async with asyncio.timeout(timeout_s):
            await rest


def start(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run up to the first wait; return the rest to await, or None if it has ended."""
    steps = work.__await__()
    try:
        return _rest(steps, next(steps))
    except StopIteration:
        return None


@coroutine
def _rest(steps: Generator[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    rest = steps
    try:
        yield awaited
    except BaseException as error:  # noqa: BLE001 - `steps` handles it, for example a cancellation
        try:
            rest = _rest(steps, steps.throw(error))
        except StopIteration:
            return
    yield from rest
