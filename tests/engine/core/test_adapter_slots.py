"""Slots of adapters: who gets one, who makes room, and what waits meanwhile."""

import random

import pytest

from engine.adapter_slots import AdapterSlots
from engine.adapters import NO_ADAPTER
from engine.core.scheduler import Scheduler
from engine.protocol import SamplingParams
from tests.support.engine.kvmachine import KVMachine
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, two_groups

pytestmark = pytest.mark.pure

GROUPS = two_groups(9)
PAGES = (60, 90)


def test_the_least_recently_used_makes_room() -> None:
    """Of three adapters in two slots: the one that was used last stays; one that is being placed is asked for once."""
    slots = AdapterSlots(2, 3)
    assert [slots.is_ready(adapter) for adapter in (NO_ADAPTER, 0, 1, 2)] == [True, True, True, False]
    slots.use(0)
    assert slots.want(2, set())
    assert slots.want(2, set())
    assert slots.orders(()).places == [(2, 1)]
    assert not slots.is_ready(2)
    slots.placed(2)
    assert slots.is_ready(2)
    assert not slots.is_ready(1)
    assert slots.use(2) == 1
    assert slots.use(0) == 0


def test_a_slot_in_use_is_kept() -> None:
    """Nobody gets it, however long nobody else has asked for it."""
    slots = AdapterSlots(1, 2)
    assert not slots.want(1, {0})
    assert not slots.orders(())
    assert slots.want(1, set())


def test_an_adapter_leaves_when_its_requests_have_ended() -> None:
    """New requests are refused at once; the ranks forget it after the last one, and its slot is free."""
    slots = AdapterSlots(1, 1)
    slots.remove(0)
    assert not slots.is_served(0)
    assert slots.is_ready(0)
    assert slots.orders({0}).drops == []
    assert slots.orders({NO_ADAPTER}).drops == [0]
    assert not slots.is_ready(0)
    slots.add(1)
    assert slots.want(1, set())


class World:
    """A scheduler with a machine, whose replica places adapters `late` turns after they were asked for."""

    def __init__(self, slots: int, loaded: int, late: int) -> None:
        config = SchedulerConfig(GROUPS, PAGES, 4, 96, 16, adapters=loaded, max_adapters=slots)
        self.scheduler: Scheduler = scheduler_of(config)
        self.machine = KVMachine(GROUPS, PAGES, 4, 96, lambda prefix, position, seed: 7)
        self.late = late
        self.held: dict[int, int] = {slot: slot for slot in range(min(slots, loaded))}  # adapter by slot
        self.owner: dict[int, int] = {}  # adapter that each sequence's slot on the device was given, by request
        self.placing: list[tuple[int, int, int]] = []
        self.turn = 0
        self.wrong = 0

    def step(self) -> None:
        """A turn of the core's loop."""
        self.turn += 1
        requests = self.scheduler.requests
        while self.scheduler.in_flight < 2 and (plan := self.scheduler.schedule()) is not None:
            by_slot = {sequence.slot: sequence for sequence in requests.running}
            for admission in plan.admissions:
                asked = by_slot[admission.slot].adapter
                given = NO_ADAPTER if admission.adapter == NO_ADAPTER else self.held[admission.adapter]
                self.wrong += given != asked
            self.machine.submit(plan)
        assert not self.scheduler.stuck
        for adapter, slot in requests.adapter_orders().places:
            running = {sequence.adapter for sequence in requests.running}
            self.wrong += self.held.get(slot, NO_ADAPTER) in running - {NO_ADAPTER}
            self.held[slot] = NO_ADAPTER - 1  # half of each
            self.placing.append((self.turn + self.late, adapter, slot))
        if self.scheduler.in_flight:
            self.scheduler.commit(self.machine.result())
        for entry in [entry for entry in self.placing if entry[0] <= self.turn]:
            self.placing.remove(entry)
            self.held[entry[2]] = entry[1]
            requests.adapters.placed(entry[1])


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_request_ends_with_its_own_adapter(slots: int) -> None:
    """Eighty requests of six adapters and of none, with few slots: all end; each is admitted with the slot that has its adapter; no
    slot is overwritten while a running sequence uses it."""
    world = World(slots, 6, late=3)
    rng = random.Random(slots)
    for number in range(80):
        prompt = [10 + rng.randrange(7) for _ in range(rng.randrange(2, 40))]
        params = SamplingParams(max_tokens=rng.randrange(1, 12))
        world.scheduler.requests.add(request_of(number, prompt, params, adapter=rng.randrange(-1, 6)))
    while world.scheduler.requests.unfinished:
        world.step()
        assert world.turn < 4000
    assert world.wrong == 0
    assert world.scheduler.requests.counters.finished == 80


def test_a_taken_slot_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: slots in use are taken, too."""
    taken = AdapterSlots.want
    monkeypatch.setattr(AdapterSlots, "want", lambda self, adapter, kept: taken(self, adapter, set()))
    world = World(1, 2, late=1)
    for number in range(8):
        world.scheduler.requests.add(request_of(number, [11] * 20, SamplingParams(max_tokens=9), adapter=number % 2))
    for _ in range(200):
        try:
            world.step()
        except (KeyError, AssertionError):
            return
    assert world.wrong > 0


def test_others_run_while_an_adapter_is_placed() -> None:
    """A request whose adapter takes a hundred turns to come holds up nobody, and runs then."""
    world = World(1, 2, late=100)
    add = world.scheduler.requests.add
    add(request_of(1, [11] * 9, SamplingParams(max_tokens=3), adapter=1))
    add(request_of(2, [12] * 9, SamplingParams(max_tokens=3)))
    while 2 in world.scheduler.requests.unfinished:
        world.step()
    assert world.turn < 20
    while world.scheduler.requests.unfinished:
        world.step()
    assert 100 < world.turn < 130


def test_a_request_of_an_adapter_that_left_is_refused() -> None:
    """The client may have asked before it knew."""
    world = World(1, 1, late=1)
    world.scheduler.requests.adapters.remove(0)
    assert world.scheduler.requests.add(request_of(1, [11], 1, adapter=0)) is None
    (output,) = world.scheduler.requests.drain()
    assert output.code == "model_not_found"
