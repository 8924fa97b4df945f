"""The exporter: each event moves the metrics that its row promises, and a scrape shows them."""

import re
import socket
import time
import urllib.request
from functools import partial
from itertools import pairwise
from typing import get_args
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry, Histogram

from dashboards import aliases as vllm
from dashboards import exporter as folding
from dashboards.derived import Derived
from dashboards.exporter import Exporter, Facts
from dashboards.metrics import DISCOVERY_METRICS, ENGINE, OUTCOMES, TARGET_LABELS, TPOT_BUCKETS, Metric
from dashboards.series import FastHistogram
from engine.errors import ConfigError
from engine.events import (
    AdapterFigures,
    ConversationRequest,
    EngineFailed,
    EngineLoad,
    Event,
    FirstToken,
    KeyDecision,
    KeyTokens,
    Outcome,
    ProcessFigures,
    RequestFinished,
    ScrapeGauges,
    Tokens,
)
from engine.protocol import DraftPosition, DraftSwitches, Load, PoolLoad
from engine.rank_status import EncoderFigures
from tests.support.engine.load_figures import load
from tests.support.loopback import LOOPBACKS
from tests.support.monitoring.exporter_fixture import ANSWERED, FACTS, exporter_after, pools, scraped

pytestmark = pytest.mark.pure

OBJECTIVES = {"ttft_objective_s": 0.5, "tpot_objective_s": 0.04}
GROUP = OBJECTIVES | {"slots": 16, "page_tokens": 32, "step_bound_s": 60}
POOLS = pools(7, 9)
LEVELS = {"waiting": 2, "running": 3, "waiting_tokens": 40, "preemptions": 1}
CACHE = {"queried_tokens": 90, "hit_tokens": 32, "evicted_pages": 5}
POSITIONS = [DraftPosition(0, 6, 5), DraftPosition(1, 6, 4), DraftPosition(2, 6, 2)]
DRAFTS = {"drafts": 3, "draft_positions": POSITIONS, "draft_switches": [DraftSwitches("better", 4)]}
WAITS = {"encoder_waiting": 2, "encoder_wait_s": 0.25}
COUNTS = CACHE | DRAFTS | WAITS | {"prefill_tokens": 100, "decode_tokens": 50}
EVENTS: list[Event] = [
    *ANSWERED,
    RequestFinished(2, "client_gone", 0, None, None, 0.3),
    KeyDecision("alice", "admitted"),
    KeyDecision("", "unauthenticated"),
    KeyTokens("alice", 17),
    KeyTokens("alice", 4),
    ConversationRequest("kept"),
    ConversationRequest("kept"),
    ConversationRequest("moved"),
    EngineLoad(load(7, POOLS, **(LEVELS | {"prefill_tokens": 80, "decode_tokens": 44}))),
    EngineLoad(load(9, POOLS, **(LEVELS | COUNTS)), 0.03),
    EngineLoad(load(9, POOLS, **(LEVELS | COUNTS | {"waiting": 1, "running": 4, "waiting_tokens": 20}))),
]
EXPECTED = {
    'quartet_key_requests_total{key="alice",verdict="admitted"}': 1,
    'quartet_key_requests_total{key="",verdict="unauthenticated"}': 1,
    'quartet_key_tokens_total{key="alice"}': 21,
    'quartet_conversation_requests_total{home="new"}': 0,
    'quartet_conversation_requests_total{home="kept"}': 2,
    'quartet_conversation_requests_total{home="moved"}': 1,
    "quartet_time_to_first_token_seconds_count": 1,
    "quartet_time_to_first_token_seconds_sum": 0.012,
    "quartet_time_per_output_token_seconds_count": 1,
    "quartet_time_per_output_token_seconds_sum": 0.002,
    "quartet_inter_token_latency_seconds_count": 1,
    "quartet_inter_token_latency_seconds_sum": 0.002,
    "quartet_request_queue_time_seconds_sum": 0.004,
    "quartet_request_prefill_time_seconds_sum": 0.008,
    "quartet_request_decode_time_seconds_sum": 0.006,
    "quartet_request_inference_time_seconds_sum": 0.014,
    "quartet_e2e_request_latency_seconds_count": 1,
    "quartet_e2e_request_latency_seconds_sum": 0.02,
    "quartet_prompt_tokens_total": 11,
    "quartet_generation_tokens_total": 4,
    "quartet_requests_received_total": 1,
    'quartet_requests_total{outcome="stop"}': 1,
    'quartet_requests_total{outcome="client_gone"}': 1,
    'quartet_requests_total{outcome="dead"}': 0,
    'quartet_slo_requests_total{slo="ttft",verdict="good"}': 1,
    'quartet_slo_requests_total{slo="ttft",verdict="bad"}': 0,
    'quartet_slo_requests_total{slo="tpot",verdict="good"}': 1,
    "quartet_requests_running": 4,
    "quartet_requests_waiting": 1,
    "quartet_engine_slots": 16,
    "quartet_preemptions_total": 1,
    "quartet_engine_prefill_tokens_total": 100,
    "quartet_engine_step_seconds_count": 1,
    "quartet_engine_step_seconds_sum": 0.015,
    "quartet_engine_step_tokens_sum": 13,
    'quartet_kv_pages{group="full"}': 90,
    'quartet_kv_usage_ratio{group="sliding"}': 0.1,
    'quartet_kv_pages_cached{group="full"}': 0,
    "quartet_prefix_cache_queried_tokens_total": 90,
    "quartet_prefix_cache_hit_tokens_total": 32,
    "quartet_prefix_cache_evicted_pages_total": 5,
    "quartet_draft_rows_total": 6,
    "quartet_draft_tokens_total": 18,
    "quartet_accepted_draft_tokens_total": 11,
    'quartet_verified_drafts_by_position_total{position="2"}': 6,
    'quartet_accepted_drafts_by_position_total{position="1"}': 4,
    "quartet_drafts": 3,
    'quartet_draft_switches_total{cause="better"}': 4,
    "quartet_encoder_waiting": 2,
    "quartet_encoder_wait_seconds_total": 0.25,
    "quartet_kv_cache_usage_ratio": 0.1,
    "quartet_engine_step_bound_seconds": 60,
    'quartet_build_info{attention="reference",build="1",model_name="google/gemma-4-31B-it",tp="4",weights="fp8"}': 1,
    "quartet_engine_ranks": 4,
    "quartet_engine_up": 1,
}


