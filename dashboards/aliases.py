"""vLLM's names for our metrics, from our samples at each scrape. Our buckets contain all of vLLM's."""

import time
from collections.abc import Iterable, Iterator

from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from dashboards.metrics import ENGINE, Metric

PREFIX = "vllm:"
_REASONS = {
    "stop": {"stop"},
    "length": {"length"},
    "abort": {"client_gone", "deadline", "slow_reader", "queue_timeout"},
    "error": {"error", "dead", "sibling_failed"},
}

SUCCESS = "vllm:request_success"  # _total{finished_reason}, of quartet_requests_total; refused requests are none of vLLM's
LORA = "vllm:lora_requests_info"  # {max_lora, running_lora_adapters, waiting_lora_adapters}, of quartet_adapter_requests
CACHE_CONFIG = "vllm:cache_config_info"  # {block_size, num_gpu_blocks}, of quartet_kv_pages of the full layers


def aliases(families: Iterable[Family], model_name: str) -> Iterator[Family]:
    """KeyError: a source is missing."""
    by_name = {family.name: family for family in families}
    labels = {"engine": "0", "model_name": model_name}
    for row in ENGINE:
        if row.alias:
            yield _renamed(row, by_name[row.stem], labels)
    yield _success(by_name["quartet_requests"], labels)
    yield _lora(by_name["quartet_adapter_requests"], by_name["quartet_adapter_slots"], labels)
    yield _cache_config(by_name["quartet_kv_pages"], by_name["quartet_kv_page_tokens"], labels)


def _renamed(row: Metric, source: Family, labels: dict[str, str]) -> Family:
    stem = PREFIX + (row.alias.removesuffix("_total") if row.kind == "counter" else row.alias)
    family = Family(stem, f"As {row.name}.", row.kind)
    cut = len(source.name)
    family.samples = [Sample(stem + s.name[cut:], s.labels | labels, s.value) for s in source.samples]
    return family


def _success(source: Family, labels: dict[str, str]) -> Family:
    family = Family(SUCCESS, "As quartet_requests_total, by vLLM's reasons.", "counter")
    for reason, outcomes in _REASONS.items():
        ended = sum(sample.value for sample in source.samples if sample.labels["outcome"] in outcomes)
        family.add_sample(f"{SUCCESS}_total", labels | {"finished_reason": reason}, ended)
    return family


def _lora(requests: Family, slots: Family, labels: dict[str, str]) -> Family:
    family = Family(LORA, "Seconds since 1970; names of adapters with requests, apart by commas.", "gauge")
    shown = {"max_lora": f"{slots.samples[0].value:.0f}"}
    for state in ("running", "waiting"):
        names = [s.labels["adapter"] for s in requests.samples if s.labels["state"] == state and s.value]
        shown[f"{state}_lora_adapters"] = ",".join(sorted(names))
    family.add_sample(LORA, labels | shown, time.time())
    return family


def _cache_config(pages: Family, page: Family, labels: dict[str, str]) -> Family:
    """Empty until the core has reported its pools."""
    family = Family(CACHE_CONFIG, "Always 1; the pool of the full layers.", "gauge")
    for sample in pages.samples:
        if sample.labels["group"] == "full":
            size = {"block_size": f"{page.samples[0].value:.0f}", "num_gpu_blocks": f"{sample.value:.0f}"}
            family.add_sample(CACHE_CONFIG, labels | size, 1.0)
    return family
