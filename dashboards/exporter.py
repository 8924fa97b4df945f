"""Folds the engine's events into Prometheus metrics, and serves them on a port of their own.

Not Ray's metrics: those rebuild histograms from bucket midpoints, lag an interval and keep the series of dead workers. One
exporter a replica, so each gauge appears once a target.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

from dashboards.metrics import METRICS, OUTCOMES, Metric
from engine.errors import ConfigError
from engine.events import EngineFailed, EngineLoad, Event, FirstToken, RequestFinished, RequestStarted, Tokens

logger = logging.getLogger(__name__)


class Exporter:
    """A sink of events with its own registry; `serve` opens the port, `close` gives it back."""

    def __init__(self, about: Mapping[str, str]) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {metric.name: _collector(metric, self.registry) for metric in METRICS}
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        for outcome in OUTCOMES:
            self._of("quartet_requests").labels(outcome)
        self._of("quartet_engine_up").set(1)
        self._of("quartet_build_info").labels(**about).set(1)

    def __call__(self, event: Event) -> None:
        """Fold one event in; called on the front's loop."""
        match event:
            case Tokens():
                self._of("quartet_generation_tokens").inc(event.count)
                if event.gap_s is not None:
                    self._of("quartet_inter_token_seconds").observe(event.gap_s)
            case EngineLoad():
                self._load(event)
            case FirstToken():
                self._of("quartet_time_to_first_token_seconds").observe(event.ttft_s)
            case RequestStarted():
                self._of("quartet_requests_received").inc()
                self._of("quartet_prompt_tokens").inc(event.prompt_tokens)
                self._of("quartet_request_prompt_tokens").observe(event.prompt_tokens)
            case RequestFinished():
                self._finished(event)
            case EngineFailed():
                self._of("quartet_engine_up").set(0)

    def _finished(self, event: RequestFinished) -> None:
        self._of("quartet_requests").labels(event.outcome).inc()
        self._of("quartet_request_seconds").observe(event.e2e_s)
        self._of("quartet_request_generation_tokens").observe(event.output_tokens)
        if event.tpot_s is not None:
            self._of("quartet_time_per_output_token_seconds").observe(event.tpot_s)

    def _load(self, event: EngineLoad) -> None:
        figures = {
            "quartet_requests_running": event.running,
            "quartet_requests_waiting": event.waiting,
            "quartet_waiting_tokens": event.waiting_tokens,
            "quartet_preemptions": event.preemptions,
            "quartet_engine_steps": event.step,
            "quartet_engine_prefill_tokens": event.prefill_tokens,
            "quartet_engine_decode_tokens": event.decode_tokens,
        }
        for name, value in figures.items():
            self._of(name).set(value)
        for pool in event.pools:
            self._of("quartet_kv_pages").labels(pool.name).set(pool.total)
            self._of("quartet_kv_pages_used").labels(pool.name).set(pool.used)

    def _of(self, name: str) -> Any:
        return self._metrics[name]

    def text(self) -> str:
        """What a scrape gets."""
        return generate_latest(self.registry).decode()

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


def _collector(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    match metric.kind:
        case "counter":
            return Counter(metric.name, metric.help, metric.labels, registry=registry)
        case "gauge":
            return Gauge(metric.name, metric.help, metric.labels, registry=registry)
        case "histogram":
            return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)
