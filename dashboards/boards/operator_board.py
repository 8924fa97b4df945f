"""The Operator board: do users get their tokens in time, why not, and what does it cost."""

from dashboards.alerts import ENDED_REQUESTS, FAILED_REQUESTS, FAST_BURN, LOST_REQUESTS, OBJECTIVES, SLOW_BURN, burn_name, recorded
from dashboards.boards.panels import Board, Panel, Query, Row, good_above, good_below
from dashboards.promql import BOARD

BY_REPLICA = ("replica",)
BY_DEPLOYMENT = ("application", "deployment")
HOUR = BOARD.over("1h")


def _in_time(slo: str) -> str:
    good = HOUR.rate("quartet_slo_requests_total", slo=slo, verdict="good")
    return f"{good} / ({HOUR.rate('quartet_slo_requests_total', slo=slo)} > 0)"


def _answered() -> str:
    bad, total = HOUR.either("rate", FAILED_REQUESTS, LOST_REQUESTS), HOUR.either("rate", ENDED_REQUESTS, LOST_REQUESTS)
    return f"1 - {bad} / ({total} > 0)"


def _share(title: str, about: str, expr: str, slo: str) -> Panel:
    target = next(objective.target for objective in OBJECTIVES if objective.name == slo)
    steps = good_above(1 - 3 * (1 - target), target)
    return Panel(title, f"{about} Objective: {target:.1%}.", "percentunit", (Query(expr, slo),), "stat", 8, steps)


OBJECTIVE_ROW = Row(
    "Objectives",
    (
        _share(
            "Answered, 1 h", "Requests that did not end in an error, a refusal or with their group.", _answered(), "availability"
        ),
        _share(
            "First token in time, 1 h", "Requests whose first token came within metrics.ttft_objective_s.", _in_time("ttft"), "ttft"
        ),
        _share(
            "Tokens in time, 1 h", "Requests whose tokens came within metrics.tpot_objective_s each.", _in_time("tpot"), "tpot"
        ),
        Panel(
            "Budget burn",
            "Share of requests that broke an objective over the share that may: at 1 the budget lasts its 30 days. A page when 1 h"
            f" and 5 min pass {FAST_BURN} (two days), a ticket when 6 h and 30 min pass {SLOW_BURN} (five).",
            "short",
            tuple(Query(recorded(burn_name(window), BOARD), f"{{{{slo}}}} {window}") for window in ("1h", "6h")),
            width=12,
            steps=good_below(1, FAST_BURN),
        ),
        Panel(
            "Ends",
            "Requests that ended a second, by how; `dead` once their replica is counted as gone.",
            "reqps",
            (Query(BOARD.either("rate", ENDED_REQUESTS, LOST_REQUESTS, by=("outcome",)), "{{outcome}}"),),
            "stack",
            12,
        ),
    ),
)

LOAD_ROW = Row(
    "Load",
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
            "A second: of prompts submitted, of prompts computed (prefix hits are not, preempted ones are again), and generated.",
            "short",
            (
                Query(BOARD.rate("quartet_prompt_tokens_total"), "prompt"),
                Query(BOARD.rate("quartet_engine_prefill_tokens_total"), "prompt computed"),
                Query(BOARD.rate("quartet_generation_tokens_total"), "generated"),
            ),
        ),
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
            (Query(BOARD.total("quartet_waiting_tokens", BY_REPLICA), "{{replica}}"),),
            "stack",
        ),
        Panel(
            "Step time",
            "Wall time of a step.",
            "s",
            tuple(Query(BOARD.quantile(q, "quartet_engine_step_seconds"), f"p{q * 100:g}") for q in (0.5, 0.99)),
        ),
        Panel(
            "Groups",
            "What Serve aims at, what the policy asked for, and the groups that live.",
            "short",
            (
                Query(BOARD.total("ray_serve_autoscaling_target_replicas", BY_DEPLOYMENT, "max"), "{{deployment}} target"),
                Query(BOARD.total("ray_serve_autoscaling_desired_replicas", BY_DEPLOYMENT, "max"), "{{deployment}} desired"),
                Query(BOARD.total("quartet_groups", BY_DEPLOYMENT), "{{deployment}} live"),
            ),
        ),
    ),
)

_HIT = BOARD.rate("quartet_prefix_cache_hit_tokens_total", BY_REPLICA)
_LOOKED_UP = BOARD.rate("quartet_prefix_cache_queried_tokens_total", BY_REPLICA)
_VERIFIED = BOARD.rate("quartet_draft_rows_total", BY_REPLICA)
_DRAFTED = BOARD.rate("quartet_draft_tokens_total", BY_REPLICA)
_ACCEPTED = BOARD.rate("quartet_accepted_draft_tokens_total", BY_REPLICA)

KV_ROW = Row(
    "KV cache",
    (
        Panel(
            "KV cache in use",
            "Held pages by pool: that of full layers grows with context length, that of sliding layers with sequences only.",
            "percentunit",
            (Query(BOARD.total("quartet_kv_usage_ratio", ("replica", "group"), "max"), "{{replica}} {{group}}"),),
            steps=good_below(0.85, 0.97),
        ),
        Panel(
            "Preemptions",
            "Sequences put back and computed again, a second. Above zero for long: too few pages for the slots.",
            "short",
            (Query(BOARD.rate("quartet_preemptions_total", BY_REPLICA), "{{replica}}"),),
        ),
        Panel(
            "Prefix cache hits",
            "Of the prompt tokens looked up, those that were in the prefix cache and were not computed again.",
            "percentunit",
            (Query(f"{_HIT} / ({_LOOKED_UP} > 0)", "{{replica}}"),),
        ),
        Panel(
            "Tokens a verification",
            "Of rows that verify drafts: the token that each gives anyway, and the drafts accepted with it; and drafts a row.",
            "short",
            (
                Query(f"1 + {_ACCEPTED} / ({_VERIFIED} > 0)", "{{replica}}"),
                Query(f"{_DRAFTED} / ({_VERIFIED} > 0)", "{{replica}} drafts"),
            ),
        ),
        Panel(
            "Prefix cache pages",
            "Pages that only the prefix cache keeps, by pool, and pages that it gave up a second.",
            "short",
            (
                Query(BOARD.total("quartet_kv_pages_cached", ("group",)), "{{group}} cached"),
                Query(BOARD.rate("quartet_prefix_cache_evicted_pages_total"), "evicted a second"),
            ),
            width=12,
        ),
        Panel(
            "USD a million generated tokens",
            "GPUs in use at $gpu_usd_hour each, over the tokens they generate now. Prompt tokens count as free.",
            "currencyUSD",
            (
                Query(
                    f"{BOARD.total('quartet_engine_ranks')} * $gpu_usd_hour / 3600"
                    f" / ({BOARD.rate('quartet_generation_tokens_total')} > 0) * 1e6",
                    "generated",
                ),
            ),
            width=12,
        ),
    ),
)

BOARD_OPERATOR = Board(
    "quartet-operator",
    "Quartet / Operator",
    "Do users get their tokens in time, why not, and what does it cost.",
    (OBJECTIVE_ROW, LOAD_ROW, KV_ROW),
)
