"""Folds the engine's events into the table's metrics, and serves them on a port of their own.

    event --> Exporter(event)        a few microseconds, on the front's loop: counters move, histograms observe
    scrape --> collect --> refresh   what is a level and not an event (ages, open requests) is read then
                       `-> aliases   vLLM's names, off the same samples

Not Ray's metrics: those rebuild histograms from bucket midpoints, lag an interval and keep the series of dead workers. One
exporter a replica, so each gauge appears once a target.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, assert_never
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from dashboards.aliases import aliases
from dashboards.fast_histogram import FastHistogram
from dashboards.metrics import CORE_ENDS, ENGINE, OUTCOMES, SLOS, VERDICTS, Metric
from engine.errors import ConfigError
from engine.events import (
    EngineFailed,
    EngineLoad,
    Event,
    FirstToken,
    KeyDecision,
    KeyTokens,
    ProcessFigures,
    RequestFinished,
    RequestStarted,
    Scheduled,
    ScrapeGauges,
    Tokens,
)

_COMPLETED = ("stop", "length")
_KEYS_SHOWN = 256  # names of API keys' holders that have series of their own; the others share one
_OURS = ("error", "dead", "deadline")  # ends without a token that count against the objective at once

Counts = dict[tuple[str, tuple[str, ...]], float]  # (row, label values) -> value

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Facts:
    """What does not change while the group lives. Objectives and bounds in seconds; `aliases`: vLLM's names too."""

    slots: int = 0
    page_tokens: int = 0
    boot_s: float = 0.0
    step_bound_s: float = 0.0
    heartbeat_bound_s: float = 0.0
    ttft_objective_s: float = 1.0
    tpot_objective_s: float = 0.05
    aliases: bool = True


