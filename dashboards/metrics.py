"""The table of metrics: name, help, source, labels, buckets, vLLM's name.

    ENGINE             one target a replica
    DISCOVERY_METRICS  one target a cluster
    RETIRED            of DISCOVERY_METRICS: counters of ENGINE, summed over replicas that are gone
    DEPLOYMENT_TOTALS  of DISCOVERY_METRICS: the same, with running replicas

Buckets resolve 2 to 40 ms a token, and contain vLLM's, so its dashboards' `le=` selectors match. `source`:

    FirstToken.ttft_s   a field of an event: a histogram observes it unless it is None, a counter grows by it
    RequestStarted      a counter grows by one. Labels are fields of the event
    load.running        read at each scrape
"""

from typing import NamedTuple, get_args

from engine.events import ConversationHome, Outcome

TARGET_LABELS = ("application", "deployment", "replica", "node", "model")
OUTCOMES = get_args(Outcome)
CAUSES = ("killed", "failed", "unscheduled", "rank_stalled", "core_stalled", "diverged", "raylet", "vanished")
# Labels whose values are known beforehand: their series are there at zero before the first event, or `increase` would miss it.
LABEL_VALUES = {"outcome": OUTCOMES, "slo": ("ttft", "tpot"), "verdict": ("good", "bad"), "home": get_args(ConversationHome)}

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
LENGTH_BUCKETS = (*(digit * 10**zeros for zeros in range(5) for digit in (1, 2, 5)), 100_000, 200_000)
STEP_TOKENS_BUCKETS = (1, *(1 << power for power in range(3, 15)))


class Metric(NamedTuple):
    """`name` is what queries use, without a histogram's `_bucket`."""

    name: str
    help: str
    source: str = ""
    label_names: str = ""  # apart by blanks
    buckets: tuple[float, ...] = ()
    alias: str = ""  # vLLM's name, without its prefix

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.label_names.split())

    @property
    def kind(self) -> str:
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"

    @property
    def stem(self) -> str:
        return self.name.removesuffix("_total")


