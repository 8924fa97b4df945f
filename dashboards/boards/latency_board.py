"""The Latency board: where a request's time goes."""

from dashboards.boards.panels import Board, Panel, Query, Row
from dashboards.promql import BOARD

TTFT, TPOT = "quartet_time_to_first_token_seconds", "quartet_time_per_output_token_seconds"
ITL, E2E = "quartet_inter_token_latency_seconds", "quartet_e2e_request_latency_seconds"
QUEUE, PREFILL, DECODE = (f"quartet_request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode"))


def _quantiles(name: str) -> tuple[Query, ...]:
    return (*(Query(BOARD.quantile(q, name), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)), Query(BOARD.mean(name), "mean"))


def _sizes(title: str, text: str, metric: str) -> Panel:
    quantiles = (Query(BOARD.quantile(q, metric), f"p{q * 100:g}") for q in (0.5, 0.95))
    return Panel(title, text, "short", (*quantiles, Query(BOARD.mean(metric), "mean")))


def _pair(title: str, name: str, about: str) -> tuple[Panel, Panel, Panel]:
    """Quantiles, the whole distribution, and the p95 of each replica."""
    return (
        Panel(title, f"{about} Quantiles inside the buckets of {name}, and the mean.", "s", _quantiles(name)),
        Panel(
            f"{title}: distribution",
            f"Observations a second by bucket of {name}.",
            "s",
            (Query(BOARD.buckets(name), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            f"{title}: p95 by replica",
            "One line above the others is a slow node, or a queue that routing does not see.",
            "s",
            (Query(BOARD.quantile(0.95, name, ("replica",)), "{{replica}}"),),
        ),
    )


FIRST_ROW = Row(
    "First token",
    (
        *_pair("TTFT", TTFT, "From submission to the first token: queue and prefill."),
        Panel(
            "TTFT objective",
            "The objective as set, beside the p95 and the p99.",
            "s",
            (
                Query(BOARD.total("quartet_slo_objective_seconds", fold="max", slo="ttft"), "objective"),
                Query(BOARD.quantile(0.95, TTFT), "p95"),
                Query(BOARD.quantile(0.99, TTFT), "p99"),
            ),
            width=12,
        ),
        Panel(
            "Missed the objective",
            "Share of requests that missed each objective.",
            "percentunit",
            (
                Query(
                    f"{BOARD.rate('quartet_slo_requests_total', ('slo',), verdict='bad')}"
                    f" / ({BOARD.rate('quartet_slo_requests_total', ('slo',))} > 0)",
                    "{{slo}}",
                ),
            ),
            width=12,
        ),
    ),
)

TOKEN_ROW = Row(
    "Output tokens",
    (
        *_pair("TPOT", TPOT, "A request's mean time per output token, the first excluded."),
        *_pair("ITL", ITL, "Between two outputs of a stream, by token of the later one: what one reader feels."),
    ),
)

END_TO_END_ROW = Row(
    "Whole requests",
    (
        *_pair("E2E", E2E, "From submission to the end of completed requests."),
        Panel(
            "Phases",
            "Mean seconds of queue, prefill and decode: the tallest one is where to look.",
            "s",
            tuple(Query(BOARD.mean(name), phase) for name, phase in ((QUEUE, "queue"), (PREFILL, "prefill"), (DECODE, "decode"))),
            "stack",
        ),
        Panel(
            "Queue time",
            "From submission to the first step that has the request. Grows before anything else when load exceeds supply.",
            "s",
            _quantiles(QUEUE),
        ),
        Panel("Prefill time", "From first scheduled to first token, recomputation included.", "s", _quantiles(PREFILL)),
    ),
)

CAUSE_ROW = Row(
    "What latency depends on",
    (
        Panel(
            "Step time: distribution",
            "Wall time of steps: decode steps set TPOT, steps with prefill set ITL's tail.",
            "s",
            (Query(BOARD.buckets("quartet_engine_step_seconds"), "{{le}}"),),
            "heatmap",
        ),
        _sizes("Prompt tokens of a request", "p50, p95 and mean of submitted prompts.", "quartet_request_prompt_tokens"),
        _sizes("Generated tokens of a request", "p50, p95 and mean of ended requests.", "quartet_request_generation_tokens"),
    ),
)

BOARD_LATENCY = Board(
    "quartet-latency", "Quartet / Latency", "Where a request's time goes.", (FIRST_ROW, TOKEN_ROW, END_TO_END_ROW, CAUSE_ROW)
)
