"""Awaiting with a bound that costs nothing where nothing is awaited: most writes end at once, and would pay for a timer each."""

import asyncio
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any


async def bounded(work: Awaitable[None], timeout_s: float) -> None:
    """Await `work`; a timer is set only once it has to wait. TimeoutError after `timeout_s`."""
    await finish(start(work), timeout_s)


async def finish(rest: Awaitable[None] | None, timeout_s: float) -> None:
    """Await what `start` has left; TimeoutError after `timeout_s`."""
    if rest is not None:
        async with asyncio.timeout(timeout_s):
            await rest


def start(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run `work` up to where it has to wait, in a task or not; what is left of it is for a task to await. None: it has ended."""
    steps = work.__await__()
    try:
        return _rest(steps, next(steps))
    except StopIteration:
        return None


@coroutine
def _rest(steps: Generator[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """What is left of `steps`, which has begun and waits for `awaited`."""
    rest = steps
    try:
        yield awaited
    except BaseException as error:  # noqa: BLE001 - a cancellation, say: it is for whoever waits inside
        try:
            rest = _rest(steps, steps.throw(error))
        except StopIteration:
            return
    yield from rest
