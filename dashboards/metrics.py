"""The one table of metrics: name, kind, unit, labels, buckets, and a help that says between which two moments a clock runs.

    ENGINE             one target a replica: its exporter registers what stands here and nothing else
    DISCOVERY_METRICS  one target a cluster: what the discovery endpoint knows, and a dead replica cannot say any more
    RETIRED            of DISCOVERY_METRICS: each counter of ENGINE once more, summed over the replicas that are gone
    DEPLOYMENT_TOTALS  of DISCOVERY_METRICS: the same, over the running ones, too

Labels that say who is scraped (`TARGET_LABELS`) come from service discovery and stand on no row of ENGINE. Buckets resolve what
Gemma 4 does, 2 to 40 ms a token, and contain every bound that vLLM has, so that its dashboards' `le=` selectors hit.
Clock points are those of engine/events.py: submitted, scheduled, first, last, ended; all on the replica's monotonic clock.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["seconds", "tokens", "requests", "steps", "pages", "ratio", "bytes", "ranks", "replicas", "kernels", "info"]

TARGET_LABELS = ("application", "deployment", "replica", "node", "model")
OUTCOMES = (
    "stop", "length", "client_gone", "deadline", "slow_reader", "queue_timeout", "sibling_failed", "refused", "error", "dead",
)  # fmt: skip
CAUSES = ("killed", "failed", "unscheduled", "rank_stalled", "core_stalled", "diverged", "raylet", "vanished", "other")
SLOS = ("ttft", "tpot")
VERDICTS = ("good", "bad")
CORE_ENDS = ("finished", "refused", "aborted", "failed")

TTFT_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_BUCKETS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
E2E_BUCKETS = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
PHASE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, *E2E_BUCKETS)
STEP_BUCKETS = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000,
)  # fmt: skip
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Metric:
    """One row. `name` is what a query says: counters end in `_total`, histograms are asked as `<name>_bucket`, `_sum`, `_count`."""

    name: str
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def stem(self) -> str:
        """The name without a counter's `_total`, as prometheus-client wants it."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name


_LATENCY = (
    Metric(
        "quartet_time_to_first_token_seconds",
        "histogram",
        "seconds",
        "From submission (the prompt is tokenized, the request is written to the core) to the arrival of its first token in the"
        " replica; queue and prefill included, tokenizing and the network not. One observation a request that got a token.",
        buckets=TTFT_BUCKETS,
    ),
    Metric(
        "quartet_time_per_output_token_seconds",
        "histogram",
        "seconds",
        "(last token - first token) / (tokens - 1) of a request, by arrival in the replica. One observation a request that ended"
        " with two tokens or more, however it ended.",
        buckets=TPOT_BUCKETS,
    ),
    Metric(
        "quartet_inter_token_latency_seconds",
        "histogram",
        "seconds",
        "Between two outputs of one stream as they arrive in the replica, divided by the tokens of the later one. One observation"
        " an output but the first.",
        buckets=TPOT_BUCKETS,
    ),
    Metric(
        "quartet_e2e_request_latency_seconds",
        "histogram",
        "seconds",
        "From submission to the end of a request that was completed (outcome stop or length).",
        buckets=E2E_BUCKETS,
    ),
    Metric(
        "quartet_request_queue_time_seconds",
        "histogram",
        "seconds",
        "From submission to the core's report of the plan that admits the request. One observation a request that was scheduled.",
        buckets=PHASE_BUCKETS,
    ),
    Metric(
        "quartet_request_prefill_time_seconds",
        "histogram",
        "seconds",
        "From first scheduled to first token, recomputation after a preemption included. One observation a request with a token.",
        buckets=PHASE_BUCKETS,
    ),
    Metric(
        "quartet_request_decode_time_seconds",
        "histogram",
        "seconds",
        "From the first to the last token of a request that was completed.",
        buckets=PHASE_BUCKETS,
    ),
    Metric(
        "quartet_request_inference_time_seconds",
        "histogram",
        "seconds",
        "From first scheduled to the last token of a request that was completed.",
        buckets=PHASE_BUCKETS,
    ),
)

