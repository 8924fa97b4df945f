"""Quotas and fair shares over replicas, simulated: four replicas and their centre on a clock that the test moves."""

import asyncio
import heapq
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from deploy.edge.admission_control import AHEAD_MOST, AdmissionControl
from deploy.edge.http.http_errors import QuotaExceeded
from deploy.edge.keys import quotas
from deploy.edge.keys.key_file import Quota
from deploy.edge.keys.replica_quotas import CentreLost, ReplicaQuotas, RequestGrant
from deploy.edge.keys.shared_use import SILENT_S, SharedUse
from engine.front.stream import Clock
from tests.support.edge.ready_engine import ReadyEngine

pytestmark = pytest.mark.pure

REPLICAS = 4
NOW = [0.0]
APP = "nano"


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    NOW[0] = 0.0
    monkeypatch.setattr(quotas, "monotonic", lambda: NOW[0])


class Wire:
    """The way of one replica to the centre."""

    def __init__(self, fleet: "Fleet", name: str) -> None:
        self._fleet = fleet
        self._name = name

    async def ask(self, method: str, *args: object) -> Any:
        await asyncio.sleep(0)
        if self._fleet.centre is None:
            raise CentreLost
        return getattr(self._fleet.centre, method)(self._name, *args)

    def tell(self, method: str, *args: object) -> None:
        if self._fleet.centre is not None:
            getattr(self._fleet.centre, method)(self._name, *args)


class Fleet:
    """Replicas that share one holder's quota, or (planted) do not."""

    def __init__(self, quota: Quota, *, shared: bool = True) -> None:
        self.centre: SharedUse | None = SharedUse(lambda: NOW[0])
        wires = [Wire(self, f"r{number}") if shared else None for number in range(REPLICAS)]
        self.replicas = [ReplicaQuotas(wire) for wire in wires]
        self.shared = shared
        for replica in self.replicas:
            replica.change({"alice": quota})

    async def second(self) -> None:
        """Each replica beats, and a second passes."""
        NOW[0] += 1.0
        for replica in self.replicas if self.shared else ():
            await replica.beat(APP, {})


async def begin(replica: ReplicaQuotas) -> RequestGrant | None:
    """A request of 10 tokens, or None if it is refused."""
    try:
        grant = await replica.open("alice")
    except QuotaExceeded:
        return None
    try:
        await grant.reserve(10)
    except QuotaExceeded:
        grant.close(0)
        return None
    return grant


async def flood(fleet: Fleet, seconds: int, weights: list[int], each_second: Callable[[int], None] = lambda _: None) -> int:
    """Requests let in, of 40 that come each second at once to replicas drawn by `weights`; each uses 10 tokens."""
    rng = random.Random(3)
    begun = 0
    for second in range(seconds):
        each_second(second)
        grants = await asyncio.gather(*(begin(replica) for replica in rng.choices(fleet.replicas, weights, k=40)))
        for grant in filter(None, grants):
            grant.close(10)
            begun += 1
        await fleet.second()
    return begun


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [1, 0, 0, 0], [7, 1, 1, 1]])
@pytest.mark.parametrize("quota", [Quota(requests=60), Quota(tokens=600), Quota(requests=60, tokens=900)])
def test_replicas_give_one_quota(quota: Quota, weights: list[int]) -> None:
    """Wherever its requests come, in two minutes a holder begins 180 within 10 %: a minute's amount at once, then what fills up.
    Planted: replicas that do not share."""
    async def begun(*, shared: bool) -> int:
        fleet = Fleet(quota, shared=shared)
        await fleet.second()
        return await flood(fleet, 120, weights)

    assert asyncio.run(begun(shared=True)) == pytest.approx(180, rel=0.1)
    if weights.count(0) == 0:
        assert asyncio.run(begun(shared=False)) > 1.4 * 180


def test_no_more_are_open_at_once_than_one_replica_would_have() -> None:
    """Of eight that may be open, eight are, whichever replicas they came to; a replica that dies gives its own back."""
    async def scene() -> None:
        fleet = Fleet(Quota(concurrent=8))
        await fleet.second()
        grants = await asyncio.gather(*(begin(replica) for replica in fleet.replicas * 10))
        held = [grant for grant in grants if grant is not None]
        assert len(held) == 8
        assert await begin(fleet.replicas[0]) is None
        held[0].close(0)
        again = await begin(fleet.replicas[3])
        assert again is not None
        lost = sum(grant.quotas is fleet.replicas[0] for grant in [*held[1:], again])
        assert 0 < lost < 8
        del fleet.replicas[0]
        for _ in range(int(SILENT_S) + 2):
            await fleet.second()
        assert sum([await begin(fleet.replicas[0]) is not None for _ in range(10)]) == lost

    asyncio.run(scene())


