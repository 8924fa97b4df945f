"""vLLM's names: the gateway's three gauges, the histograms and the counters, off the same figures as ours."""

import math
import time
from collections.abc import Mapping
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.aliases import aliases
from dashboards.exporter import Exporter
from dashboards.metrics import ENGINE
from engine.events import AdapterFigures, EngineLoad, Event, RequestFinished, ScrapeGauges
from engine.rank_status import EncoderFigures
from tests.support.engine.load_figures import load
from tests.support.monitoring.exporter_fixture import ANSWERED, FACTS, MODEL, exporter_after, pools, scraped

pytestmark = pytest.mark.pure

WHERE = {"engine": "0", "model_name": MODEL}
FIGURES = {"waiting": 2, "running": 3, "waiting_tokens": 40, "preemptions": 1, "prefill_tokens": 100}
FIGURES |= {"queried_tokens": 90, "hit_tokens": 32}
EVENTS: list[Event] = [
    *ANSWERED,
    RequestFinished(2, "client_gone", 0, None, None, 0.5),
    RequestFinished(3, "slow_reader", 0, None, None, 0.5),
    RequestFinished(4, "dead", 0, None, None, 0.5),
    RequestFinished(5, "refused", 0, None, None, 0.1),
    EngineLoad(load(9, pools(35, 9), decode_tokens=50, **FIGURES)),
    EngineLoad(load(10, pools(35, 9), decode_tokens=53, **FIGURES), 0.008),
]
# vLLM 0.33's own bounds: what the `le=` selectors of its dashboards and alerts name.
_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_BOUNDS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
    ),
    "inter_token_latency_seconds": _GAPS,
    "request_time_per_output_token_seconds": _GAPS,
    "e2e_request_latency_seconds": _SECONDS,
    "request_queue_time_seconds": _SECONDS,
    "request_prefill_time_seconds": _SECONDS,
    "request_decode_time_seconds": _SECONDS,
    "request_inference_time_seconds": _SECONDS,
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_prompt_tokens": (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000),
}  # fmt: skip

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape() -> Samples:
    """What a scrape parses to after EVENTS."""
    exporter = exporter_after(*EVENTS, page_tokens=32)
    exporter.read_gauges = lambda: ScrapeGauges(encoder=EncoderFigures(queries=12, hits=5))
    families = text_string_to_metric_families(scraped(exporter))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def at(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"vllm:{name}", frozenset({**WHERE, **labels}.items())]


def test_what_the_gateway_reads_is_there_once() -> None:
    """Queue, running and KV use: one series each, a gauge; the KV use is that of the fuller pool; the cache's shape beside."""
    samples = scrape()
    for name, value in (("num_requests_running", 3), ("num_requests_waiting", 2), ("kv_cache_usage_perc", 0.5)):
        assert at(samples, name) == value
        assert sum(found == f"vllm:{name}" for found, _ in samples) == 1
    assert at(samples, "cache_config_info", block_size="32", num_gpu_blocks="90") == 1


def test_adapters_with_requests_are_named() -> None:
    """By state, apart by commas, with the number of slots and the time; one that is gone is not named."""
    exporter = exporter_after(*EVENTS, adapter_slots=4)
    shown = []
    both = ("a", "running", 2), ("a", "waiting", 1), ("b", "running", 1)
    for adapters in (both, (("b", "running", 0), ("b", "waiting", 3)), ()):
        exporter.read_gauges = partial(ScrapeGauges, adapters=tuple(AdapterFigures(*of) for of in adapters))
        samples = [s for family in text_string_to_metric_families(scraped(exporter)) for s in family.samples]
        info = [s for s in samples if s.name == "vllm:lora_requests_info"]
        shown.append([(s.labels["max_lora"], s.labels["running_lora_adapters"], s.labels["waiting_lora_adapters"]) for s in info])
        assert all(abs(s.value - time.time()) < 60 for s in info)
        ours = {tuple(s.labels.values()) for s in samples if s.name == "quartet_adapter_requests"}
        assert len(ours) == len(adapters)
    assert shown == [[("4", "a,b", "a")], [("4", "", "b")], [("4", "", "")]]


def test_counters_are_counters_with_vllms_names() -> None:
    """Tokens and preemptions as ours; ends summed by vLLM's reasons, refusals in none of them."""
    samples = scrape()
    assert at(samples, "prompt_tokens_total") == 11
    assert at(samples, "generation_tokens_total") == 4
    assert at(samples, "num_preemptions_total") == 1
    assert (at(samples, "prefix_cache_queries_total"), at(samples, "prefix_cache_hits_total")) == (90, 32)
    assert (at(samples, "mm_cache_queries_total"), at(samples, "mm_cache_hits_total")) == (12, 5)
    ends = {reason: at(samples, "request_success_total", finished_reason=reason) for reason in ("stop", "length", "abort", "error")}
    assert ends == {"stop": 1, "length": 0, "abort": 2, "error": 1}


def test_histograms_show_what_ours_show() -> None:
    """Every bucket, sum and count of an alias equals its source's; buckets are cumulative."""
    samples = scrape()
    for row in (row for row in ENGINE if row.alias and row.kind == "histogram"):
        ours = {key: value for key, value in samples.items() if key[0].startswith(f"{row.name}_")}
        assert ours
        for (name, labels), value in ours.items():
            theirs = f"vllm:{row.alias}{name.removeprefix(row.name)}"
            assert samples[theirs, labels | set(WHERE.items())] == value
    gaps = sorted((math.inf if b == "+Inf" else float(b), v) for (n, ls), v in samples.items()
                  if n == "vllm:inter_token_latency_seconds_bucket" for k, b in ls if k == "le")  # fmt: skip
    assert [value for _, value in gaps] == sorted(value for _, value in gaps)
    assert dict(gaps)[0.002] == dict(gaps)[math.inf] == 1
    assert dict(gaps)[0.001] == 0


def test_our_bounds_contain_all_of_vllms() -> None:
    """A selector such as le="0.5" of somebody else's alert finds its bucket; one that vLLM lacks too is not found."""
    rows = {row.alias: row for row in ENGINE if row.alias}
    for alias, bounds in VLLM_BOUNDS.items():
        assert set(bounds) <= set(rows[alias].buckets), alias
    assert 0.33 not in rows["time_to_first_token_seconds"].buckets


def test_a_source_that_is_missing_is_an_error() -> None:
    """An alias of nothing does not vanish in silence."""
    exporter = Exporter(FACTS)
    families = [family for family in exporter.collect() if family.name != "quartet_requests_waiting"]
    with pytest.raises(KeyError, match="quartet_requests_waiting"):
        list(aliases(families, "m"))
