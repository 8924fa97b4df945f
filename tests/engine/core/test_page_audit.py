"""Page accounting: nothing wrong in random worlds; each planted fault is found and named."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.core.pages import PagePool
from engine.core.scheduler import Scheduler, SchedulerConfig
from tests.support.engine.kvmachine import KVMachine
from tests.support.engine.page_audit import complaints
from tests.support.engine.scheduling import request_of, step, two_groups
from tests.support.engine.worlds import World, simulate

pytestmark = pytest.mark.pure

GROUPS = two_groups(9)
PAGES = (30, 40)


def test_sound_books_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In random worlds, with and without a cache, the page accounting is right after every plan."""
    seen = 0
    honest = Scheduler.schedule

    def audited(self: Scheduler) -> object:
        nonlocal seen
        plan = honest(self)
        seen += plan is not None
        assert not list(complaints(self.requests))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", audited)
    for seed in range(30):
        world = World(seed)
        world.config = replace(world.config, cache_share=1.0 if seed % 2 else None)
        simulate(world)
    assert seen > 1000


def running() -> Scheduler:
    """Three sequences that began alike, decoding."""
    config = SchedulerConfig(GROUPS, PAGES, 4, 100, 32, cache_share=1.0)
    scheduler = Scheduler(config)
    machine = KVMachine(GROUPS, PAGES, 4, 100, lambda prefix, position, seed: 50 + prefix % 40)
    for number in range(3):
        scheduler.requests.add(request_of(number, [*range(16), 7], 60))
    for _ in range(12):
        step(scheduler, machine)
    assert len(scheduler.requests.running) == 3
    assert any(scheduler.allocator.pools[1].holders[page] > 1 for page in range(1, PAGES[1]))
    return scheduler


def full(scheduler: Scheduler) -> PagePool:
    return scheduler.allocator.pools[1]


def last_page(scheduler: Scheduler, index: int = 0) -> int:
    return scheduler.requests.running[index].runs[1].pages[-1]


def free_twice(scheduler: Scheduler) -> None:
    full(scheduler)._free.append(full(scheduler)._free[0])


def freed(scheduler: Scheduler) -> None:
    full(scheduler)._free.append(last_page(scheduler))


def miscounted(scheduler: Scheduler) -> None:
    full(scheduler).holders[last_page(scheduler)] += 1


def stolen(scheduler: Scheduler) -> None:
    scheduler.requests.running[1].runs[1].pages[-1] = last_page(scheduler)


def moved(scheduler: Scheduler) -> None:
    pages = scheduler.requests.running[1].runs[1].pages
    pages[0], pages[-1] = pages[-1], pages[0]


def foreign(scheduler: Scheduler) -> None:
    scheduler.requests.running[0].runs[1].pages[-1] = 77


def lost(scheduler: Scheduler) -> None:
    full(scheduler)._free.pop()


def dropped(scheduler: Scheduler) -> None:
    pages = scheduler.requests.running[0].runs[1].pages
    full(scheduler).give([pages.pop()])


def written_while_shared(scheduler: Scheduler) -> None:
    scheduler.requests.running[0].low = 2


SPOILED: dict[Callable[[Scheduler], None], str] = {
    free_twice: r"page \d+ is 2 times among the free pages",
    freed: r"page \d+ is free, and held",
    miscounted: r"page \d+ has 2 holders counted, and 1 sequences hold it",
    stolen: r"page \d+ has 1 holders counted, and 2 sequences hold it",
    moved: r"page \d+ is slot \d's entry 0 and slot \d's entry \d",
    foreign: r"page 77 is held, of a pool of 40",
    lost: r"\d+ free, \d+ held and \d+ idle pages .* of 39",
    dropped: r"slot \d has pages up to position \d+, and is planned up to \d+",
    written_while_shared: r"page \d+, entry \d, is shared and slot \d still writes to it",
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_each_fault_is_found(spoil: Callable[[Scheduler], None]) -> None:
    """A complaint names the group, the page and who holds it."""
    scheduler = running()
    assert not list(complaints(scheduler.requests))
    spoil(scheduler)
    assert re.match(f"group full: {SPOILED[spoil]}", next(complaints(scheduler.requests)))
