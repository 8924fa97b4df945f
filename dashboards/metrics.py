"""The one table of metrics: name, kind, unit, labels, help. The exporter registers what stands here and nothing else.

Buckets resolve what Gemma 4 does: 2 to 40 ms per output token. TTFT begins where `generate` was called (engine/events.py).
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

TTFT_BUCKETS = (
    0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2,
    0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.012, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04,
    0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.5, 1.0,
)  # fmt: skip
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
LENGTH_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


@dataclass(frozen=True)
class Metric:
    """One row. Counters are exposed with `_total` behind their name, as Prometheus asks."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("quartet_time_to_first_token_seconds", "histogram", "From submission to the first token.", buckets=TTFT_BUCKETS),
    Metric(
        "quartet_time_per_output_token_seconds",
        "histogram",
        "Mean time between the tokens of one request, the first token excluded; one observation a request.",
        buckets=TPOT_BUCKETS,
    ),
    Metric("quartet_inter_token_seconds", "histogram", "Between two outputs of one stream.", buckets=TPOT_BUCKETS),
    Metric("quartet_request_seconds", "histogram", "From submission to the end of a request.", buckets=E2E_BUCKETS),
    Metric("quartet_request_prompt_tokens", "histogram", "Prompt tokens of a request.", buckets=LENGTH_BUCKETS),
    Metric("quartet_request_generation_tokens", "histogram", "Tokens generated for a request.", buckets=LENGTH_BUCKETS),
    Metric("quartet_prompt_tokens", "counter", "Prompt tokens of all submitted requests."),
    Metric("quartet_generation_tokens", "counter", "Tokens that reached the replica."),
    Metric("quartet_requests_received", "counter", "Requests submitted to the engine."),
    Metric("quartet_requests", "counter", "Requests that ended, by how.", ("outcome",)),
    Metric("quartet_requests_running", "gauge", "Sequences that hold a slot."),
    Metric("quartet_requests_waiting", "gauge", "Sequences that wait for a slot or for pages."),
    Metric("quartet_waiting_tokens", "gauge", "Tokens to compute before the waiting sequences can decode."),
    Metric("quartet_preemptions", "gauge", "Sequences put back to be recomputed, since boot."),
    Metric("quartet_engine_steps", "gauge", "Steps since boot."),
    Metric("quartet_engine_prefill_tokens", "gauge", "Tokens computed in prefill since boot, recomputation included."),
    Metric("quartet_engine_decode_tokens", "gauge", "Tokens computed in decode since boot."),
    Metric("quartet_kv_pages", "gauge", "Pages of a KV group, the null page excluded.", ("group",)),
    Metric("quartet_kv_pages_used", "gauge", "Pages of a KV group that are held.", ("group",)),
    Metric("quartet_engine_up", "gauge", "1 while the group lives."),
    Metric("quartet_build_info", "gauge", "Always 1; what runs here.", ("model", "build", "attention", "tp")),
)

OUTCOMES = ("stop", "length", "client_gone", "deadline", "slow_reader", "refused", "error", "dead")
