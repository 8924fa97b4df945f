"""Applies the engine's events to the table's metrics, and serves them on a port of their own.

An event costs microseconds on the front's loop; gauges are read at each scrape. Ray's metrics rebuild histograms from bucket
midpoints, lag, and keep dead workers' series.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from dashboards.aliases import aliases
from dashboards.derived import Derivation
from dashboards.metrics import ENGINE, RETIRED, Metric
from dashboards.page_server import PageServer, metrics_page
from dashboards.series import Counts, FastHistogram, Series
from engine.errors import ConfigError
from engine.events import EngineFailed, Event, ScrapeGauges

_MOST_SERIES = 256  # of a row

Read = Callable[[Any], Any]

logger = logging.getLogger(__name__)


class Facts(NamedTuple):
    """Objectives and bounds in seconds."""

    model_name: str
    build: str
    attention: str
    weights: str
    tp: int
    slots: int
    page_tokens: int
    step_bound_s: float
    ttft_objective_s: float
    tpot_objective_s: float
    adapter_slots: int = 0
    up: int = 1


class Exporter(Collector):
    """A sink of events. read_gauges: called from the scrape's thread."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.read_gauges: Callable[[], ScrapeGauges] = ScrapeGauges
        self._derive = Derivation(facts.ttft_objective_s, facts.tpot_objective_s)
        self._metrics: list[Series | FastHistogram] = []
        self._updates: dict[str, list[Callable[[Any], None]]] = defaultdict(list)  # by the name of the event's class
        self._levels: list[tuple[str, Series, Read, Read]] = []  # where from, what it sets, label values, value
        for row in ENGINE:
            self._add(row)
        self._scraping = threading.Lock()
        self._server: PageServer | None = None
        self.page = metrics_page(self)

    def _add(self, row: Metric) -> None:
        origin, _, field = row.source.partition(".")
        value: Read = attrgetter(field) if field else lambda _: 1
        names = row.labels

        def labels(item: Any) -> tuple[str, ...]:
            return tuple(str(getattr(item, name)) for name in names)

        metric = FastHistogram(row) if row.buckets else Series(row, _MOST_SERIES)
        self._metrics.append(metric)
        if origin[0].isupper():
            self._updates[origin].append(lambda event: metric.add(labels(event), value(event)))
        elif isinstance(metric, Series):
            self._levels.append((origin, metric, labels, value))

    def __call__(self, event: Event) -> None:
        """Called on the front's loop."""
        if isinstance(event, EngineFailed):
            self.facts = self.facts._replace(up=0)
        for happened in (event, *self._derive(event)):
            for update in self._updates.get(type(happened).__name__, ()):
                update(happened)

    def _refresh(self) -> None:
        gauges = self.read_gauges()
        last = self._derive.last
        items: dict[str, Sequence[Any]] = {
            "facts": [self.facts],
            "gauges": [gauges],
            "encoder": [gauges.encoder],
            "processes": gauges.processes,
            "adapters": gauges.adapters,
        }
        if last is not None:
            load = last.load
            items |= {"load": [load], "pools": load.pools}
            items |= {"draft_positions": load.draft_positions, "draft_switches": load.draft_switches}
        for origin, series, labels, value in self._levels:
            if origin == "adapters":
                series.values.clear()  # those of before may be gone
            for item in items.get(origin, ()):
                series.values[labels(item)] = value(item)

    def collect(self) -> Iterator[Family]:
        with self._scraping:
            self._refresh()
            families = [metric.family() for metric in self._metrics]
        yield from families
        yield from aliases(families, self.facts.model_name)

    def counts(self) -> Counts:
        with self._scraping:
            self._refresh()
            lasting = [metric for metric in self._metrics if isinstance(metric, Series) and metric.row.name in RETIRED]
            return {(series.row.name, labels): value for series in lasting for labels, value in series.values.copy().items()}

    def serve(self, host: str, port: int) -> str:
        """Serves in a thread; port 0: a free one. Returns the URL. ConfigError: taken."""
        try:
            self._server = PageServer(host, port, {"/metrics": self.page}, "exporter")
        except OSError as error:
            advice = "port 0 is a free one for each replica"
            raise ConfigError(f"metrics.host, metrics.port: cannot listen on {host}:{port}: {error.strerror} ({advice})") from error
        logger.info("metrics on %s", self._server.url)
        return self._server.url

    def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.stop()
            self._server = None
