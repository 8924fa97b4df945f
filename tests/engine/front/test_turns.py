"""What clients share: nobody takes all of it, and whoever comes has a turn beside a client with much."""

import asyncio

import pytest

from engine.front.turns import Share, Turns

pytestmark = pytest.mark.pure


def test_a_client_has_as_much_as_is_free() -> None:
    """Alone half, and what it gives back others may have. Planted: an amount that is taken in one step may be all that there is."""
    share = Share(12)
    assert share.take("one", 4)
    assert share.take("one", 2)
    assert not share.take("one", 1)
    assert share.take("two", 3)
    assert not share.take("two", 1)
    assert share.take("three", 3)
    assert not share.take("four", 1)
    share.give_back("one", 6)
    assert share.take("four", 6)
    assert share.total == 12
    assert Share(12).take("one", 12)


def order(places: int, work: list[tuple[str, str]]) -> list[str]:
    """In which order work begins, given by client and name, all of it at once; each takes one turn of the loop more."""
    begun = []

    async def main() -> None:
        shared = Turns(places)

        async def one(name: str) -> None:
            begun.append(name)
            for _ in range(5):
                await asyncio.sleep(0)

        await asyncio.gather(*(shared.run(client, lambda name=name: one(name)) for client, name in work))

    asyncio.run(main())
    return begun


MANY = [("many", f"m{number}") for number in range(8)]


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("places", [2, 3])
def test_a_newcomer_has_a_turn_at_once(places: int, fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a client whose work waits, and in its own order. Planted: clients that all have one name."""
    work = [*MANY, ("few", "f0"), ("few", "f1")]
    if fault:
        work = [("many", name) for _, name in work]
    begun = order(places, work)
    assert (begun.index("f0") < places) is not fault
    assert (begun.index("f1") < 2 * places) is not fault
    assert [name for name in begun if name[0] == "m"] == [name for _, name in MANY]


def test_a_client_alone_leaves_one_place() -> None:
    """Of several; where there is only one, it has that."""

    async def most(places: int) -> int:
        running = largest = 0
        shared = Turns(places)

        async def one() -> None:
            nonlocal running, largest
            running += 1
            largest = max(largest, running)
            await asyncio.sleep(0)
            running -= 1

        await asyncio.gather(*(shared.run("one", one) for _ in range(9)))
        return largest

    assert [asyncio.run(most(places)) for places in (1, 2, 4)] == [1, 1, 3]


def test_who_leaves_gives_no_place_away_too_early() -> None:
    """One that waits leaves the queue. Work of one that has begun goes on in its place, and no other begins before it ends."""

    async def main() -> None:
        shared, ends = Turns(1), asyncio.Event()
        running = asyncio.create_task(shared.run("one", ends.wait))
        waiting = asyncio.create_task(shared.run("two", ends.wait))
        await asyncio.sleep(0)
        for task in (waiting, running):
            task.cancel()
        await asyncio.gather(waiting, running, return_exceptions=True)
        with pytest.raises(TimeoutError):
            await shared.run("three", ends.wait, 0.02)
        ends.set()
        assert await shared.run("three", ends.wait, 1)
        assert not shared._waiting
        assert not shared._running

    asyncio.run(main())


def test_a_place_is_given_back() -> None:
    """Whatever happens to who holds it."""

    async def main() -> None:
        shared = Turns(1)
        with pytest.raises(ZeroDivisionError):
            async with shared.place("one"):
                raise ZeroDivisionError
        async with asyncio.timeout(1), shared.place("two"):
            pass

    asyncio.run(main())