def values(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)}


def test_events_become_figures() -> None:
    """Every figure of the table above; a second round of events moves the counters on, and a scrape between moves nothing."""
    exporter = exporter_after(*EVENTS, **GROUP)
    for _ in range(2):
        shown = values(scraped(exporter))
        assert {name: shown[name] for name in EXPECTED} == pytest.approx(EXPECTED)
    for event in EVENTS:
        exporter(event)
    assert values(scraped(exporter))["quartet_generation_tokens_total"] == 8
    assert values(scraped(exporter))["quartet_preemptions_total"] == 1, "the core counts since boot: told twice is not done twice"


def test_every_row_of_the_table_is_exposed_with_its_help_and_kind() -> None:
    """And nothing else of ours is; what counts is a counter, and no series has a `_created` beside it."""
    text = scraped(exporter_after(*EVENTS, **GROUP))
    exposed = set(re.findall(r"^# TYPE (quartet_\w+) (\w+)$", text, re.MULTILINE))
    assert exposed == {(metric.name, metric.kind) for metric in ENGINE}
    assert all(f"# HELP {metric.name} {metric.help}\n" in text for metric in ENGINE)
    assert "_created" not in text


SCRAPED = {
    "load": Load, "pools": PoolLoad, "draft_positions": DraftPosition, "draft_switches": DraftSwitches,
    "processes": ProcessFigures, "encoder": EncoderFigures, "gauges": ScrapeGauges, "facts": Facts,
    "adapters": AdapterFigures,
}  # fmt: skip
EVENT_TYPES = {kind.__name__: kind for kind in (*get_args(Event), *get_args(Derived))}


def faults_of(row: Metric) -> list[str]:
    """What is wrong with the source of a row."""
    origin, _, field = row.source.partition(".")
    kind = (EVENT_TYPES | SCRAPED).get(origin)
    if kind is None:
        return [row.source]
    named = {"group", "rank"} if origin in ("pools", "processes") else set()
    needed = {*row.labels} - named | {*filter(None, [field])}
    return [name for name in needed if not (hasattr(kind, name) or name in kind.__annotations__)]


def test_every_source_is_a_field_of_what_happens() -> None:
    """Of an event or of what a scrape reads, with the row's labels; and every event is one row's source. Planted: typos."""
    assert [fault for row in ENGINE for fault in faults_of(row)] == []
    for source, labels in (("FirstTokens", ""), ("FirstToken.ttft", ""), ("load.runing", ""), ("RequestFinished", "end")):
        assert faults_of(Metric("quartet_x_total", "", source, labels))
    assert EVENT_TYPES.keys() - {row.source.partition(".")[0] for row in ENGINE} == {"EngineLoad", "EngineFailed"}


