"""Who is to be scraped, and what those that are gone have left: the registry of replicas, and the endpoint that serves it.

    replica --heartbeat(target, counts)--> ReplicaRegistry --targets()--> /targets   Prometheus http_sd
            `-deregister(cause, counts)->      `-collect()--------------> /metrics   groups up and down, restarts, retired counts
                                           nodes -----------------------> /ray       http_sd of Ray's own exporters, one a node

A replica that is silent for UNLISTED_AFTER_S is no target any more; after VANISHED_AFTER_S it has vanished, and its last counts
go into the retired ones, when Prometheus has long ceased to scrape it. A later heartbeat of it is refused, or its counts would be
there twice. What a replica had open when it went is lost with it: its final counts have as many more requests that ended `dead`.
"""

import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NamedTuple

from prometheus_client import Metric as Family
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from dashboards.exporter import page_url
from dashboards.metrics import CAUSES, DEPLOYMENT_TOTALS, DISCOVERY_METRICS, RESTARTS, RETIRED, TARGET_LABELS
from dashboards.series import Counts, Series
from engine.errors import ConfigError

UNLISTED_AFTER_S = 3.5
VANISHED_AFTER_S = 10.0
SHOWN_DOWN_S = 600.0  # how long a replica that is gone still shows as down
TICK_S = 0.5
_PAUSE_S = 2.0  # the endpoint itself did not run for so long: no replica counts as silent for it
_REMEMBERED = 4096
_RETIRED = RETIRED | {RESTARTS.name: RESTARTS}

HttpSdList = list[dict[str, Any]]  # as Prometheus reads it
HeartbeatReply = Literal["ok", "gone"]


class ScrapeTarget(NamedTuple):
    """A replica, and the host:port of its exporter. The first two say what it serves; all but the last label its series."""

    application: str
    deployment: str
    replica: str
    node: str
    model: str
    address: str

    @property
    def labels(self) -> dict[str, str]:
        """What discovery puts on its series."""
        return dict(zip(TARGET_LABELS, self[:-1], strict=True))


@dataclass
class _Member:
    target: ScrapeTarget
    counts: Counts
    seen: float
    silent: bool = False


