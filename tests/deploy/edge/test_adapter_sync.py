"""Loads and unloads at one replica reach the others, through an AdapterCentre that is called as the actor is."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deploy.edge.adapters import adapter_sync
from deploy.edge.adapters.adapter_centre import SILENT_S, AdapterCentre
from deploy.edge.adapters.adapter_sync import AdapterSync
from deploy.edge.http.http_errors import DeadlineExceeded
from deploy.edge.keys.replica_quotas import CentreLost
from engine.errors import InvalidRequest, ModelNotFound

pytestmark = pytest.mark.pure


class Registry:
    """An AdapterRegistry without ranks. `absent`: folders that this replica's node lacks; `forgets`: it does not say what it
    replaces."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self.absent = set[str]()
        self.forgets = False

    def __contains__(self, name: object) -> bool:
        return name in self.folders

    async def load(self, name: str, path: str, *, in_place: bool) -> tuple[str, str | None]:
        await asyncio.sleep(0)
        if path in self.absent or (name in self.folders and not in_place):
            raise InvalidRequest(f"lora_path: no {path}")
        before = None if self.forgets else self.folders.get(name)
        self.folders[name] = path
        return path, before

    def unload(self, name: str) -> None:
        if name not in self.folders:
            raise ModelNotFound(name)
        del self.folders[name]


class Cluster:
    """Replicas of one application, and the centre that they reach. `deaf`: it does not answer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.centre = AdapterCentre(lambda: self.now)
        self.deaf = False
        self.replicas: list[tuple[Registry, AdapterSync]] = []

    def start(self, application: str = "app") -> tuple[Registry, AdapterSync]:
        cluster = self
        name = f"r{len(self.replicas)}"

        class Reached:
            async def ask(self, method: str, *args: object) -> Any:
                if cluster.deaf:
                    raise CentreLost
                return getattr(cluster.centre, method)(name, *args)

            def tell(self, method: str, *args: object) -> None:
                raise NotImplementedError

        registry = Registry()
        made = registry, AdapterSync(registry, Reached(), application)  # type: ignore[arg-type]
        self.replicas.append(made)
        return made

    def served(self) -> list[dict[str, str]]:
        return [registry.folders for registry, _ in self.replicas]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PERIOD_S", 0.01), ("LOOK_S", 0.01), ("SPREAD_S", 0.5)):
        monkeypatch.setattr(adapter_sync, name, seconds)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    return Cluster()


def run(cluster: Cluster, scene: Callable[[], Any], count: int = 3) -> None:
    async def main() -> None:
        for _ in range(count):
            _, sync = cluster.start()
            assert await sync.sync() is not cluster.deaf
        running = [asyncio.ensure_future(sync.run()) for _, sync in cluster.replicas]
        await scene()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(main())


def test_a_load_at_one_replica_is_served_by_all(cluster: Cluster) -> None:
    """When it answers, all have it; in place too; an unload likewise. Another application has none of it."""

    async def scene() -> None:
        elsewhere, sync = cluster.start("other")
        first, second = (each for _, each in cluster.replicas[:2])
        await first.load("sql", "/a", in_place=False)
        assert cluster.served()[:3] == [{"sql": "/a"}] * 3
        await second.load("sql", "/b", in_place=True)
        await second.load("poems", "/c", in_place=False)
        assert cluster.served()[:3] == [{"sql": "/b", "poems": "/c"}] * 3
        await first.unload("sql")
        assert cluster.served()[:3] == [{"poems": "/c"}] * 3
        assert await sync.sync()
        assert elsewhere.folders == {}

    run(cluster, scene)


def test_a_replica_that_starts_later_loads_it_too(cluster: Cluster) -> None:
    """At its first sync, and not what is unloaded; from a centre that has started anew, too, which learns it of the others."""

    async def scene() -> None:
        sync = cluster.replicas[0][1]
        for name in ("sql", "poems"):
            await sync.load(name, f"/{name}", in_place=False)
        await sync.unload("poems")
        cluster.centre = AdapterCentre(lambda: cluster.now)
        await asyncio.sleep(0.05)
        registry, late = cluster.start()
        assert registry.folders == {}
        assert await late.sync()
        assert registry.folders == {"sql": "/sql"}

    run(cluster, scene)


def test_what_one_replica_cannot_load_none_serves(cluster: Cluster) -> None:
    """The load is a refusal that says why, and the others have forgotten it; in place, all serve the one of before again. Planted:
    a replica that knows no earlier folder."""

    async def scene() -> None:
        cluster.replicas[2][0].absent.add("/a")
        with pytest.raises(InvalidRequest, match="another replica: lora_path: no /a"):
            await cluster.replicas[0][1].load("sql", "/a", in_place=False)
        assert cluster.served() == [{}] * 3
        cluster.replicas[2][0].absent.clear()
        await cluster.replicas[0][1].load("sql", "/a", in_place=False)
        assert cluster.served() == [{"sql": "/a"}] * 3
        cluster.replicas[2][0].absent.add("/b")
        for knows, served in ((True, [{"sql": "/a"}] * 3), (False, [{}] * 3)):
            cluster.replicas[0][0].forgets = not knows
            with pytest.raises(InvalidRequest, match="another replica: lora_path: no /b"):
                await cluster.replicas[0][1].load("sql", "/b", in_place=True)
            assert cluster.served() == served

    run(cluster, scene)


def test_waits_are_bounded(cluster: Cluster) -> None:
    """A replica that hangs, or a centre that does not answer, is a deadline; a replica that has been silent is not waited for."""

    async def scene() -> None:
        sync = cluster.replicas[0][1]
        _, silent = cluster.start()
        assert await silent.sync()
        with pytest.raises(DeadlineExceeded, match="1 other replicas have not"):
            await sync.load("sql", "/a", in_place=False)
        cluster.now += SILENT_S
        await asyncio.sleep(0.05)
        await sync.load("poems", "/b", in_place=False)
        assert cluster.served()[1] == {"sql": "/a", "poems": "/b"}
        cluster.deaf = True
        with pytest.raises(DeadlineExceeded, match="at this one alone"):
            await sync.unload("sql")

    run(cluster, scene)
