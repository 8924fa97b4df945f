"""A group's figures for a scrape, from status records."""

import time
from collections.abc import Mapping

from cluster.group import Group
from cluster.health import Observation, stalls
from engine.events import AdapterFigures, ProcessFigures, ScrapeGauges
from engine.front.client import EngineClient


def read_gauges(group: Group, front: EngineClient, adapters: Mapping[str, int]) -> ScrapeGauges:
    statuses = group.status()
    stalled_s = stalls(statuses, Observation(time.monotonic_ns(), waiting=front.waiting_since))
    names = [*map(str, range(len(statuses) - 1)), "core"]
    processes = tuple(
        ProcessFigures(
            name,
            running,
            max(0.0, stall_s),
            status.busy_us / 1e6,
            status.idle_us / 1e6,
            status.late_compilations,
            status.encoder.us / 1e6,
        )
        for name, status, running, stall_s in zip(names, statuses, group.running(), stalled_s, strict=True)
    )
    counts = front.count_by_adapter()
    states = {"waiting": False, "running": True}
    by_adapter = tuple(
        AdapterFigures(name, state, counts[adapter, started])
        for name, adapter in list(adapters.items())
        for state, started in states.items()
    )
    return ScrapeGauges(front.open, processes, statuses[0].encoder, by_adapter)