def test_a_metric_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row more in the table is exposed, kept for discovery, and shown under vLLM's name."""
    alias = "spec_decode_num_draft_tokens_total"
    row = Metric("quartet_draft_tokens_total", "Tokens drafted.", "load.decode_tokens", alias=alias)
    for module in (folding, vllm):
        monkeypatch.setattr(module, "ENGINE", (*ENGINE, row))
    shown = exporter_after(*EVENTS)
    assert values(scraped(shown))["quartet_draft_tokens_total"] == 50
    assert f'vllm:{alias}{{engine="0",model_name="google/gemma-4-31B-it"}} 50.0' in scraped(shown)
    assert shown.counts()["quartet_draft_tokens_total", ()] == 50


def test_names_follow_the_convention() -> None:
    """Counters end in _total, seconds say so, no row says who is scraped, and no name stands twice."""
    rows = [*ENGINE, *DISCOVERY_METRICS]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.name.startswith("quartet_")
        assert row.name.endswith("_total") == (row.kind == "counter")
        assert bool(row.buckets) == (row.kind == "histogram")
    assert not {label for row in ENGINE for label in row.labels} & set(TARGET_LABELS)


@pytest.mark.parametrize(
    ("event", "moved"),
    [
        (FirstToken(1, 0.5), "ttft good"),
        (FirstToken(1, 0.51), "ttft bad"),
        (RequestFinished(1, "error", 0, None, None, 0.1), "ttft bad"),
        (RequestFinished(1, "dead", 0, None, None, 0.1), "ttft bad"),
        (RequestFinished(1, "client_gone", 0, None, None, 0.6), "ttft bad"),
        (RequestFinished(1, "client_gone", 0, None, None, 0.4), ""),
        (RequestFinished(1, "refused", 0, None, None, 9.0), ""),
        (RequestFinished(1, "length", 2, 0.1, 0.04, 0.2), "tpot good"),
        (RequestFinished(1, "length", 2, 0.1, 0.05, 0.2), "tpot bad"),
        (RequestFinished(1, "length", 1, 0.1, None, 0.2), ""),
    ],
)
def test_objectives_are_judged_once_a_request(event: Event, moved: str) -> None:
    """At the first token, or at an end without one that was ours or late; a refusal and an early leaver are not judged."""
    shown = values(scraped(exporter_after(event, **OBJECTIVES)))
    judged = {f"{slo} {verdict}" for slo in ("ttft", "tpot") for verdict in ("good", "bad")
              if shown[f'quartet_slo_requests_total{{slo="{slo}",verdict="{verdict}"}}']}  # fmt: skip
    assert judged == ({moved} if moved else set())


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_end_counts_once(outcome: Outcome) -> None:
    """Under its own name."""
    shown = values(scraped(exporter_after(RequestFinished(1, outcome, 0, None, None, 0.1))))
    ends = {name: shown[f'quartet_requests_total{{outcome="{name}"}}'] for name in OUTCOMES}
    assert ends == {**dict.fromkeys(OUTCOMES, 0), outcome: 1}


def test_gauges_are_read_at_the_scrape() -> None:
    """A rank that hangs is seen to, by each scrape anew; what it has counted counts on."""
    exporter = exporter_after()
    for stall, late in ((0.0, 0), (7.5, 1)):
        rank = ProcessFigures("1", True, stall, 0.009, 2e-5, late, 1.5)
        exporter.read_gauges = partial(ScrapeGauges, 3, (rank,), EncoderFigures(*range(11)))
        shown = values(scraped(exporter))
        assert shown['quartet_rank_stall_seconds{rank="1"}'] == stall
        assert shown['quartet_rank_up{rank="1"}'] == 1
        assert shown['quartet_rank_device_busy_seconds{rank="1"}'] == 0.009
        assert shown['quartet_rank_device_idle_seconds{rank="1"}'] == 2e-5
        assert shown['quartet_rank_late_compilations_total{rank="1"}'] == late
        assert shown["quartet_requests_in_flight"] == 3
        assert shown['quartet_rank_encoder_seconds_total{rank="1"}'] == 1.5
        rows = [row for row in ENGINE if row.source.startswith("encoder.")]
        assert [shown[row.name] for row in rows] == list(range(1, 11))


