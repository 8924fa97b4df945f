"""A rehearsal of load: seeded scripts of events, played in real time into real exporters that a real Prometheus scrapes.

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

from dashboards.alerts import FILE
from dashboards.discovery import DiscoveryServer, ReplicaRegistry, ScrapeTarget
from dashboards.exporter import Exporter, Facts
from dashboards.pictures import draw_all
from dashboards.prometheus import Api, Prometheus, jobs
from dashboards.promql import FOREIGN, RAY_JOB
from engine.errors import ConfigError
from engine.events import ScrapeGauges
from tests.support.monitoring.event_script import Scene, script
from tests.support.monitoring.periodic import repeating

ABOUT = {"model_name": "nano-31b", "build": "rehearsal", "attention": "reference", "tp": "4"}
PLACE = {"application": "quartet", "deployment": "gemma", "node": "node-1", "model": "nano-31b"}
FACTS = Facts(
    slots=64, page_tokens=32, boot_s=5.2, step_bound_s=30.0, heartbeat_bound_s=3.0, ttft_objective_s=0.2, tpot_objective_s=0.02
)
BEAT_S = 1.0
SCRAPES_BEFORE = 3  # each series is seen at zero before anything happens, or its first events would be missed
TARGETS_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Cast:
    """What is played: the scene of each group, by replica."""

    scenes: Mapping[str, Scene]
    seconds: float


def cast(groups: int = 3, seconds: float = 20.0, rate: float = 5.0, seed: int = 7) -> Cast:
    """Groups of equal load; `rate` is requests a second and group."""
    return Cast({f"replica-{index}": script(seed * 100 + index, seconds, rate) for index in range(groups)}, seconds)


class Curtain:
    """The script's clock: before it rises, nothing has happened yet."""

    def __init__(self) -> None:
        self._zero: float | None = None

    def rise(self) -> None:
        """Now is zero."""
        self._zero = time.monotonic()

    def now(self) -> float:
        """Seconds since it rose; below zero before."""
        return -1.0 if self._zero is None else time.monotonic() - self._zero


def play(played: Cast, ready: "Stage") -> float:
    """Feed each event to its exporter at its time; returns the unix time at which the script's clock was zero."""
    steps = [(moment.at, name, moment.event) for name, scene in played.scenes.items() for moment in scene.moments]
    began = time.time()
    ready.curtain.rise()
    for at, name, event in sorted(steps, key=lambda step: step[0]):
        if (ahead := at - ready.curtain.now()) > 0:
            time.sleep(ahead)
        ready.exporters[name](event)
    return began


@dataclass(frozen=True)
class Stage:
    """What a Prometheus may scrape: the groups' exporters by replica, and scrape_configs that reach them, their registry and Ray.

    `discovery`: the address of the http_sd list.
    """

    exporters: Mapping[str, Exporter]
    curtain: Curtain
    discovery: str
    scrapes: tuple[dict[str, Any], ...]


@contextmanager
def stage(scenes: Mapping[str, Scene]) -> Iterator[Stage]:
    """Real exporters on ports of their own, which tell a real discovery endpoint of themselves; a stand-in for Ray's figures."""
    with ExitStack() as stack:
        curtain, registry = Curtain(), ReplicaRegistry()
        exporters = {name: Exporter(ABOUT, FACTS, partial(_gauges, scene, curtain)) for name, scene in scenes.items()}
        members = []
        for name, exporter in exporters.items():
            stack.callback(exporter.close)
            address = exporter.serve("127.0.0.1", 0).removeprefix("http://").removesuffix("/metrics")
            members.append((ScrapeTarget(**PLACE, replica=name, address=address), exporter))
        ray = stack.enter_context(_served(_ray(len(members))))
        server = DiscoveryServer(registry, "127.0.0.1", 0, lambda: [{"targets": [ray], "labels": {"node": PLACE["node"]}}])
        stack.callback(server.close)
        stack.enter_context(repeating(lambda: _beat(registry, members), BEAT_S))
        yield Stage(exporters, curtain, server.url, jobs(server.url, ray_interval_s=1))


def _beat(registry: ReplicaRegistry, members: Sequence[tuple[ScrapeTarget, Exporter]]) -> None:
    """What each replica's announcer does."""
    for target, exporter in members:
        registry.heartbeat(target, exporter.counts())


def _gauges(scene: Scene, curtain: Curtain) -> ScrapeGauges:
    return scene.gauges(curtain.now())


def wait_scraped(api: Api, targets: int) -> None:
    """Until every target has been scraped SCRAPES_BEFORE times, Ray's once; ConfigError when one never is."""
    end = time.monotonic() + TARGETS_TIMEOUT_S
    while time.monotonic() < end:
        seen = api.ask("count_over_time(up[30s])")
        if len(seen) >= targets and all(each.last >= (1 if each.labels["job"] == RAY_JOB else SCRAPES_BEFORE) for each in seen):
            return
        time.sleep(0.2)
    raise ConfigError(f"not scraped: {[(each['scrapeUrl'], each['lastError']) for each in api.targets()]}")


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
    for row in FOREIGN:
        if row.name.startswith("ray_"):
            Gauge(row.name, row.help, row.labels, registry=registry).labels(PLACE["application"], PLACE["deployment"]).set(groups)
    return registry


def main() -> None:
    """The command: a longer run, drawn."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.monitoring.scripted_exporters", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    played = cast(seconds=args.seconds, rate=8.0)
    with stage(played.scenes) as ready, Prometheus(ready.scrapes, FILE) as prometheus:
        wait_scraped(prometheus.api, len(played.scenes) + 3)
        began = play(played, ready)
        for path in draw_all(prometheus.api, args.seconds - 6, args.folder, "10s", began + args.seconds - 3):
            print(path)


if __name__ == "__main__":
    main()
