"""The Operator board: do users get their tokens in time, why not, and what does it cost."""

from dashboards.alerts import ENDED_REQUESTS, FAILED_REQUESTS, FAST_BURN, LOST_REQUESTS, OBJECTIVES, SLOW_BURN, burn_name, recorded
from dashboards.boards.panels import Board, Panel, Query, Row, good_above, good_below
from dashboards.promql import BOARD

TTFT, TPOT = "quartet_time_to_first_token_seconds", "quartet_time_per_output_token_seconds"
HOUR = BOARD.over("1h")


def _attained(slo: str) -> Query:
    good = HOUR.rate("quartet_slo_requests_total", slo=slo, verdict="good")
    return Query(f"{good} / ({HOUR.rate('quartet_slo_requests_total', slo=slo)} > 0)", slo)


def _answered() -> Query:
    bad, total = HOUR.either("rate", FAILED_REQUESTS, LOST_REQUESTS), HOUR.either("rate", ENDED_REQUESTS, LOST_REQUESTS)
    return Query(f"1 - {bad} / ({total} > 0)", "availability")


def _objective(name: str) -> float:
    return next(slo.target for slo in OBJECTIVES if slo.name == name)


def _share(title: str, about: str, query: Query, target: float) -> Panel:
    steps = good_above(1 - 3 * (1 - target), target)
    return Panel(title, f"{about} Objective: {target:.1%}.", "percentunit", (query,), "stat", 4, steps)


OBJECTIVE_ROW = Row(
    "Objectives",
    (
        _share(
            "Answered, 1 h",
            "Requests that did not end in an error, a refusal or with their group.",
            _answered(),
            _objective("availability"),
        ),
        _share(
            "First token in time, 1 h",
            'Requests whose first token came within quartet_slo_objective_seconds{slo="ttft"}.',
            _attained("ttft"),
            _objective("ttft"),
        ),
        _share(
            "Tokens in time, 1 h",
            'Requests whose time per output token kept to quartet_slo_objective_seconds{slo="tpot"}.',
            _attained("tpot"),
            _objective("tpot"),
        ),
        Panel(
            "TTFT p95",
            "The first token's p95 over all replicas. More in the Latency board.",
            "s",
            (Query(BOARD.quantile(0.95, TTFT), "p95"),),
            "stat",
            4,
        ),
        Panel(
            "Tokens a second",
            "Tokens that reached a request that wanted them.",
            "short",
            (Query(BOARD.rate("quartet_generation_tokens_total"), "generated"),),
            "stat",
            4,
        ),
        Panel(
            "Lost with their group, 1 h",
            "Requests whose group ended under them. Not zero: Status board, restarts by cause.",
            "short",
            (Query(HOUR.increase("quartet_retired_requests_lost_total"), "lost"),),
            "stat",
            4,
            good_below(0.5, 1),
        ),
        Panel(
            "Budget burn, fast (5 min and 1 h)",
            f"Share of requests that broke an objective over the share that may. A page when both pass"
            f" {FAST_BURN}: the budget of 30 days would last two.",
            "short",
            (Query(recorded(burn_name("5m"), BOARD), "{{slo}} 5m"), Query(recorded(burn_name("1h"), BOARD), "{{slo}} 1h")),
            width=12,
            steps=good_below(1, FAST_BURN),
        ),
        Panel(
            "Budget burn, slow (30 min and 6 h)",
            f"As the fast one; a ticket when both pass {SLOW_BURN}: it would last five days.",
            "short",
            (Query(recorded(burn_name("30m"), BOARD), "{{slo}} 30m"), Query(recorded(burn_name("6h"), BOARD), "{{slo}} 6h")),
            width=12,
            steps=good_below(1, SLOW_BURN),
        ),
    ),
)

THROUGHPUT_ROW = Row(
    "Throughput",
    (
        Panel(
            "Requests",
            "Received and ended a second. The two part where the queue grows.",
            "reqps",
            (
                Query(BOARD.rate("quartet_requests_received_total"), "received"),
                Query(BOARD.rate("quartet_requests_total"), "ended"),
            ),
        ),
        Panel(
            "Tokens",
            "Prompt tokens submitted and tokens generated, a second.",
            "short",
            (
                Query(BOARD.rate("quartet_prompt_tokens_total"), "prompt"),
                Query(BOARD.rate("quartet_generation_tokens_total"), "generated"),
            ),
        ),
        Panel(
            "Generated, by replica",
            "Tokens a second of each group: uneven means uneven routing, or a slow node.",
            "short",
            (Query(BOARD.rate("quartet_generation_tokens_total", ("replica",)), "{{replica}}"),),
            "stack",
        ),
    ),
)