def test_key_holders_have_so_many_series_at_most() -> None:
    """Keys come and go: 256 names have series of their own, those that come later share one, and nothing is left out."""
    exporter = exporter_after()
    for number in [*range(300), *range(300)]:
        exporter(KeyTokens(f"k{number}", 2))
    shown = {name: value for name, value in values(scraped(exporter)).items() if name.startswith("quartet_key_tokens_total")}
    assert len(shown) == 257
    assert shown['quartet_key_tokens_total{key="k255"}'] == 4
    assert shown['quartet_key_tokens_total{key="other"}'] == 4 * 44


def test_counts_are_what_a_scrape_says() -> None:
    """Every counter but the ranks', with its labels: what is left in the registry when the group is gone."""
    exporter = exporter_after(*EVENTS, **GROUP)
    rank = ProcessFigures("1", True, 0.0, 0.0, 0.0, late_compilations=2, encoder_s=0.0)
    exporter.read_gauges = partial(ScrapeGauges, processes=(rank,))
    shown = values(scraped(exporter))
    counts = exporter.counts()
    assert counts["quartet_generation_tokens_total", ()] == 4
    assert counts["quartet_requests_total", ("stop",)] == 1
    assert {name for name, _ in counts} == {row.name for row in ENGINE if row.kind == "counter" and "rank" not in row.labels}
    assert all(shown[name] == value for (name, labels), value in counts.items() if not labels)


ROW = next(row for row in ENGINE if row.name == "quartet_inter_token_latency_seconds")


def observed(kind: type[FastHistogram] | None) -> list[tuple[str, dict[str, str], float]]:
    """The samples of so many values, bounds themselves among them, in a histogram of that kind or in prometheus-client's."""
    registry = CollectorRegistry()
    made = kind(ROW) if kind else Histogram(ROW.name, ROW.help, buckets=ROW.buckets, registry=registry)
    for value in [0.0, *ROW.buckets, *(bound * 1.01 for bound in ROW.buckets), 1e9]:
        if isinstance(made, FastHistogram):
            made.add((), value)
        else:
            made.observe(value)
    family = made.family() if isinstance(made, FastHistogram) else next(iter(made.collect()))
    return [(sample.name, sample.labels, sample.value) for sample in family.samples if not sample.name.endswith("_created")]


def test_the_histogram_of_every_token_is_as_the_librarys() -> None:
    """The same samples. Planted: a bound that counts in the bucket above it."""

    class Above(FastHistogram):
        def add(self, _: tuple[str, ...], seen: float) -> None:
            super().add(_, seen * (1 + 1e-12))

    assert observed(FastHistogram) == observed(None)
    assert observed(Above) != observed(None)


def test_buckets_resolve_what_gemma_does() -> None:
    """Between 2 and 40 ms per token no bucket is wider than half its lower end; every histogram ascends."""
    inside = [bound for bound in TPOT_BUCKETS if 0.002 <= bound <= 0.04]
    assert inside[0] == 0.002
    assert inside[-1] == 0.04
    assert all(upper / lower <= 1.5 for lower, upper in pairwise(inside))
    for metric in ENGINE:
        assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize("host", LOOPBACKS)
def test_a_scrape_over_loopback_and_the_engines_end(host: str) -> None:
    """The port is ours alone, shows engine_up 0 after the end, and is free again after close."""
    exporter = exporter_after(EngineFailed())
    url = exporter.serve(host, 0)
    assert urlsplit(url).hostname == host
    with urllib.request.urlopen(url, timeout=5) as reply:
        assert values(reply.read().decode())["quartet_engine_up"] == 0
    port = int(url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ConfigError, match=rf"metrics.port: cannot listen on {host}:{port}: .*\(port 0 is a free one"):
        Exporter(FACTS).serve(host, port)
    exporter.close()
    exporter.close()
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
        pass


def cost_us(exporter: Exporter, event: Event, repeats: int = 2000) -> float:
    """CPU microseconds an event, the best of five rounds: a neighbour's load can only add."""
    best = float("inf")
    for _ in range(5):
        started = time.thread_time_ns()
        for _ in range(repeats):
            exporter(event)
        best = min(best, (time.thread_time_ns() - started) / repeats / 1000)
    return best


def test_a_token_costs_microseconds() -> None:
    """Ten times the measured cost is the bound; an event that scrapes, as a planted fault, is a hundred times beyond it."""

    class Scraping(Exporter):
        def __call__(self, event: Event) -> None:
            super().__call__(event)
            for _ in range(10):
                scraped(self)

    assert cost_us(exporter_after(*EVENTS, **GROUP), Tokens(1, [0.01])) < 30
    assert cost_us(Scraping(FACTS), Tokens(1, [0.01]), repeats=2) > 3000