ENGINE: tuple[Metric, ...] = (
    # latency
    Metric(
        "quartet_time_to_first_token_seconds",
        "From submission (the prompt is tokenized, the request is written to the core) to the arrival of its first token in the"
        " replica; queue and prefill included, tokenizing and the network not. One observation a request that got a token.",
        "FirstToken.ttft_s",
        buckets=TTFT_BUCKETS,
        alias="time_to_first_token_seconds",
    ),
    Metric(
        "quartet_time_per_output_token_seconds",
        "(last token - first token) / (tokens - 1) of a request, by arrival in the replica. One observation a request that ended"
        " with two tokens or more, however it ended.",
        "RequestFinished.tpot_s",
        buckets=TPOT_BUCKETS,
        alias="request_time_per_output_token_seconds",
    ),
    Metric(
        "quartet_inter_token_latency_seconds",
        "Between two outputs of one stream as they arrive in the replica, divided by the tokens of the later one. One observation"
        " an output but the first.",
        "Tokens.token_gaps_s",
        buckets=TPOT_BUCKETS,
        alias="inter_token_latency_seconds",
    ),
    Metric(
        "quartet_e2e_request_latency_seconds",
        "From submission to the end of a request that was completed (outcome stop or length).",
        "Completed.e2e_s",
        buckets=E2E_BUCKETS,
        alias="e2e_request_latency_seconds",
    ),
    Metric(
        "quartet_request_queue_time_seconds",
        "From submission to the core's report of the plan that admits the request. One observation a request that was scheduled.",
        "Scheduled.queue_s",
        buckets=PHASE_BUCKETS,
        alias="request_queue_time_seconds",
    ),
    Metric(
        "quartet_request_prefill_time_seconds",
        "From first scheduled to first token, recomputation after a preemption included. One observation a request with a token.",
        "FirstToken.prefill_s",
        buckets=PHASE_BUCKETS,
        alias="request_prefill_time_seconds",
    ),
    Metric(
        "quartet_request_decode_time_seconds",
        "From the first to the last token of a request that was completed.",
        "Completed.decode_s",
        buckets=PHASE_BUCKETS,
        alias="request_decode_time_seconds",
    ),
    Metric(
        "quartet_request_inference_time_seconds",
        "From first scheduled to the last token of a request that was completed.",
        "Completed.inference_s",
        buckets=PHASE_BUCKETS,
        alias="request_inference_time_seconds",
    ),
    # requests
    Metric(
        "quartet_requests_received_total",
        "Requests submitted to the engine (choices, not HTTP calls).",
        "RequestStarted",
    ),
    Metric(
        "quartet_requests_total",
        "Requests that ended, by how: exactly one end a received request. dead: the group ended under it, and it got an error event"
        " unless the replica died too. stop: a stop string too.",
        "RequestFinished",
        "outcome",
    ),
    Metric(
        "quartet_requests_in_flight",
        "Requests without an end, read at the scrape from the front end's own count. received - sum(requests) - in_flight is 0, or"
        " one is lost.",
        "gauges.open",
    ),
    Metric(
        "quartet_slo_requests_total",
        "Requests judged against an objective. ttft: good at the first token within it, bad at a later one, or at an end without a"
        " token that was ours (error, dead, deadline) or came after the objective; refusals are not judged. tpot: judged at the"
        " end, with two tokens or more.",
        "Judged",
        "slo verdict",
    ),
    Metric(
        "quartet_request_prompt_tokens",
        "Prompt tokens of a submitted request.",
        "RequestStarted.prompt_tokens",
        buckets=LENGTH_BUCKETS,
        alias="request_prompt_tokens",
    ),
    Metric(
        "quartet_request_generation_tokens",
        "Tokens that an ended request got, however it ended.",
        "RequestFinished.output_tokens",
        buckets=LENGTH_BUCKETS,
        alias="request_generation_tokens",
    ),
    Metric(
        "quartet_prompt_tokens_total",
        "Prompt tokens of all submitted requests.",
        "RequestStarted.prompt_tokens",
        alias="prompt_tokens_total",
    ),
    Metric(
        "quartet_generation_tokens_total",
        "Output tokens delivered to requests that were still open.",
        "Tokens.count",
        alias="generation_tokens_total",
    ),
    Metric(
        "quartet_key_requests_total",
        "HTTP requests that needed an API key, by the name of the key's holder (empty: no valid key; other: one name too many for"
        " labels) and by what became of them: admitted, unauthenticated (401), forbidden (403), rate_limited (429 by a quota).",
        "KeyDecision",
        "key verdict",
    ),
    Metric(
        "quartet_key_tokens_total",
        "Tokens of prompts and answers that counted against the quota of the API key's holder, when their requests had ended.",
        "KeyTokens.count",
        "key",
    ),
    Metric(
        "quartet_conversation_requests_total",
        "Requests of conversations where there are several replicas, by what HAProxy did: new (it knew no replica of the"
        " conversation), kept (it went to the conversation's replica) or"
        " moved (that was gone, or had `conversations.lead` more requests than the"
        " mean). A moved request computes its prompt anew.",
        "ConversationRequest",
        "home",
    ),
    # the scheduler, its caches and drafts
    Metric(
        "quartet_requests_running",
        "Sequences that hold a slot, after the step last reported.",
        "load.running",
        alias="num_requests_running",
    ),
    Metric(
        "quartet_requests_waiting",
        "Sequences that wait for a slot or for pages, preempted ones too.",
        "load.waiting",
        alias="num_requests_waiting",
    ),
    Metric(
        "quartet_waiting_tokens",
        "Tokens to compute before the waiting sequences can decode.",
        "load.waiting_tokens",
    ),
    Metric("quartet_engine_slots", "Sequences that may run at once (max_seqs).", "facts.slots"),
    Metric(
        "quartet_preemptions_total",
        "Times a sequence was put back, to be recomputed.",
        "load.preemptions",
        alias="num_preemptions_total",
    ),
    Metric(
        "quartet_engine_prefill_tokens_total",
        "Tokens computed in prefill, recomputation included.",
        "load.prefill_tokens",
    ),
    Metric(
        "quartet_engine_step_seconds",
        "Between two reports of the core that both had work, divided by the steps between them: what a step takes, wall clock.",
        "MeanStep.seconds",
        buckets=TPOT_BUCKETS,
    ),
    Metric(
        "quartet_engine_step_tokens",
        "Tokens computed between two reports of the core, divided by the steps between them.",
        "MeanStep.tokens",
        buckets=STEP_TOKENS_BUCKETS,
        alias="iteration_tokens_total",
    ),
    Metric(
        "quartet_kv_pages",
        "Pages of a KV group (sliding, full layers), without the null page.",
        "pools.total",
        "group",
    ),
    Metric("quartet_kv_pages_cached", "Pages of a KV group that only the prefix cache keeps.", "pools.cached", "group"),
    Metric("quartet_kv_usage_ratio", "Used of all pages of a KV group, 0 to 1.", "pools.usage", "group"),
    Metric(
        "quartet_kv_cache_usage_ratio",
        "The fuller KV group's usage, 0 to 1: the pool that binds.",
        "load.kv_usage",
        alias="kv_cache_usage_perc",
    ),
    Metric("quartet_adapter_slots", "Adapters that rows of one step may have.", "facts.adapter_slots"),
    Metric(
        "quartet_adapter_requests",
        "Open requests of each adapter that is served. waiting: the core has not started them.",
        "adapters.requests",
        "adapter state",
    ),
    Metric("quartet_kv_page_tokens", "Tokens a page holds.", "facts.page_tokens"),
    Metric(
        "quartet_prefix_cache_queried_tokens_total",
        "Prompt tokens that were looked up, once a request.",
        "load.queried_tokens",
        alias="prefix_cache_queries_total",
    ),
    Metric(
        "quartet_prefix_cache_hit_tokens_total",
        "Prompt tokens that were found, and not computed again.",
        "load.hit_tokens",
        alias="prefix_cache_hits_total",
    ),
    Metric(
        "quartet_draft_rows_total",
        "Rows that verified drafts, of one sequence and step each.",
        "load.draft_rows",
        alias="spec_decode_num_drafts_total",
    ),
    Metric(
        "quartet_draft_tokens_total",
        "Drafts that were verified.",
        "load.draft_tokens",
        alias="spec_decode_num_draft_tokens_total",
    ),
    Metric(
        "quartet_accepted_draft_tokens_total",
        "Drafts that were accepted: tokens that took no step of their own.",
        "load.accepted_tokens",
        alias="spec_decode_num_accepted_tokens_total",
    ),
    Metric(
        "quartet_verified_drafts_by_position_total",
        "Drafts that were verified, by their position after the sequence's last token, from 0.",
        "draft_positions.verified",
        "position",
    ),
    Metric(
        "quartet_accepted_drafts_by_position_total",
        "Drafts that were accepted, as all before them were, by the same position.",
        "draft_positions.accepted",
        "position",
        alias="spec_decode_num_accepted_tokens_per_pos_total",
    ),
    Metric("quartet_drafts", "Draft tokens for each sequence in the last planned step.", "load.drafts"),
    Metric(
        "quartet_draft_switches_total",
        "Changes of the number of drafts at a number of rows, by cause: better (another takes fewer seconds a token), off"
        " (none is better), on (some may be better).",
        "draft_switches.count",
        "cause",
    ),
    Metric(
        "quartet_prefix_cache_evicted_pages_total",
        "Cached pages given up, of all KV groups.",
        "load.evicted_pages",
    ),
    # encoders of media
    Metric("quartet_encoded_images_total", "Images that encoders have made soft tokens of.", "encoder.images"),
    Metric("quartet_encoded_frames_total", "The same of frames of videos.", "encoder.frames"),
    Metric("quartet_encoded_clips_total", "The same of audio clips.", "encoder.clips"),
    Metric("quartet_encoded_rows_total", "Soft tokens that encoders have made.", "encoder.rows"),
    Metric(
        "quartet_encoder_cache_queried_items_total",
        "Images, videos and clips whose soft tokens a step needed: those in a cached prefix are not among them.",
        "encoder.queries",
        alias="mm_cache_queries_total",
    ),
    Metric(
        "quartet_encoder_cache_hit_items_total",
        "Of these, those that were not encoded, as equal ones had been, or were in the same step.",
        "encoder.hits",
        alias="mm_cache_hits_total",
    ),
    Metric(
        "quartet_encoder_cache_host_hit_items_total",
        "Of the items found, those whose soft tokens came from host memory.",
        "encoder.host_hits",
    ),
    Metric(
        "quartet_encoder_cache_evicted_items_total",
        "Encoded items whose soft tokens the cache has given up, in host memory too.",
        "encoder.evictions",
    ),
    Metric("quartet_encoder_cache_bytes", "Soft tokens that each rank holds on its device.", "encoder.cached_bytes"),
    Metric("quartet_encoder_cache_host_bytes", "Soft tokens that each rank holds in host memory.", "encoder.host_bytes"),
    Metric(
        "quartet_rank_encoder_seconds_total",
        "Time that a rank's encoders have run: on a GPU by CUDA events, on a CPU wall clock.",
        "processes.encoder_s",
        "rank",
    ),
    Metric(
        "quartet_encoder_waiting",
        "Sequences that waited for encoders in the last step.",
        "load.encoder_waiting",
    ),
    Metric(
        "quartet_encoder_wait_seconds_total",
        "Time that sequences have waited so, in steps that went on without them: of all together.",
        "load.encoder_wait_s",
    ),
    # the group and its processes
    Metric("quartet_rank_up", "1 while the process runs: of each rank, and of the core.", "processes.up", "rank"),
    Metric(
        "quartet_rank_stall_seconds",
        "How long the process has owed a step without progress, at the scrape; 0 while it owes none. At"
        " quartet_engine_step_bound_seconds the group is ended: a hung rank shows here before.",
        "processes.stall_s",
        "rank",
    ),
    Metric(
        "quartet_rank_device_busy_seconds",
        "Time of the last step on a rank's device, from its first work to the end of its copies out; on a GPU by CUDA events.",
        "processes.busy_s",
        "rank",
    ),
    Metric(
        "quartet_rank_device_idle_seconds",
        "How long the GPU stood idle before the last step with decode rows: what host and core did not hide.",
        "processes.idle_s",
        "rank",
    ),
    Metric(
        "quartet_rank_late_compilations_total",
        "Kernel variants compiled, or loaded, after the rank was ready: each stalled a step. 0 in a warmed process.",
        "processes.late_compilations",
        "rank",
    ),
    Metric(
        "quartet_engine_step_bound_seconds",
        "After how long without progress in a step the group is ended.",
        "facts.step_bound_s",
    ),
    Metric("quartet_engine_up", "1 while the group runs.", "facts.up"),
    Metric("quartet_engine_ranks", "Ranks of the group: GPUs in use, on GPUs.", "facts.tp"),
    Metric("quartet_build_info", "Always 1; what runs here.", "facts", "model_name build attention weights tp"),
)


