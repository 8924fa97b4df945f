"""How a replica reaches the centre of quotas, with an actor that is none of Ray's."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deploy import shared_quotas
from deploy.edge.admission_control import AdmissionControl
from deploy.edge.keys.key_file import Quota
from deploy.edge.keys.replica_quotas import CentreLost, ReplicaQuotas
from deploy.registry import Discovery, RayRegistryClient
from deploy.settings import DiscoverySettings
from deploy.shared_quotas import RayCentre, beat_for_ever
from tests.support.edge.ready_engine import ReadyEngine
from tests.support.loopback import stop

pytestmark = pytest.mark.pure


class FakeActor:
    """An actor's `ask`; `broken`: what each call does instead."""

    def __init__(self, discovery: Discovery) -> None:
        self.broken: Callable[[], Any] | None = None
        self.ask = self
        self._discovery = discovery

    def remote(self, *args: Any) -> Any:
        async def call() -> Any:
            return self._discovery.ask(*args) if self.broken is None else await self.broken()

        return asyncio.ensure_future(call())


async def dies() -> None:
    raise ActorDiedError


async def hangs() -> None:
    await asyncio.sleep(60)


def centre(actor: FakeActor | None, name: str = "r1") -> RayCentre:
    return RayCentre(RayRegistryClient(DiscoverySettings(), actor), name)


@pytest.mark.parametrize("broken", [dies, hangs, None])
def test_a_centre_that_fails_is_told_apart(monkeypatch: pytest.MonkeyPatch, broken: Callable[[], Any] | None) -> None:
    """One that has died or hangs is lost, and forgotten until the heartbeats find it again; one that lives answers."""
    monkeypatch.setattr(shared_quotas, "ANSWER_S", 0.05)
    discovery = Discovery("127.0.0.1", 0)

    async def scene() -> None:
        actor = FakeActor(discovery)
        actor.broken = broken
        found = centre(actor)
        if broken is None:
            assert await found.ask("open", 1, "alice", Quota(requests=1)) is None
            assert (await found.ask("open", 2, "alice", Quota(requests=1))).retry_after_s == 60
            assert found.registry.actor is actor
        else:
            with pytest.raises(CentreLost):
                await found.ask("open", 1, "alice", Quota(requests=1))
            assert found.registry.actor is None
            with pytest.raises(CentreLost):
                await found.ask("open", 1, "alice", Quota(requests=1))
            found.tell("close", 1, 0)

    asyncio.run(scene())
    stop(discovery._server)


def test_replicas_beat_through_discovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discovery has every method of SharedUse that replicas call; what one began is ahead of its client's turn at the other."""
    monkeypatch.setattr(shared_quotas, "PERIOD_S", 0.01)
    discovery = Discovery("127.0.0.1", 0)

    async def scene() -> None:
        actor = FakeActor(discovery)
        admissions = [AdmissionControl(ReadyEngine(), 20, 500, 1 << 40) for _ in range(2)]
        replicas = [ReplicaQuotas(centre(actor, f"r{number}")) for number in range(2)]
        beats = [asyncio.ensure_future(beat_for_ever(*pair, "app")) for pair in zip(replicas, admissions, strict=True)]
        assert not any(replica.joined.is_set() for replica in replicas)
        await asyncio.sleep(0.1)
        assert all(replica.joined.is_set() for replica in replicas)
        for replica in replicas:
            replica.change({"alice": Quota(concurrent=1, tokens=100)})
        grant = await replicas[0].open("alice")
        await grant.reserve(10)
        with pytest.raises(Exception, match="1 requests at once"):
            await replicas[1].open("alice")
        grant.close(10)
        await replicas[1].open("alice")
        waiting = admissions[1].enter("alice")
        waiting.settle(1, 1)
        admissions[0]._begun["alice"] = 7
        await asyncio.sleep(0.1)
        tickets = [admissions[1].enter(client) for client in ("alice", "bob")]
        for ticket in tickets:
            ticket.settle(1, 1)
        assert [ticket.turn for ticket in tickets] == [1 + 7, 0]
        for beat in beats:
            beat.cancel()

    asyncio.run(scene())
    stop(discovery._server)