_REQUESTS = (
    Metric("quartet_requests_received_total", "counter", "requests", "Requests submitted to the engine (choices, not HTTP calls)."),
    Metric(
        "quartet_requests_total",
        "counter",
        "requests",
        "Requests that ended, by how: exactly one end a received request. dead: the group ended under it. stop: a stop string too.",
        ("outcome",),
    ),
    Metric(
        "quartet_requests_lost_total",
        "counter",
        "requests",
        "Requests that were open when their group ended (outcome dead); each got an error event,"
        " unless the replica died too.",
    ),
    Metric(
        "quartet_requests_in_flight",
        "gauge",
        "requests",
        "Requests without an end, read at the scrape from the front end's own count. received - sum(requests) - in_flight is 0, or"
        " one is lost.",
    ),
    Metric(
        "quartet_core_requests_received_total", "counter", "requests", "Requests that the core has read, by its last report."
    ),
    Metric(
        "quartet_core_requests_total",
        "counter",
        "requests",
        "Requests that have ended in the core, by its last report.",
        ("end",),
    ),
    Metric(
        "quartet_slo_requests_total",
        "counter",
        "requests",
        "Requests judged against an objective. ttft: good at the first token within it, bad at a later one, or at an end without a"
        " token that was ours (error, dead, deadline) or came after the objective; refusals are not judged. tpot: judged at the"
        " end, with two tokens or more.",
        ("slo", "verdict"),
    ),
    Metric("quartet_slo_objective_seconds", "gauge", "seconds", "The objective, as set.", ("slo",)),
    Metric("quartet_request_prompt_tokens", "histogram", "tokens", "Prompt tokens of a submitted request.", buckets=LENGTH_BUCKETS),
    Metric(
        "quartet_request_generation_tokens",
        "histogram",
        "tokens",
        "Tokens that an ended request got, however it ended.",
        buckets=LENGTH_BUCKETS,
    ),
    Metric("quartet_prompt_tokens_total", "counter", "tokens", "Prompt tokens of all submitted requests."),
    Metric("quartet_generation_tokens_total", "counter", "tokens", "Output tokens delivered to requests that were still open."),
)

_KEYS = (
    Metric(
        "quartet_key_requests_total",
        "counter",
        "requests",
        "HTTP requests that needed an API key, by the name of the key's holder (empty: no valid key; other: one name too many for"
        " labels) and by what became of them: admitted, unauthenticated (401), forbidden (403), rate_limited (429 by a quota).",
        ("key", "verdict"),
    ),
    Metric(
        "quartet_key_tokens_total",
        "counter",
        "tokens",
        "Tokens of prompts and answers that counted against the quota of the API key's holder, when their requests had ended.",
        ("key",),
    ),
)

_SCHEDULER = (
    Metric("quartet_requests_running", "gauge", "requests", "Sequences that hold a slot, after the step last reported."),
    Metric("quartet_requests_waiting", "gauge", "requests", "Sequences that wait for a slot or for pages, preempted ones too."),
    Metric("quartet_waiting_tokens", "gauge", "tokens", "Tokens to compute before the waiting sequences can decode."),
    Metric("quartet_engine_slots", "gauge", "requests", "Sequences that may run at once (max_seqs)."),
    Metric("quartet_preemptions_total", "counter", "requests", "Times a sequence was put back, to be recomputed."),
    Metric("quartet_engine_steps_total", "counter", "steps", "Steps whose results have come."),
    Metric("quartet_engine_prefill_tokens_total", "counter", "tokens", "Tokens computed in prefill, recomputation included."),
    Metric("quartet_engine_decode_tokens_total", "counter", "tokens", "Tokens computed in decode, surplus ones included."),
    Metric(
        "quartet_engine_step_seconds",
        "histogram",
        "seconds",
        "Between two reports of the core that both had work, divided by the steps between them: what a step takes, wall clock.",
        buckets=STEP_BUCKETS,
    ),
    Metric(
        "quartet_engine_step_tokens",
        "histogram",
        "tokens",
        "Tokens computed between two reports of the core, divided by the steps between them.",
        buckets=STEP_TOKENS_BUCKETS,
    ),
    Metric("quartet_kv_pages", "gauge", "pages", "Pages of a KV group (sliding, full layers), without the null page.", ("group",)),
    Metric("quartet_kv_pages_used", "gauge", "pages", "Pages of a KV group that are held.", ("group",)),
    Metric("quartet_kv_pages_cached", "gauge", "pages", "Pages of a KV group that only the prefix cache keeps.", ("group",)),
    Metric("quartet_kv_usage_ratio", "gauge", "ratio", "Used of all pages of a KV group, 0 to 1.", ("group",)),
    Metric("quartet_kv_cache_usage_ratio", "gauge", "ratio", "The fuller KV group's usage, 0 to 1: the pool that binds."),
    Metric("quartet_kv_page_tokens", "gauge", "tokens", "Tokens a page holds."),
    Metric("quartet_prefix_cache_queried_tokens_total", "counter", "tokens", "Prompt tokens that were looked up, once a request."),
    Metric("quartet_prefix_cache_hit_tokens_total", "counter", "tokens", "Prompt tokens that were found, and not computed again."),
    Metric("quartet_prefix_cache_evicted_pages_total", "counter", "pages", "Cached pages given up, of all KV groups."),
)

