"""A group's figures for a scrape, from status records."""

import time

from cluster.group import Group
from cluster.health import Observation, stalls
from engine.events import ProcessFigures, ScrapeGauges
from engine.front.client import EngineClient


def read_gauges(group: Group, front: EngineClient) -> ScrapeGauges:
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
    return ScrapeGauges(front.open, processes, statuses[0].encoder)
