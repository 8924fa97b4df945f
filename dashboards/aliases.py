"""vLLM's names for our figures: what its dashboards, autoscalers and the Kubernetes inference gateway ask for.

Read off the canonical samples at each scrape: nothing is counted twice, and an alias cannot disagree with its source. Every one
carries vLLM's own labels, `model_name` and `engine`. Its histograms have our buckets, which contain all of vLLM's.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from dashboards.metrics import ENGINE, Metric

PREFIX = "vllm:"
_REASONS = {
    "stop": "stop", "length": "length", "error": "error", "dead": "error",
    "client_gone": "abort", "deadline": "abort", "slow_reader": "abort",
    "queue_timeout": "abort", "sibling_failed": "error",
}  # fmt: skip


@dataclass(frozen=True)
class Alias:
    """`name` (as a query says it, behind the prefix) shows the row `source`."""

    name: str
    source: str


ALIASES: tuple[Alias, ...] = (
    Alias("num_requests_running", "quartet_requests_running"),
    Alias("num_requests_waiting", "quartet_requests_waiting"),
    Alias("kv_cache_usage_perc", "quartet_kv_cache_usage_ratio"),
    Alias("prefix_cache_queries_total", "quartet_prefix_cache_queried_tokens_total"),
    Alias("prefix_cache_hits_total", "quartet_prefix_cache_hit_tokens_total"),
    Alias("num_preemptions_total", "quartet_preemptions_total"),
    Alias("prompt_tokens_total", "quartet_prompt_tokens_total"),
    Alias("generation_tokens_total", "quartet_generation_tokens_total"),
    Alias("time_to_first_token_seconds", "quartet_time_to_first_token_seconds"),
    Alias("inter_token_latency_seconds", "quartet_inter_token_latency_seconds"),
    Alias("request_time_per_output_token_seconds", "quartet_time_per_output_token_seconds"),
    Alias("e2e_request_latency_seconds", "quartet_e2e_request_latency_seconds"),
    Alias("request_queue_time_seconds", "quartet_request_queue_time_seconds"),
    Alias("request_prefill_time_seconds", "quartet_request_prefill_time_seconds"),
    Alias("request_decode_time_seconds", "quartet_request_decode_time_seconds"),
    Alias("request_inference_time_seconds", "quartet_request_inference_time_seconds"),
    Alias("request_prompt_tokens", "quartet_request_prompt_tokens"),
    Alias("request_generation_tokens", "quartet_request_generation_tokens"),
    Alias("iteration_tokens_total", "quartet_engine_step_tokens"),
)
SUCCESS = Alias("request_success_total", "quartet_requests_total")  # {finished_reason}; refused requests are none of vLLM's
CACHE_CONFIG = Alias("cache_config_info", "quartet_kv_pages")  # {block_size, num_gpu_blocks} of the full layers' pool

_ROWS: dict[str, Metric] = {row.name: row for row in ENGINE}


def aliases(families: Iterable[Family], model_name: str) -> Iterator[Family]:
    """vLLM's families for ours, which are given as collected. KeyError when a source is missing."""
    found = {family.name: family for family in families}
    labels = {"engine": "0", "model_name": model_name}
    for alias in ALIASES:
        yield _renamed(alias, found[_ROWS[alias.source].stem], labels)
    yield _success(found[_ROWS[SUCCESS.source].stem], labels)
    yield _cache_config(found[CACHE_CONFIG.source], found["quartet_kv_page_tokens"], labels)


def _renamed(alias: Alias, source: Family, labels: Mapping[str, str]) -> Family:
    row = _ROWS[alias.source]
    stem = PREFIX + (alias.name.removesuffix("_total") if row.kind == "counter" else alias.name)
    family = Family(stem, f"As {row.name}.", row.kind)
    cut = len(source.name)
    family.samples = [Sample(stem + s.name[cut:], {**s.labels, **labels}, s.value) for s in source.samples]
    return family


def _success(source: Family, labels: Mapping[str, str]) -> Family:
    stem = PREFIX + SUCCESS.name.removesuffix("_total")
    family = Family(stem, f"As {SUCCESS.source}, by vLLM's reasons.", "counter")
    sums = dict.fromkeys(_REASONS.values(), 0.0)
    for sample in source.samples:
        reason = _REASONS.get(sample.labels["outcome"])
        if reason is not None:
            sums[reason] += sample.value
    for reason, value in sums.items():
        family.add_sample(f"{stem}_total", {**labels, "finished_reason": reason}, value)
    return family


def _cache_config(pages: Family, page: Family, labels: Mapping[str, str]) -> Family:
    """Nothing until the core has reported its pools."""
    name = PREFIX + CACHE_CONFIG.name
    family = Family(name, "Always 1; the pool of the full layers.", "gauge")
    for sample in pages.samples:
        if sample.labels["group"] == "full":
            size = {"block_size": f"{page.samples[0].value:.0f}", "num_gpu_blocks": f"{sample.value:.0f}"}
            family.add_sample(name, {**labels, **size}, 1.0)
    return family
