"""Spreads a replica's loads and unloads to the others."""

import asyncio
import logging
from typing import Any

from deploy.edge.adapters.adapter_centre import EMPTY, AdapterEntry, AdapterList, LateReplicas
from deploy.edge.adapters.adapter_registry import AdapterRegistry
from deploy.edge.http.http_errors import DeadlineExceeded
from deploy.edge.keys.replica_quotas import Centre, CentreLost
from engine.errors import EngineDead, InvalidRequest, QuartetError

PERIOD_S = 1.0
LOOK_S = 0.1  # between two questions whether the others have done it
SPREAD_S = 120.0  # for the others to load an adapter

logger = logging.getLogger("ray.serve")


class AdapterSync:
    def __init__(self, registry: AdapterRegistry, centre: Centre | None, application: str) -> None:
        self._registry = registry
        self._centre = centre
        self._application = application
        self._done = EMPTY
        self._errors: dict[int, str] = {}
        self._changing = asyncio.Lock()

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        folder, before = await self._registry.load(name, path, in_place=in_place)
        if self._centre is None:
            return
        late = await self._spread(name, folder)
        if late.error is not None:
            await self._restore(name, before)
            raise InvalidRequest(f"another replica: {late.error}", param="lora_path")

    async def _restore(self, name: str, folder: str | None) -> None:
        if folder is None:
            self._registry.unload(name)
        else:
            await self._registry.load(name, folder, in_place=True)
        await self._spread(name, folder)

    async def unload(self, name: str) -> None:
        self._registry.unload(name)
        if self._centre is not None:
            await self._spread(name, None)

    async def run(self) -> None:
        while True:
            await self.sync()
            await asyncio.sleep(PERIOD_S)

    async def sync(self) -> bool:
        """False: the centre does not answer."""
        try:
            wanted: AdapterList = await self._ask("sync_adapters", self._done, self._errors)
            if wanted.revision > self._done.revision:
                await self._bring_about(wanted)
                await self._ask("sync_adapters", self._done, self._errors)
        except CentreLost:
            return False
        return True

    async def _bring_about(self, wanted: AdapterList) -> None:
        async with self._changing:
            for name, entry in wanted.entries.items():
                if self._done.entries.get(name) != entry:
                    await self._follow(name, entry)
            self._done = wanted
        current = {entry.revision for entry in wanted.entries.values()}
        self._errors = {revision: error for revision, error in self._errors.items() if revision in current}

    async def _follow(self, name: str, entry: AdapterEntry) -> None:
        try:
            if entry.folder is not None:
                await self._registry.load(name, entry.folder, in_place=True)
            elif name in self._registry:
                self._registry.unload(name)
        except EngineDead:
            raise
        except QuartetError as error:
            self._errors[entry.revision] = str(error)
            logger.warning("adapter %s, which another replica serves, is not served here: %s", name, error)

    async def _spread(self, name: str, folder: str | None) -> LateReplicas:
        try:
            async with self._changing:
                entry: AdapterEntry = await self._ask("change_adapter", self._done, name, folder)
                self._done = AdapterList(self._done.revision, {**self._done.entries, name: entry})
            for _ in range(int(SPREAD_S / LOOK_S)):
                late: LateReplicas = await self._ask("late_adapters", entry.revision)
                if late.error is not None or not late.waiting:
                    return late
                await asyncio.sleep(LOOK_S)
        except CentreLost as error:
            raise DeadlineExceeded(f"The other replicas did not hear of adapter '{name}': it changed at this one alone.") from error
        raise DeadlineExceeded(f"{late.waiting} other replicas have not changed adapter '{name}' within {SPREAD_S:.0f} s.")

    async def _ask(self, method: str, *args: object) -> Any:
        assert self._centre is not None, "only a replica with a centre asks one"
        return await self._centre.ask(method, self._application, *args)
