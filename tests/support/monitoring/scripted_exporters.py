"""Scripted load: seeded scripts of events, replayed in real time into real exporters that a real Prometheus scrapes.

    script(seed) --events--> dashboards/exporter.py --/metrics--> prometheus --HTTP--> board queries, pictures
         `---------------- what the script itself says happened: the truth that answers are held against

`python -m tests.support.monitoring.scripted_exporters FOLDER` plays two minutes and draws the boards into FOLDER.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from dashboards.discovery import DiscoveryServer, ReplicaRegistry, ScrapeTarget
from dashboards.exporter import Exporter, Facts
from engine.errors import ConfigError
from engine.events import ScrapeGauges
from tests.support.monitoring.event_script import GroupScript, script
from tests.support.monitoring.periodic import repeating
from tests.support.monitoring.pictures import draw_all
from tests.support.monitoring.prometheus import RAY_JOB, Api, Prometheus, jobs
from tests.support.monitoring.tables import EXTERNAL_METRICS, RULES

PLACE = {"application": "quartet", "deployment": "gemma", "node": "node-1", "model": "nano-31b"}
FACTS = Facts(
    model_name="nano-31b",
    build="scripted",
    attention="reference",
    tp=4,
    slots=64,
    page_tokens=32,
    step_bound_s=30,
    ttft_objective_s=0.2,
    tpot_objective_s=0.02,
    aliases=True,
)
HEARTBEAT_S = 1.0
SCRAPES_BEFORE = 3  # each series is seen at zero before anything happens, or its first events would be missed
TARGETS_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class ScriptedLoad:
    """What is replayed: the script of each group, by replica."""

    scripts: Mapping[str, GroupScript]
    seconds: float


def scripted_load(groups: int = 3, seconds: float = 20.0, rate: float = 5.0, seed: int = 7) -> ScriptedLoad:
    """Groups of equal load; `rate` is requests a second and group."""
    return ScriptedLoad({f"replica-{index}": script(seed * 100 + index, seconds, rate) for index in range(groups)}, seconds)


class ScriptClock:
    """The script's clock: before it starts, nothing has happened yet."""

    def __init__(self) -> None:
        self._zero: float | None = None

    def start(self) -> None:
        """Now is zero."""
        self._zero = time.monotonic()

    def now(self) -> float:
        """Seconds since it started; below zero before."""
        return -1.0 if self._zero is None else time.monotonic() - self._zero


def replay(load_script: ScriptedLoad, ready: "ServedExporters") -> float:
    """Feed each event to its exporter at its time; returns the unix time at which the script's clock was zero."""
    steps = [(moment.at, name, moment.event) for name, group in load_script.scripts.items() for moment in group.moments]
    began = time.time()
    ready.clock.start()
    for at, name, event in sorted(steps, key=lambda step: step[0]):
        if (ahead := at - ready.clock.now()) > 0:
            time.sleep(ahead)
        ready.exporters[name](event)
    return began


@dataclass(frozen=True)
class ServedExporters:
    """What a Prometheus may scrape: the groups' exporters by replica, and scrape_configs that reach them, their registry and Ray.

    `discovery`: the address of the http_sd list.
    """

    exporters: Mapping[str, Exporter]
    clock: ScriptClock
    discovery: str
    scrapes: tuple[dict[str, Any], ...]


@contextmanager
def serve_exporters(scripts: Mapping[str, GroupScript]) -> Iterator[ServedExporters]:
    """Real exporters on ports of their own, which tell a real discovery endpoint of themselves; a stand-in for Ray's figures."""
    with ExitStack() as stack:
        clock, registry = ScriptClock(), ReplicaRegistry()
        exporters = {name: Exporter(FACTS, partial(_gauges, group, clock)) for name, group in scripts.items()}
        members = []
        for name, exporter in exporters.items():
            stack.callback(exporter.close)
            address = exporter.serve("127.0.0.1", 0).removeprefix("http://").removesuffix("/metrics")
            members.append((ScrapeTarget(**PLACE, replica=name, address=address), exporter))
        ray = stack.enter_context(_served(_ray(len(members))))
        server = DiscoveryServer(registry, "127.0.0.1", 0, lambda: [{"targets": [ray], "labels": {"node": PLACE["node"]}}])
        stack.callback(server.close)
        stack.enter_context(repeating(lambda: _send_heartbeats(registry, members), HEARTBEAT_S))
        yield ServedExporters(exporters, clock, server.url, jobs(server.url, ray_interval_s=1))


def _send_heartbeats(registry: ReplicaRegistry, members: Sequence[tuple[ScrapeTarget, Exporter]]) -> None:
    """What each replica's heartbeat sender does."""
    for target, exporter in members:
        registry.heartbeat(target, exporter.counts())


def _gauges(group: GroupScript, clock: ScriptClock) -> ScrapeGauges:
    return group.gauges(clock.now())


def wait_scraped(api: Api, targets: int) -> None:
    """Until every target has been scraped SCRAPES_BEFORE times, Ray's once; ConfigError when one never is."""
    end = time.monotonic() + TARGETS_TIMEOUT_S
    while time.monotonic() < end:
        seen = api.ask("count_over_time(up[30s])")
        enough = (series.last >= (1 if series.labels["job"] == RAY_JOB else SCRAPES_BEFORE) for series in seen)
        if len(seen) >= targets and all(enough):
            return
        time.sleep(0.2)
    raise ConfigError(f"not scraped: {[(target['scrapeUrl'], target['lastError']) for target in api.targets()]}")


@contextmanager
def _served(registry: CollectorRegistry) -> Iterator[str]:
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _ray(groups: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    for row in EXTERNAL_METRICS:
        if row.name.startswith("ray_"):
            Gauge(row.name, row.help, row.labels, registry=registry).labels(PLACE["application"], PLACE["deployment"]).set(groups)
    return registry


def main() -> None:
    """The command: a longer run, drawn."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.monitoring.scripted_exporters", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    load_script = scripted_load(seconds=args.seconds, rate=8.0)
    with serve_exporters(load_script.scripts) as ready, Prometheus(ready.scrapes, RULES) as prometheus:
        wait_scraped(prometheus.api, len(load_script.scripts) + 3)
        began = replay(load_script, ready)
        for path in draw_all(prometheus.api, args.seconds - 6, args.folder, "10s", began + args.seconds - 3):
            print(path)


if __name__ == "__main__":
    main()
