"""The Latency board: where a request's time goes."""

from dashboards.boards.panels import Board, Panel, Query, Row
from dashboards.promql import BOARD

QUEUE, PREFILL, DECODE = (f"quartet_request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode"))


def _quantiles(title: str, about: str, name: str, unit: str = "s") -> Panel:
    queries = (*(Query(BOARD.quantile(q, name), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)), Query(BOARD.mean(name), "mean"))
    return Panel(title, f"{about} Quantiles inside the buckets of {name}, and the mean.", unit, queries)


TOKEN_ROW = Row(
    "Tokens",
    (
        _quantiles("TTFT", "From submission to the first token: queue and prefill.", "quartet_time_to_first_token_seconds"),
        _quantiles("TPOT", "A request's mean time per output token but the first.", "quartet_time_per_output_token_seconds"),
        _quantiles(
            "ITL",
            "Between two outputs of a stream, by token of the later one: what one reader feels.",
            "quartet_inter_token_latency_seconds",
        ),
    ),
)

REQUEST_ROW = Row(
    "Whole requests",
    (
        _quantiles("E2E", "From submission to the end of completed requests.", "quartet_e2e_request_latency_seconds"),
        Panel(
            "Phases",
            "Mean seconds of queue, prefill and decode: the tallest one is where to look.",
            "s",
            tuple(Query(BOARD.mean(name), phase) for name, phase in ((QUEUE, "queue"), (PREFILL, "prefill"), (DECODE, "decode"))),
            "stack",
        ),
        _quantiles("Queue time", "From submission to the first step that has the request: grows first under too much load.", QUEUE),
        _quantiles("Prompt tokens of a request", "Long prompts prefill long.", "quartet_request_prompt_tokens", "short"),
    ),
)

BOARD_LATENCY = Board("quartet-latency", "Quartet / Latency", "Where a request's time goes.", (TOKEN_ROW, REQUEST_ROW))