def test_without_the_centre_each_has_its_part() -> None:
    """The centre dies for a minute and comes back empty: a holder has at most two minutes' amount more than its quota, and what was
    open is counted by the new one."""
    async def scene() -> None:
        fleet = Fleet(Quota(requests=240, concurrent=80))
        await fleet.second()
        held = [await begin(replica) for replica in fleet.replicas * 10]

        renewed = SharedUse(lambda: NOW[0])

        def replace(second: int) -> None:
            fleet.centre = fleet.centre if second < 20 else None if second < 80 else renewed

        begun = len(held) + await flood(fleet, 120, [1, 1, 1, 1], replace)
        assert all(held)
        most = 240 + 240 * 120 / 60  # a minute's amount at once, then two minutes' that fill up
        assert 0.9 * most <= begun <= most + 2 * 240
        assert renewed._allowances["alice"]._open == 40
        for grant in filter(None, held):
            grant.close(0)
        assert renewed._allowances["alice"]._open == 0

    asyncio.run(scene())


def test_a_part_is_a_quarter() -> None:
    """Where the centre has gone, four replicas let in a quarter each: the amount of a minute, and at least one each."""
    async def begun(requests: int) -> int:
        fleet = Fleet(Quota(requests=requests))
        await fleet.second()
        await fleet.second()
        fleet.centre = None
        return await flood(fleet, 1, [1, 1, 1, 1])

    assert asyncio.run(begun(20)) == 20
    assert asyncio.run(begun(2)) == REPLICAS


def test_a_request_that_the_client_leaves_is_not_counted() -> None:
    """Cancelled while the centre is asked. Planted: a centre that does not hear of it keeps it until the beats lack it."""
    async def scene() -> None:
        fleet = Fleet(Quota(concurrent=1))
        await fleet.second()
        task = asyncio.ensure_future(begin(fleet.replicas[0]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await begin(fleet.replicas[1]) is not None

        fleet = Fleet(Quota(concurrent=1))
        await fleet.second()
        assert fleet.centre is not None
        fleet.centre.open("r0", 99, "alice", Quota(concurrent=1))
        assert await begin(fleet.replicas[1]) is None
        for _ in range(7):
            await fleet.second()
        assert await begin(fleet.replicas[1]) is not None

    asyncio.run(scene())


class Serving:
    """Four replicas of so many slots, each with an AdmissionControl; a choice takes a second. `routes`: of each client the replicas
    that its requests come to, so many a replica that always wait."""

    def __init__(self, routes: Mapping[str, list[int]], *, shared: bool = True, slots: int = 4, waiting: int = 8) -> None:
        self.served = Counter[str]()
        self.longest = 0
        self._routes = routes
        self._admissions = [AdmissionControl(ReadyEngine(), 1 << 20, 1 << 30, 1 << 40) for _ in range(REPLICAS)]
        self._queues: list[list[tuple[int, int, str, Clock, int]]] = [[] for _ in range(REPLICAS)]
        self._slots = slots
        self._waiting = waiting
        self._number = 0
        self._shared = SharedUse() if shared else None

    def run(self, seconds: int) -> Counter[str]:
        """Choices served, by client, in the later half."""
        for second in range(seconds):
            if second == seconds // 2:
                self.served.clear()
            for replica, admission in enumerate(self._admissions):
                self._fill(replica, second)
                for _ in range(min(self._slots, len(self._queues[replica]))):
                    _, _, client, clock, came = heapq.heappop(self._queues[replica])
                    clock.scheduled = 1.0
                    self.served[client] += 1
                    self.longest = max(self.longest, second - came)
                if self._shared is not None:
                    beat = self._shared.beat(f"r{replica}", APP, {}, admission.begun())
                    admission.note_elsewhere(beat.elsewhere)
        return self.served

    def _fill(self, replica: int, second: int) -> None:
        queue = self._queues[replica]
        waits = Counter(client for _, _, client, _, _ in queue)
        for client, replicas in self._routes.items():
            for _ in range(self._waiting - waits[client] if replica in replicas else 0):
                self._number += 1
                ticket = self._admissions[replica].enter(client)
                ticket.settle(1, 1)
                clock = Clock(0.0)
                ticket.submitted([clock], lambda: None)
                heapq.heappush(queue, (ticket.turn, self._number, client, clock, second))


CASES = {
    "two replicas of four": ({"a": [0, 1, 2, 3], "b": [0, 1]}, 1.0),
    "three replicas overlap": ({"a": [0, 1, 2], "b": [1, 2, 3]}, 1.0),
    "all": ({"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}, 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_replicas_give_one_fair_share(case: str) -> None:
    """Two clients that always wait are served alike, within 10 %, though one waits at more replicas."""
    routes, ratio = CASES[case]
    served = Serving(routes).run(400)
    assert served["a"] / served["b"] == pytest.approx(ratio, rel=0.1)


def test_replicas_that_do_not_share_are_noticed() -> None:
    """Planted: each replica shares alone, and who waits at four has three times as much as who waits at two."""
    served = Serving(CASES["two replicas of four"][0], shared=False).run(200)
    assert served["a"] / served["b"] > 2.5


def test_nobody_starves_who_has_much_elsewhere() -> None:
    """One replica has a crowd that is nowhere else: the client of all four is still served there, within AHEAD_MOST choices."""
    serving = Serving({"a": [0, 1, 2, 3], "b": [0]})
    served = serving.run(200)
    assert served["b"] > 0.8 * 4 * 100
    assert 8 < serving.longest <= AHEAD_MOST // 4 + 2
