"""Holds a Prometheus' answers against the truth: every query of every board and rule answers, as the script itself counts."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.support.monitoring.committed import paths, read
from tests.support.monitoring.event_script import ScriptedRequest
from tests.support.monitoring.promcheck import names
from tests.support.monitoring.prometheus import Api, finite
from tests.support.monitoring.scripted_exporters import ScriptedLoad
from tests.support.monitoring.tables import ALERTS, RECORDS


def silent(api: Api, window: str, at: float) -> list[str]:
    """Every panel query, recording and alert input without a finite answer at `at` (unix time)."""
    unanswered = []
    for page in (read(path, window) for path in paths()):
        asked = [(f"{page.uid}: {panel.title}", query.expr) for panel in page.panels for query in panel.asked]
        unanswered += [f"{where}: {expr}" for where, expr in asked if not finite(api.ask(expr, at))]
    unanswered += [f"records {record.name}" for record in RECORDS if not finite(api.ask(record.name, at))]
    needed = {name for alert in ALERTS for name in names(alert.expr)}
    unanswered += [f"alerts need {name}" for name in sorted(needed) if not finite(api.ask(name, at))]
    return unanswered + [f"{rule['name']}: {rule['lastError']}" for rule in api.rules() if rule["health"] != "ok"]


@dataclass(frozen=True)
class Figure:
    """One figure twice: as Prometheus answers, and as the script has it."""

    what: str
    answered: float
    true: float

    @property
    def error(self) -> float:
        """Relative difference."""
        return abs(self.answered - self.true) / abs(self.true)


def figures(api: Api, load_script: ScriptedLoad, began: float, at: float, window: int) -> list[Figure]:
    """Rates over the `window` seconds before `at`, and quantiles and ends over all that came before `at` (script's seconds)."""
    requests = [request for group in load_script.scripts.values() for request in group.requests]

    def rate(name: str, moments: Iterable[tuple[float, float]]) -> Figure:
        """Moments: (when, how much)."""
        expr = f"sum (rate({name}[{window}s]))"
        true = sum(amount for when, amount in moments if at - window < when <= at) / window
        return Figure(expr, api.ask(expr, began + at)[0].last, true)

    answers = [
        rate("quartet_requests_received_total", ((request.submitted, 1) for request in requests)),
        rate("quartet_requests_total", ((request.ended, 1) for request in requests)),
        rate("quartet_generation_tokens_total", ((when, 1) for request in requests for when in request.tokens)),
        rate("quartet_prompt_tokens_total", ((request.submitted, request.prompt) for request in requests)),
    ]
    whole = int(load_script.seconds) + 10
    for name, values in DURATIONS.items():
        true = [value for request in requests for when, value in values(request) if when <= at]
        for q in (0.5, 0.95):
            expr = f"histogram_quantile({q}, sum by (le) (rate({name}_bucket[{whole}s])))"
            answers.append(Figure(expr, api.ask(expr, began + at)[0].last, statistics.quantiles(true, n=100)[int(q * 100) - 1]))
        expr = f"sum (rate({name}_sum[{whole}s])) / sum (rate({name}_count[{whole}s]))"
        answers.append(Figure(expr, api.ask(expr, began + at)[0].last, statistics.fmean(true)))
    return answers


def _first(request: ScriptedRequest) -> list[tuple[float, float]]:
    return [(request.tokens[0], request.tokens[0] - request.submitted)] if request.tokens else []


def _pace(request: ScriptedRequest) -> list[tuple[float, float]]:
    return [(request.ended, (request.tokens[-1] - request.tokens[0]) / (len(request.tokens) - 1))] if request.tokens else []


def _gaps(request: ScriptedRequest) -> list[tuple[float, float]]:
    return [(later, later - earlier) for earlier, later in zip(request.tokens, request.tokens[1:], strict=False)]


def _whole(request: ScriptedRequest) -> list[tuple[float, float]]:
    return [(request.ended, request.ended - request.submitted)] if request.outcome in ("stop", "length") else []


# (when it is observed, what is observed), by histogram.
DURATIONS: dict[str, Callable[[ScriptedRequest], list[tuple[float, float]]]] = {
    "quartet_time_to_first_token_seconds": _first,
    "quartet_time_per_output_token_seconds": _pace,
    "quartet_inter_token_latency_seconds": _gaps,
    "quartet_e2e_request_latency_seconds": _whole,
}
