"""Calls the cluster's SharedUse in the actor of discovery."""

import asyncio
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from deploy.edge.admission_control import AdmissionControl
from deploy.edge.keys.replica_quotas import CentreLost, ReplicaQuotas
from deploy.registry import PERIOD_S, RayRegistryClient

ANSWER_S = 2.0


@dataclass
class RayCentre:
    """A Centre. The heartbeats of `registry` start its actor and find it again."""

    registry: RayRegistryClient
    replica: str

    async def ask(self, method: str, *args: object) -> Any:
        """CentreLost: the actor has failed, or not answered in ANSWER_S."""
        if (actor := self.registry.actor) is None:
            raise CentreLost
        try:
            return await asyncio.wait_for(actor.ask.remote(method, self.replica, *args), ANSWER_S)
        except (RayError, TimeoutError) as error:
            self.registry.actor = None
            raise CentreLost from error

    def tell(self, method: str, *args: object) -> None:
        if (actor := self.registry.actor) is not None:
            actor.ask.remote(method, self.replica, *args)


async def beat_for_ever(quotas: ReplicaQuotas, admission: AdmissionControl, application: str) -> None:
    """Once a second tell the centre what this replica has begun, and the admission what others
    began."""
    while True:
        admission.note_elsewhere(await quotas.beat(application, admission.begun()))
        await asyncio.sleep(PERIOD_S)