_RANKS = (
    Metric("quartet_rank_up", "gauge", "ranks", "1 while the process runs: of each rank, and of the core.", ("rank",)),
    Metric(
        "quartet_rank_stall_seconds",
        "gauge",
        "seconds",
        "How long the process has owed a step without progress, at the scrape; 0 while it owes none. At the bound"
        " (quartet_engine_bound_seconds, bound step) the group is ended: a hung rank shows here before.",
        ("rank",),
    ),
    Metric(
        "quartet_rank_progress_age_seconds",
        "gauge",
        "seconds",
        "Since a step was last launched or finished there, at the scrape; grows while the engine idles.",
        ("rank",),
    ),
    Metric(
        "quartet_rank_heartbeat_age_seconds",
        "gauge",
        "seconds",
        "Since its lifeline thread last ran, at the scrape; at the bound (bound heartbeat) the group is ended.",
        ("rank",),
    ),
    Metric("quartet_rank_steps_total", "counter", "steps", "Steps it has finished.", ("rank",)),
    Metric("quartet_rank_step_seconds", "gauge", "seconds", "Wall time of the last step on a rank, as it measured it.", ("rank",)),
    Metric(
        "quartet_rank_device_busy_seconds",
        "gauge",
        "seconds",
        "GPU time of the last step on a rank, from its first work to the end of its copies out, by CUDA events; 0 on a CPU.",
        ("rank",),
    ),
    Metric(
        "quartet_rank_device_idle_seconds",
        "gauge",
        "seconds",
        "How long the GPU stood idle before the last step with decode rows: what host and core did not hide; 0 on a CPU.",
        ("rank",),
    ),
    Metric(
        "quartet_rank_late_compilations_total",
        "counter",
        "kernels",
        "Kernel variants compiled, or loaded, after the rank was ready: each stalled a step. 0 in a warmed process.",
        ("rank",),
    ),
    Metric("quartet_rank_memory_bytes", "gauge", "bytes", "Memory it reported at its last change of phase.", ("rank",)),
    Metric("quartet_engine_bound_seconds", "gauge", "seconds", "After how long a lack of progress ends the group.", ("bound",)),
)

_ENGINE = (
    Metric("quartet_engine_up", "gauge", "replicas", "1 while the group runs."),
    Metric("quartet_engine_ranks", "gauge", "ranks", "Ranks of the group: GPUs in use, on GPUs."),
    Metric("quartet_engine_boot_seconds", "gauge", "seconds", "From spawn to ready."),
    Metric("quartet_engine_start_time_seconds", "gauge", "seconds", "When the exporter opened, Unix time."),
    Metric("quartet_build_info", "gauge", "info", "Always 1; what runs here.", ("model_name", "build", "attention", "tp")),
)

ENGINE: tuple[Metric, ...] = (*_LATENCY, *_REQUESTS, *_KEYS, *_SCHEDULER, *_RANKS, *_ENGINE)


def deployment_counter(row: Metric, prefix: str, says: str) -> Metric:
    """A deployment's own counter beside one of its replicas'."""
    name = row.name.replace("quartet_", prefix, 1)
    return Metric(name, "counter", row.unit, f"{row.name}, {says}", ("application", "deployment", *row.labels))


_GONE = "last known counts of the replicas that are gone, summed."
_ALL = (
    "summed over all replicas of the deployment, running (as of their last heartbeat) and gone: monotonic across replica restarts."
)
_LASTING = [row for row in ENGINE if row.kind == "counter" and "rank" not in row.labels]
RETIRED: dict[str, Metric] = {row.name: deployment_counter(row, "quartet_retired_", _GONE) for row in _LASTING}
DEPLOYMENT_TOTALS: dict[str, Metric] = {row.name: deployment_counter(row, "quartet_deployment_", _ALL) for row in _LASTING}

DISCOVERY_METRICS: tuple[Metric, ...] = (
    Metric("quartet_groups", "gauge", "replicas", "Replicas registered, with a recent heartbeat.", ("application", "deployment")),
    Metric(
        "quartet_group_up",
        "gauge",
        "replicas",
        "1 while the replica is registered and sends heartbeats; 0 once it is silent or gone, for ten minutes more.",
        ("application", "deployment", "replica", "node", "model"),
    ),
    Metric(
        "quartet_group_restarts_total",
        "counter",
        "replicas",
        "Groups that ended without having been asked to, by cause: killed, failed (a process, by a signal or an exit), unscheduled"
        " (no heartbeat), rank_stalled, core_stalled (no progress), diverged (ranks with"
        " unequal states), raylet (the node's Ray), vanished (the replica fell silent).",
        ("application", "deployment", "cause"),
    ),
    Metric("quartet_groups_drained_total", "counter", "replicas", "Replicas that left in order.", ("application", "deployment")),
    Metric("quartet_discovery_start_time_seconds", "gauge", "seconds", "When the discovery endpoint started, Unix time."),
    *RETIRED.values(),
    *DEPLOYMENT_TOTALS.values(),
)

METRICS: tuple[Metric, ...] = (*ENGINE, *DISCOVERY_METRICS)