class Exporter(Collector):
    """A sink of events with its own registry; `serve` opens the port, `close` gives it back.

    about   labels of quartet_build_info: model_name, build, attention, tp
    read_gauges  called at each scrape, from the scrape's own thread
    """

    def __init__(
        self, about: Mapping[str, str], facts: Facts | None = None, read_gauges: Callable[[], ScrapeGauges] = ScrapeGauges
    ) -> None:
        self.facts = facts or Facts()
        self.read_gauges = read_gauges
        self.registry = CollectorRegistry(auto_describe=False)
        self._about = dict(about)
        self._own = CollectorRegistry()
        self._metrics: dict[str, Any] = {metric.name: _collector(metric, self._own) for metric in ENGINE}
        self._load: EngineLoad | None = None
        self._key_names: set[str] = set()
        self._exported: dict[str, int] = {}
        self._scraping = threading.Lock()
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._cache()
        self._state_facts()
        self.registry.register(self)

    def _cache(self) -> None:
        """Children that exist from the start, so that a series is there before its first event, and those on the hot path."""
        self._outcomes = {outcome: self._of("quartet_requests_total").labels(outcome) for outcome in OUTCOMES}
        self._ends = {end: self._of("quartet_core_requests_total").labels(end) for end in CORE_ENDS}
        judged = self._of("quartet_slo_requests_total")
        self._judged = {(slo, verdict): judged.labels(slo, verdict) for slo in SLOS for verdict in VERDICTS}
        self._tokens = 0  # a plain sum: the library's counter takes a lock, which every token would pay for
        self._observe_gap = self._of("quartet_inter_token_latency_seconds").observe

    def _state_facts(self) -> None:
        facts = self.facts
        self._of("quartet_engine_up").set(1)
        self._of("quartet_build_info").labels(**self._about).set(1)
        self._of("quartet_engine_ranks").set(int(self._about["tp"]))
        self._of("quartet_engine_slots").set(facts.slots)
        self._of("quartet_engine_boot_seconds").set(facts.boot_s)
        self._of("quartet_engine_start_time_seconds").set(time.time())
        self._of("quartet_engine_bound_seconds").labels("step").set(facts.step_bound_s)
        self._of("quartet_engine_bound_seconds").labels("heartbeat").set(facts.heartbeat_bound_s)
        self._of("quartet_slo_objective_seconds").labels("ttft").set(facts.ttft_objective_s)
        self._of("quartet_slo_objective_seconds").labels("tpot").set(facts.tpot_objective_s)
        self._of("quartet_kv_page_tokens").set(facts.page_tokens)

    # -- events

    def __call__(self, event: Event) -> None:
        """Fold one event in; called on the front's loop."""
        match event:
            case Tokens():
                self._tokens += event.count
                if event.gap_s is not None:
                    self._observe_gap(event.gap_s / event.count)
            case EngineLoad():
                self._loaded(event)
            case Scheduled():
                self._of("quartet_request_queue_time_seconds").observe(event.queue_s)
            case FirstToken():
                self._first(event)
            case RequestStarted():
                self._of("quartet_requests_received_total").inc()
                self._of("quartet_prompt_tokens_total").inc(event.prompt_tokens)
                self._of("quartet_request_prompt_tokens").observe(event.prompt_tokens)
            case RequestFinished():
                self._finished(event)
            case KeyDecision() | KeyTokens():
                self._keyed(event)
            case EngineFailed():
                self._of("quartet_engine_up").set(0)
            case _:
                assert_never(event)

    def _keyed(self, event: KeyDecision | KeyTokens) -> None:
        label = self._key_label(event.key)
        if isinstance(event, KeyTokens):
            self._of("quartet_key_tokens_total").labels(label).inc(event.count)
        else:
            self._of("quartet_key_requests_total").labels(label, event.verdict).inc()

    def _key_label(self, name: str) -> str:
        """Keys come and go while a replica lives: not every name may have series for ever."""
        if len(self._key_names) < _KEYS_SHOWN:
            self._key_names.add(name)
        return name if name in self._key_names or not name else "other"

    def _first(self, event: FirstToken) -> None:
        self._of("quartet_time_to_first_token_seconds").observe(event.ttft_s)
        self._judge("ttft", event.ttft_s <= self.facts.ttft_objective_s)
        if event.queue_s is not None:
            self._of("quartet_request_prefill_time_seconds").observe(event.ttft_s - event.queue_s)

    def _finished(self, event: RequestFinished) -> None:
        self._outcomes[event.outcome].inc()
        if event.outcome == "dead":
            self._of("quartet_requests_lost_total").inc()
        self._of("quartet_request_generation_tokens").observe(event.output_tokens)
        if event.tpot_s is not None:
            self._of("quartet_time_per_output_token_seconds").observe(event.tpot_s)
            self._judge("tpot", event.tpot_s <= self.facts.tpot_objective_s)
        if event.ttft_s is None:
            self._without_token(event)
        elif event.outcome in _COMPLETED:
            self._completed(event, event.ttft_s)

    def _without_token(self, event: RequestFinished) -> None:
        """A user who never saw a token: our failure, or longer than promised, or nobody's fault and not judged."""
        late = event.e2e_s > self.facts.ttft_objective_s and event.outcome != "refused"
        if event.outcome in _OURS or late:
            self._judge("ttft", good=False)

    def _completed(self, event: RequestFinished, ttft_s: float) -> None:
        self._of("quartet_e2e_request_latency_seconds").observe(event.e2e_s)
        decode_s = 0.0 if event.tpot_s is None else event.tpot_s * (event.output_tokens - 1)
        self._of("quartet_request_decode_time_seconds").observe(decode_s)
        if event.queue_s is not None:
            self._of("quartet_request_inference_time_seconds").observe(ttft_s - event.queue_s + decode_s)

    def _judge(self, slo: str, good: bool) -> None:
        self._judged[slo, "good" if good else "bad"].inc()

    # -- the core's figures

    def _loaded(self, event: EngineLoad) -> None:
        """Gauges are set at the scrape; what counts since boot moves the counters on by what is new."""
        last, self._load = self._load, event
        if last is None or event.load.step == last.load.step or event.interval_s is None:
            return
        before, load = last.load, event.load
        steps = load.step - before.step
        tokens = load.prefill_tokens + load.decode_tokens - before.prefill_tokens - before.decode_tokens
        self._of("quartet_engine_step_seconds").observe(event.interval_s / steps)
        self._of("quartet_engine_step_tokens").observe(tokens / steps)

    def _refresh(self) -> None:
        _count_to(self._of("quartet_generation_tokens_total"), "tokens", self._tokens, self._exported)
        if self._load is not None:
            self._show_load(self._load)
        gauges = self.read_gauges()
        self._of("quartet_requests_in_flight").set(gauges.open)
        for process in gauges.processes:
            self._show_process(process)

    def _show_load(self, event: EngineLoad) -> None:
        load = event.load
        self._of("quartet_requests_running").set(load.running)
        self._of("quartet_requests_waiting").set(load.waiting)
        self._of("quartet_waiting_tokens").set(load.waiting_tokens)
        _count_to(self._of("quartet_core_requests_received_total"), "received", load.received, self._exported)
        for end, child in self._ends.items():
            _count_to(child, end, getattr(load, end), self._exported)
        for name, value in _counted(event).items():
            _count_to(self._of(name), name, value, self._exported)
        for pool in load.pools:
            self._of("quartet_kv_pages").labels(pool.name).set(pool.total)
            self._of("quartet_kv_pages_used").labels(pool.name).set(pool.used)
            self._of("quartet_kv_pages_cached").labels(pool.name).set(pool.cached)
            self._of("quartet_kv_usage_ratio").labels(pool.name).set(pool.usage)
        self._of("quartet_kv_cache_usage_ratio").set(max((pool.usage for pool in load.pools), default=0.0))

    def _show_process(self, process: ProcessFigures) -> None:
        values = {
            "quartet_rank_up": process.up,
            "quartet_rank_stall_seconds": process.stall_s,
            "quartet_rank_progress_age_seconds": process.progress_age_s,
            "quartet_rank_heartbeat_age_seconds": process.heartbeat_age_s,
            "quartet_rank_step_seconds": process.step_s,
            "quartet_rank_memory_bytes": process.memory_bytes,
            "quartet_rank_device_busy_seconds": process.busy_s,
            "quartet_rank_device_idle_seconds": process.idle_s,
        }
        for name, value in values.items():
            self._of(name).labels(process.name).set(value)
        for name, count in (("steps", process.steps), ("late_compilations", process.late_compilations)):
            child = self._of(f"quartet_rank_{name}_total").labels(process.name)
            _count_to(child, f"rank {process.name} {name}", count, self._exported)

    # -- scrapes

    def collect(self) -> Iterator[Family]:
        """Every family: ours, then the aliases."""
        with self._scraping:
            self._refresh()
            families = [_bare(family) for family in self._own.collect()]
        yield from families
        if self.facts.aliases:
            yield from aliases(families, self._about["model_name"])

    def text(self) -> str:
        """What a scrape gets."""
        return generate_latest(self.registry).decode()

    def counts(self) -> Counts:
        """Every counter's value now, but those of single ranks: what discovery keeps when the group has gone."""
        with self._scraping:
            self._refresh()
            rows = [row for row in ENGINE if row.kind == "counter" and "rank" not in row.labels]
            found: Counts = {}
            for row in rows:
                for family in self._of(row.name).collect():
                    values = ((tuple(s.labels[label] for label in row.labels), s) for s in family.samples if s.name == row.name)
                    found |= {(row.name, labels): sample.value for labels, sample in values}
        return found

    def serve(self, host: str, port: int) -> str:
        """Open the port (0: a free one) in a thread; returns the URL. ConfigError when it is taken."""
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError(f"metrics: cannot listen on {host}:{port}: {error.strerror}") from error
        url = f"http://{host}:{self._server.server_port}/metrics"
        logger.info("metrics on %s", url)
        return url

    def close(self) -> None:
        """Give the port back; idempotent."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = None

    def _of(self, name: str) -> Any:
        return self._metrics[name]


def _counted(event: EngineLoad) -> dict[str, int]:
    load = event.load
    return {
        "quartet_preemptions_total": load.preemptions,
        "quartet_engine_steps_total": load.step,
        "quartet_engine_prefill_tokens_total": load.prefill_tokens,
        "quartet_engine_decode_tokens_total": load.decode_tokens,
        "quartet_prefix_cache_queried_tokens_total": load.queried_tokens,
        "quartet_prefix_cache_hit_tokens_total": load.hit_tokens,
        "quartet_prefix_cache_evicted_pages_total": load.evicted_pages,
    }


def _count_to(counter: Counter, key: str, value: int, seen: dict[str, int]) -> None:
    """Move a counter to a figure that counts since boot; `seen` remembers where it stands."""
    ahead = value - seen.get(key, 0)
    if ahead > 0:
        counter.inc(ahead)
        seen[key] = value


def _bare(family: Family) -> Family:
    """Without the `_created` samples: a time a series, which nobody asks for."""
    family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return family


def _collector(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | FastHistogram:
    match metric.kind:
        case "counter":
            return Counter(metric.stem, metric.help, metric.labels, registry=registry)
        case "gauge":
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)
        case "histogram":
            return FastHistogram(metric, registry)
