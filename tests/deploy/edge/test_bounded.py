"""A bound on a wait that costs nothing where there is no wait."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from deploy.edge.http.bounded import bounded

pytestmark = pytest.mark.pure

BOUND_S = 20.0  # a machine that stops for a moment does not reach it


async def nothing() -> None:
    """Ends at once."""


async def turns() -> None:
    """Waits three times, shortly."""
    for _ in range(3):
        await asyncio.sleep(0.001)


async def failing() -> None:
    """Waits, then raises."""
    await asyncio.sleep(0)
    raise KeyError("x")


async def endless() -> None:
    """Waits for what never comes."""
    await asyncio.Event().wait()


def timers(work: Callable[[], Awaitable[None]]) -> int:
    """How many timers `bounded` sets for `work`."""

    async def main() -> int:
        loop, found = asyncio.get_running_loop(), []
        real = loop.call_at
        loop.call_at = lambda *args, **kwargs: found.append(args) or real(*args, **kwargs)  # type: ignore[assignment, method-assign]
        await bounded(work(), BOUND_S)
        return len(found)

    return asyncio.run(main())


def test_a_timer_is_set_only_for_a_wait() -> None:
    """None for work that ends at once, where asyncio.timeout sets one; and one, beside its own three, for work that waits."""

    async def usual() -> None:
        async with asyncio.timeout(BOUND_S):
            await nothing()

    assert timers(nothing) == 0
    assert timers(turns) == 4
    assert timers(usual) == 1


def test_what_it_waits_for_ends_as_it_does() -> None:
    """Its error is raised; what takes too long is a TimeoutError, and has been cancelled."""
    ended = []

    async def watched() -> None:
        try:
            await endless()
        finally:
            ended.append(True)

    with pytest.raises(KeyError):
        asyncio.run(bounded(failing(), BOUND_S))
    with pytest.raises(TimeoutError):
        asyncio.run(bounded(watched(), 0.01))
    assert ended == [True]


def test_a_cancellation_reaches_the_work() -> None:
    """Whoever is cancelled while waiting so cancels what they wait for, which may still wait for something of its own."""
    ended = []

    async def slow_to_end() -> None:
        try:
            await endless()
        finally:
            await asyncio.sleep(0.001)
            ended.append(True)

    async def main() -> None:
        task = asyncio.create_task(bounded(slow_to_end(), 10))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [True]
