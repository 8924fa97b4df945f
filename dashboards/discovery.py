"""The registry of replicas, for Prometheus' discovery and the counts of replicas that are gone.

    replica --heartbeat(target, counts)--> ReplicaRegistry --targets()--> /targets   Prometheus http_sd
            `-deregister(cause, counts)->      `-collect()--------------> /metrics   groups up and down, restarts, retired counts
                                           nodes -----------------------> /ray       http_sd of Ray's own exporters

A paused replica returns with its next heartbeat, and only new counts are added. Open requests of a lost replica count as `dead`.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from dashboards.metrics import CAUSES, DEPLOYMENT_TOTALS, DISCOVERY_METRICS, RESTARTS, RETIRED, TARGET_LABELS
from dashboards.page_server import Page, PageServer, metrics_page
from dashboards.series import Counts, Series
from engine.errors import ConfigError

UNLISTED_AFTER_S = 3.5
VANISHED_AFTER_S = 10.0
SHOWN_DOWN_S = 600.0  # how long a replica that is gone still shows as down
_PAUSE_S = 2.0  # the endpoint itself did not run for so long: no replica counts as silent for it
_REMEMBERED = 4096
_RETIRED = RETIRED | {RESTARTS.name: RESTARTS}

HttpSdList = list[dict[str, Any]]  # as Prometheus reads it


class ScrapeTarget(NamedTuple):
    """address: host:port of its exporter; all other fields label its series."""

    application: str
    deployment: str
    replica: str
    node: str
    model: str
    address: str

    @property
    def labels(self) -> dict[str, str]:
        return dict(zip(TARGET_LABELS, self[:-1], strict=True))


@dataclass
class _Member:
    target: ScrapeTarget
    counts: Counts
    seen: float
    retired: Counts  # counts that are already among the retired ones: it vanished, and came back
    silent: bool = False

    def added(self) -> Counts:
        """Its counts beyond the retired ones."""
        return {key: max(0.0, value - self.retired.get(key, 0.0)) for key, value in self.counts.items()}


class _Departed(NamedTuple):
    target: ScrapeTarget
    since: float
    vanished: bool
    counts: Counts


class ReplicaRegistry(Collector):
    """Thread-safe. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._retired: dict[tuple[str, str], Counts] = defaultdict(dict)  # what a deployment's replicas have left
        self._gone: dict[str, _Departed] = {}  # oldest first
        self._ticked = clock()

    # -- replicas

    def heartbeat(self, target: ScrapeTarget, counts: Counts) -> None:
        """Ignored after deregistration."""
        with self._lock:
            self._note(target, counts)

    def deregister(self, target: ScrapeTarget, cause: str | None, counts: Counts) -> None:
        """`cause`: one of CAUSES, None if orderly. Idempotent."""
        with self._lock:
            if self._note(target, counts):
                self._retire(target.replica, cause)

    def _note(self, target: ScrapeTarget, counts: Counts) -> bool:
        before = self._members.get(target.replica) or self._gone.get(target.replica)
        if isinstance(before, _Departed) and not before.vanished:
            return False
        retired = self._retired[target[:2]]
        for key in (*counts, *((RESTARTS.name, (cause,)) for cause in CAUSES)):
            retired.setdefault(key, 0.0)  # at zero before its first death, or `increase` would miss that
        already: Counts = {}
        if isinstance(before, _Departed):
            del self._gone[target.replica]
            already = before.counts
        elif before is not None:
            already = before.retired
        self._members[target.replica] = _Member(target, counts, self._clock(), already)
        return True

    def tick(self) -> None:
        """Retire silent replicas; call it about twice a second."""
        with self._lock:
            now = self._clock()
            if now - self._ticked > _PAUSE_S:
                pause = now - self._ticked
            else:
                pause = 0.0
            self._ticked = now
            for replica, member in list(self._members.items()):
                member.seen += pause
                member.silent = now - member.seen > UNLISTED_AFTER_S
                if now - member.seen > VANISHED_AFTER_S:
                    self._retire(replica, "vanished")

    def _retire(self, replica: str, cause: str | None) -> None:
        member = self._members.pop(replica)
        retired = self._retired[member.target[:2]]
        if cause:
            restarts = [((RESTARTS.name, (cause,)), 1.0)]
        else:
            restarts = []
        added = member.added()
        ended = sum(value for (name, _), value in added.items() if name == "quartet_requests_total")
        lost = max(0.0, added.get(("quartet_requests_received_total", ()), 0.0) - ended)  # received, and not ended
        for key, value in (*added.items(), (("quartet_requests_total", ("dead",)), lost), *restarts):
            retired[key] = retired.get(key, 0.0) + value
        self._gone[replica] = _Departed(member.target, self._clock(), cause == "vanished", member.counts)
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def left_applications(self) -> set[str]:
        with self._lock:
            if self._members:
                return set()
            return {application for application, _ in self._retired}

    # -- Prometheus

    def targets(self) -> HttpSdList:
        with self._lock:
            live = [member.target for _, member in sorted(self._members.items()) if not member.silent]
        return [{"targets": [target.address], "labels": target.labels} for target in live]

    def collect(self) -> Iterator[Family]:
        series = {row.name: Series(row) for row in DISCOVERY_METRICS}
        with self._lock:
            group_up = series["quartet_group_up"].values
            for departed in self._gone.values():
                if self._clock() - departed.since <= SHOWN_DOWN_S:
                    group_up[departed.target[:-1]] = 0.0
            for member in self._members.values():
                group_up[member.target[:-1]] = float(not member.silent)
            for deployment, retired in self._retired.items():
                members = [member for member in self._members.values() if member.target[:2] == deployment]
                series["quartet_groups"].values[deployment] = sum(not member.silent for member in members)
                living = [(DEPLOYMENT_TOTALS, member.added()) for member in members]
                for rows, counts in ((_RETIRED, retired), (DEPLOYMENT_TOTALS, retired), *living):
                    for (name, labels), value in counts.items():
                        if name in rows:
                            series[rows[name].name].add((*deployment, *labels), value)
        for row in series.values():
            yield row.family()


class DiscoveryServer(PageServer):
    """Serves a registry in a thread, which also ticks."""

    def __init__(self, registry: ReplicaRegistry, host: str, port: int, nodes: Callable[[], HttpSdList] = list) -> None:
        """Port 0: a free one. ConfigError: taken. `nodes`: for /ray; its ConfigError is a 503."""
        self._registry = registry
        pages = {
            "/targets": Page("application/json", lambda: json.dumps(registry.targets()).encode()),
            "/ray": Page("application/json", lambda: json.dumps(nodes()).encode()),
            "/metrics": metrics_page(registry),
        }
        try:
            super().__init__(host, port, pages, "discovery")
        except OSError as error:
            raise ConfigError(f"metrics.discovery: cannot listen on {host}:{port}: {error.strerror}") from error

    def service_actions(self) -> None:
        self._registry.tick()