SCHEDULER_ROW = Row(
    "Scheduler",
    (
        Panel(
            "Running and waiting",
            "Sequences that hold a slot, those that wait for a slot or pages, and the slots there are.",
            "short",
            (
                Query(BOARD.total("quartet_requests_running"), "running"),
                Query(BOARD.total("quartet_requests_waiting"), "waiting"),
                Query(BOARD.total("quartet_engine_slots"), "slots"),
            ),
        ),
        Panel(
            "Waiting tokens",
            "Tokens to compute before those that wait can decode: what autoscaling watches.",
            "short",
            (Query(BOARD.total("quartet_waiting_tokens", ("replica",)), "{{replica}}"),),
            "stack",
        ),
        Panel(
            "Preemptions",
            "Sequences put back and computed again, a second. Above zero for long: too few pages for the slots.",
            "short",
            (Query(BOARD.rate("quartet_preemptions_total", ("replica",)), "{{replica}}"),),
        ),
        Panel(
            "Step time",
            "Wall time of a step, p50 and p99.",
            "s",
            (
                Query(BOARD.quantile(0.5, "quartet_engine_step_seconds"), "p50"),
                Query(BOARD.quantile(0.99, "quartet_engine_step_seconds"), "p99"),
            ),
        ),
        Panel(
            "Tokens a step",
            "Mean and p95 of the tokens computed in a step: how well steps are filled.",
            "short",
            (
                Query(BOARD.mean("quartet_engine_step_tokens"), "mean"),
                Query(BOARD.quantile(0.95, "quartet_engine_step_tokens"), "p95"),
            ),
        ),
        Panel(
            "Computed against asked",
            "Tokens computed in prefill and decode a second, beside those asked for and delivered: the gap is"
            " recomputation and surplus.",
            "short",
            (
                Query(BOARD.rate("quartet_engine_prefill_tokens_total"), "prefill computed"),
                Query(BOARD.rate("quartet_prompt_tokens_total"), "prompt"),
                Query(BOARD.rate("quartet_engine_decode_tokens_total"), "decode computed"),
                Query(BOARD.rate("quartet_generation_tokens_total"), "generated"),
            ),
        ),
    ),
)


def _pool(group: str, about: str) -> Panel:
    expr = BOARD.total("quartet_kv_usage_ratio", ("replica",), "max", group=group)
    return Panel(
        f"KV pool of {group} layers", about, "percentunit", (Query(expr, "{{replica}}"),), width=6, steps=good_below(0.85, 0.97)
    )


_FOUND = BOARD.rate("quartet_prefix_cache_hit_tokens_total", ("replica",))
_LOOKED_UP = BOARD.rate("quartet_prefix_cache_queried_tokens_total", ("replica",))

_FULL, _SLIDING = (BOARD.total("quartet_kv_usage_ratio", ("replica",), "max", group=group) for group in ("full", "sliding"))

KV_ROW = Row(
    "KV cache: full and sliding pools apart",
    (
        _pool("full", "Held pages of the full-attention layers: grows with context length."),
        _pool("sliding", "Held pages of the sliding-window layers: grows with running sequences only."),
        Panel(
            "Pages",
            "Held pages and all pages, by pool.",
            "short",
            (
                Query(BOARD.total("quartet_kv_pages_used", ("group",)), "{{group}} held"),
                Query(BOARD.total("quartet_kv_pages", ("group",)), "{{group}} all"),
            ),
            width=6,
        ),
        Panel(
            "Pool that binds",
            "Which of a replica's two pools is fuller: it will be the first to preempt.",
            "short",
            (Query(f"{_FULL} >= bool {_SLIDING}", "{{replica}}"),),
            "timeline",
            6,
            names=((0, "sliding", "blue"), (1, "full", "orange")),
        ),
        Panel(
            "Prefix cache: found",
            "Of the prompt tokens looked up, those that were in the prefix cache and were not computed again.",
            "percentunit",
            (Query(f"{_FOUND} / ({_LOOKED_UP} > 0)", "{{replica}}"),),
            width=12,
        ),
        Panel(
            "Prefix cache: pages",
            "Pages that only the prefix cache keeps, by pool, and pages that it gave up a second.",
            "short",
            (
                Query(BOARD.total("quartet_kv_pages_cached", ("group",)), "{{group}} cached"),
                Query(BOARD.rate("quartet_prefix_cache_evicted_pages_total"), "evicted a second"),
            ),
            width=12,
        ),
    ),
)