class ReplicaRegistry(Collector):
    """The registry. Every method may be called from any thread; `clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._retired: dict[tuple[str, str], Counts] = defaultdict(dict)  # what a deployment's replicas have left behind
        self._gone: dict[str, tuple[ScrapeTarget, float]] = {}  # and since when, oldest first
        self._ticked = clock()

    # -- replicas

    def heartbeat(self, target: ScrapeTarget, counts: Counts) -> HeartbeatReply:
        """Note that a replica lives, and its counts; the first heartbeat registers it. `gone`: it has left, or was given up."""
        with self._lock:
            if target.replica in self._gone:
                return "gone"
            retired = self._retired[target[:2]]
            for key in (*counts, *((RESTARTS.name, (cause,)) for cause in CAUSES)):
                retired.setdefault(key, 0.0)  # at zero before its first death, or `increase` would miss that
            self._members[target.replica] = _Member(target, counts, self._clock())
            return "ok"

    def deregister(self, target: ScrapeTarget, cause: str | None, counts: Counts) -> None:
        """Take a replica's last message; `cause`: one of CAUSES, or None for an orderly end. Idempotent: the first one counts."""
        with self._lock:
            if target.replica not in self._gone:
                self._members[target.replica] = _Member(target, counts, self._clock())
                self._retire(target.replica, cause)

    def tick(self) -> None:
        """Look who has gone silent; to be called about every TICK_S."""
        with self._lock:
            now = self._clock()
            pause = now - self._ticked if now - self._ticked > _PAUSE_S else 0.0
            self._ticked = now
            for replica, member in list(self._members.items()):
                member.seen += pause
                member.silent = now - member.seen > UNLISTED_AFTER_S
                if now - member.seen > VANISHED_AFTER_S:
                    self._retire(replica, "vanished")

    def _retire(self, replica: str, cause: str | None) -> None:
        member = self._members.pop(replica)
        retired = self._retired[member.target[:2]]
        restarts = [((RESTARTS.name, (cause,)), 1.0)] if cause else []
        ended = sum(value for (name, _), value in member.counts.items() if name == "quartet_requests_total")
        lost = max(0.0, member.counts.get(("quartet_requests_received_total", ()), 0.0) - ended)  # received, and not ended
        for key, value in (*member.counts.items(), (("quartet_requests_total", ("dead",)), lost), *restarts):
            retired[key] = retired.get(key, 0.0) + value
        self._gone[replica] = member.target, self._clock()
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def left_applications(self) -> set[str]:
        """Return the applications that had replicas, once none has any; empty before."""
        with self._lock:
            return set() if self._members else {application for application, _ in self._retired}

    # -- Prometheus

    def targets(self) -> HttpSdList:
        """Return the http_sd list: who is to be scraped now, ordered by replica."""
        with self._lock:
            live = [member.target for _, member in sorted(self._members.items()) if not member.silent]
        return [{"targets": [target.address], "labels": target.labels} for target in live]

    def collect(self) -> Iterator[Family]:
        """Yield a family for each row of DISCOVERY_METRICS."""
        series = {row.name: Series(row) for row in DISCOVERY_METRICS}
        with self._lock:
            group_up = series["quartet_group_up"].values
            for target, since in self._gone.values():
                if self._clock() - since <= SHOWN_DOWN_S:
                    group_up[target[:-1]] = 0.0
            for member in self._members.values():
                group_up[member.target[:-1]] = float(not member.silent)
            for deployment, retired in self._retired.items():
                members = [member for member in self._members.values() if member.target[:2] == deployment]
                series["quartet_groups"].values[deployment] = sum(not member.silent for member in members)
                living = [(DEPLOYMENT_TOTALS, member.counts) for member in members]
                for rows, counts in ((_RETIRED, retired), (DEPLOYMENT_TOTALS, retired), *living):
                    for (name, labels), value in counts.items():
                        if name in rows:
                            series[rows[name].name].add((*deployment, *labels), value)
        for row in series.values():
            yield row.family()


class DiscoveryServer(ThreadingHTTPServer):
    """`/targets`, `/ray` and `/metrics` of a registry, on a thread of its own, which also ticks."""

    def __init__(self, registry: ReplicaRegistry, host: str, port: int, nodes: Callable[[], HttpSdList] = list) -> None:
        """Open the port (0: a free one). ConfigError when it is taken. `nodes`: what /ray lists; 503 where that raises one."""
        self._registry = registry
        self.pages: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/targets": ("application/json", lambda: json.dumps(registry.targets()).encode()),
            "/ray": ("application/json", lambda: json.dumps(nodes()).encode()),
            "/metrics": (CONTENT_TYPE_PLAIN_0_0_4, lambda: generate_latest(registry)),
        }
        try:
            self.address_family = socket.getaddrinfo(host, port)[0][0]
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(f"metrics.discovery: cannot listen on {host}:{port}: {error.strerror}") from error
        self.url = page_url(host, self.server_port, "targets")
        threading.Thread(target=self.serve_forever, args=(TICK_S,), name="discovery", daemon=True).start()

    def service_actions(self) -> None:
        """Tick; serve_forever calls it at every turn."""
        self._registry.tick()


class _Handler(BaseHTTPRequestHandler):
    server: DiscoveryServer
    timeout = 10.0

    def do_GET(self) -> None:
        """Answer with the page of the path, or 404; 503 where that fails now: Prometheus then keeps its list."""
        pages = self.server.pages
        status, kind, body = 404, "text/plain", f"there are {', '.join(pages)}\n".encode()
        if page := pages.get(self.path.partition("?")[0]):
            try:
                status, kind, body = 200, page[0], page[1]()
            except ConfigError as error:
                status, body = 503, str(error).encode()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing: one line a scrape is noise."""