_DEPLOYMENT = "application deployment"


def deployment_counters(prefix: str, summed: str) -> dict[str, Metric]:
    """A deployment's counter for each replica counter that outlives it."""
    return {
        row.name: Metric(
            row.name.replace("quartet", prefix, 1), f"{row.name}, {summed}", label_names=f"{_DEPLOYMENT} {row.label_names}"
        )
        for row in ENGINE
        if row.kind == "counter" and "rank" not in row.labels
    }


RETIRED = deployment_counters("quartet_retired", "last known counts of the replicas that are gone, summed.")
DEPLOYMENT_TOTALS = deployment_counters(
    "quartet_deployment",
    "summed over all replicas of the deployment, running (as of their last heartbeat) and gone: monotonic across replica restarts.",
)
RESTARTS = Metric(
    "quartet_group_restarts_total",
    "Groups that ended without having been asked to, by cause: killed, failed (a process, by a signal or an exit), unscheduled"
    " (no heartbeat), rank_stalled, core_stalled (no progress), diverged (ranks with unequal states), raylet (the node's Ray),"
    " vanished (the replica fell silent).",
    label_names=f"{_DEPLOYMENT} cause",
)
DISCOVERY_METRICS: tuple[Metric, ...] = (
    Metric("quartet_groups", "Replicas registered, with a recent heartbeat.", label_names=_DEPLOYMENT),
    Metric(
        "quartet_group_up",
        "1 while the replica is registered and sends heartbeats; 0 once it is silent or gone, for ten minutes more.",
        label_names=" ".join(TARGET_LABELS),
    ),
    RESTARTS,
    *RETIRED.values(),
    *DEPLOYMENT_TOTALS.values(),
)