ERROR_ROW = Row(
    "Errors and lost requests",
    (
        Panel(
            "Ends",
            "Requests that ended a second, by how; `dead` once their replica is counted as gone.",
            "reqps",
            (Query(BOARD.either("rate", ENDED_REQUESTS, LOST_REQUESTS, by=("outcome",)), "{{outcome}}"),),
            "stack",
        ),
        Panel(
            "Not answered",
            "Ends that the service answers for: errors, refusals, and requests lost with their group (dead).",
            "reqps",
            (Query(BOARD.either("rate", FAILED_REQUESTS, LOST_REQUESTS, by=("outcome",)), "{{outcome}}"),),
        ),
        Panel(
            "Groups that ended unasked, 1 h",
            "By cause. Their requests are the lost ones.",
            "short",
            (Query(HOUR.increase("quartet_group_restarts_total", ("cause",)), "{{cause}}"),),
            "stack",
        ),
    ),
)

_PLACE = ("application", "deployment")

SCALING_ROW = Row(
    "Autoscaling",
    (
        Panel(
            "Groups",
            "What Serve aims at, what the policy asked for, and the groups that live.",
            "short",
            (
                Query(BOARD.total("ray_serve_autoscaling_target_replicas", _PLACE, "max"), "{{deployment}} target"),
                Query(BOARD.total("ray_serve_autoscaling_desired_replicas", _PLACE, "max"), "{{deployment}} desired"),
                Query(BOARD.total("quartet_groups", _PLACE), "{{deployment}} live"),
            ),
        ),
        Panel(
            "Load a group",
            "Waiting tokens and open requests of the mean group: what the policy sees.",
            "short",
            (
                Query(BOARD.total("quartet_waiting_tokens", fold="avg"), "waiting tokens"),
                Query(BOARD.total("quartet_requests_in_flight", fold="avg"), "open requests"),
            ),
        ),
        Panel(
            "Requests as Serve counts them",
            "Serve's own count beside ours; they differ by what HTTP has not handed over yet.",
            "short",
            (
                Query(BOARD.total("ray_serve_autoscaling_total_requests", _PLACE), "{{deployment}} Serve"),
                Query(BOARD.total("quartet_requests_in_flight"), "ours"),
            ),
        ),
    ),
)

_HOURLY_USD = f"{BOARD.total('quartet_engine_ranks')} * $gpu_usd_hour"
_GENERATED, _PROMPTED = BOARD.rate("quartet_generation_tokens_total"), BOARD.rate("quartet_prompt_tokens_total")

COST_ROW = Row(
    "Cost",
    (
        Panel(
            "USD a million generated tokens",
            "GPUs in use at $gpu_usd_hour each, over the tokens they generate now. Prompt tokens count as free.",
            "currencyUSD",
            (Query(f"{_HOURLY_USD} / 3600 / ({_GENERATED} > 0) * 1e6", "generated"),),
        ),
        Panel(
            "USD a million tokens",
            "The same over prompt and generated tokens.",
            "currencyUSD",
            (Query(f"{_HOURLY_USD} / 3600 / ({_PROMPTED} + {_GENERATED} > 0) * 1e6", "prompt and generated"),),
        ),
        Panel(
            "Tokens a second and GPU",
            "Generated tokens a second of one GPU.",
            "short",
            (Query(f"{_GENERATED} / ({BOARD.total('quartet_engine_ranks')} > 0)", "generated"),),
        ),
    ),
)

BOARD_OPERATOR = Board(
    "quartet-operator",
    "Quartet / Operator",
    "Do users get their tokens in time, why not, and what does it cost.",
    (OBJECTIVE_ROW, THROUGHPUT_ROW, SCHEDULER_ROW, KV_ROW, ERROR_ROW, SCALING_ROW, COST_ROW),
)
