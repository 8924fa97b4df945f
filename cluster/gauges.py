"""What a scrape reads of a group: its processes' records in the status block, as figures of this moment.

How long a process has owed a step, cluster/health says. What idles is not stalled, however old its progress.
"""

import time
from collections.abc import Sequence

from cluster.group import Group
from cluster.health import Observation, Statuses, stalls
from engine.events import ProcessFigures, ScrapeGauges
from engine.front.client import EngineClient


def read_gauges(group: Group, front: EngineClient) -> ScrapeGauges:
    """Reads the figures of this moment; from any thread."""
    statuses = group.status()
    figures = processes(statuses, group.running(), time.monotonic_ns(), front.waiting_since)
    return ScrapeGauges(front.open, figures, statuses[0].encoder)


def processes(
    statuses: Statuses, up: Sequence[bool], now_ns: int, waiting_ns: int | None
) -> tuple[ProcessFigures, ...]:
    """Makes figures of the ranks and, last, the core, from their records. `waiting_ns`: since when requests are open. Pure."""
    names = [*map(str, range(len(statuses) - 1)), "core"]
    stalled_s = stalls(statuses, Observation(now_ns, waiting=waiting_ns))
    return tuple(
        ProcessFigures(
            name,
            running,
            max(0.0, stall_s),
            status.busy_us / 1e6,
            status.idle_us / 1e6,
            status.late_compilations,
            status.encoder.us / 1e6,
        )
        for name, status, running, stall_s in zip(names, statuses, up, stalled_s, strict=True)
    )
