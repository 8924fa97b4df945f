"""What a load generator's ledger says that the boards must show: panel by panel, the figure and where it comes from.

Quantiles are another matter: a histogram knows them to within a bucket, so they are compared by bucket.
"""

import bisect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dashboards.metrics import E2E_BUCKETS, LENGTH_BUCKETS, TPOT_BUCKETS, TTFT_BUCKETS
from tests.support.load.request import RequestResult
from tests.support.monitoring.committed import BoundQuery, paths, read
from tests.support.monitoring.prometheus import Api
from tests.support.stack.live_stack import CLIENTS, LEAD_S, REPLICAS, TPOT_S, TTFT_S, Phase

Kind = Literal["rate", "level", "mean", "share", "state"]
MARGIN_S = 2.0  # from the last answer to the moment of asking: the last scrapes come within it
LATENESS = 1.2  # a client sees a token later than its front wrote it: the two may differ about an objective up to so many times
EDGE_S = 5.0  # levels are read when the load has settled in, and before it ends
USD_HOUR = 4.0


@dataclass(frozen=True)
class ExpectedFigure:
    """One figure of a panel (its lines of these legends added up), and what the ledger says it is.

    `kind`: a level is read throughout the load, all else after it.
    `upto`: every figure from `true` to this one agrees with the ledger.
    """

    panel: str
    legends: tuple[str, ...]
    kind: Kind
    true: float
    upto: float = -math.inf


@dataclass(frozen=True)
class ShownFigure:
    """An expected figure, and what the panel shows."""

    expected: ExpectedFigure
    value: float

    @property
    def error(self) -> float:
        """The relative difference; of a share, which may be 0, relative to a half."""
        true, upto = self.expected.true, self.expected.upto
        nearest = max(true, min(self.value, upto))
        return abs(self.value - nearest) / (0.5 if self.expected.kind == "share" else abs(true))

    def __str__(self) -> str:
        figure, legends = self.expected, ", ".join(self.expected.legends)
        return f"{self.error:6.1%} {self.value:10.5g} {figure.true:10.5g} {figure.kind:6} {figure.panel}: {legends}"


def window(phase: Phase) -> int:
    """Seconds that rates look back over: the whole load, from before its first requests, and no more."""
    return math.ceil(phase.ended - phase.began + MARGIN_S + LEAD_S)


def expected_figures(phase: Phase) -> list[ExpectedFigure]:
    """All of them, of a load of which every request was finished."""
    return [*_rates(phase), *_levels(phase), *_means(phase.finished), *_states()]


def _rates(phase: Phase) -> list[ExpectedFigure]:
    """Everything that was counted, over the window."""
    seconds, count = window(phase), len(phase.finished)
    prompt, output = (sum(getattr(record, name) for record in phase.finished) for name in ("prompt_tokens", "output_tokens"))
    counted = [
        ("Requests", "received", count),
        ("Requests", "ended", count),
        ("Tokens", "prompt", prompt),
        ("Tokens", "prompt computed", prompt),
        ("Tokens", "generated", output),
        ("Ends", "{{outcome}}", count),
    ]
    usd = REPLICAS * USD_HOUR / 3600 * 1e6 / (output / seconds)
    return [
        *(ExpectedFigure(panel, (legend,), "rate", amount / seconds) for panel, legend, amount in counted),
        ExpectedFigure("USD a million generated tokens", ("generated",), "rate", usd),
    ]


def _levels(phase: Phase) -> list[ExpectedFigure]:
    """How many were open, on average while the load had settled in."""
    begin, end = phase.began + EDGE_S, phase.ended - EDGE_S
    spans = ((record.sent + phase.clock, record.done + phase.clock) for record in phase.ledger.records)
    held = sum(max(0.0, min(done, end) - max(sent, begin)) for sent, done in spans)
    true = held / (end - begin)
    assert true > 0.9 * CLIENTS, "it is a closed load"
    return [ExpectedFigure("Running and waiting", ("running", "waiting"), "level", true)]


def _means(records: Sequence[RequestResult]) -> list[ExpectedFigure]:
    ttft, tpot = _seconds(records, "ttft"), _seconds(records, "tpot")
    e2e = statistics.fmean(record.e2e for record in records)
    means = {  # not ITL, whose weights are outputs: with drafts a client does not know how many tokens each had
        "TTFT": statistics.fmean(ttft),
        "TPOT": statistics.fmean(tpot),
        "E2E": e2e,
        "Prompt tokens of a request": statistics.fmean(record.prompt_tokens for record in records),
    }
    return [
        *(ExpectedFigure(panel, ("mean",), "mean", value) for panel, value in means.items()),
        ExpectedFigure("Phases", ("queue", "prefill", "decode"), "mean", e2e),
        _in_time("First token in time, 1 h", "ttft", ttft, TTFT_S),
        _in_time("Tokens in time, 1 h", "tpot", tpot, TPOT_S),
        ExpectedFigure("Answered, 1 h", ("availability",), "share", 1.0),
    ]


def _in_time(panel: str, legend: str, seconds: Sequence[float], objective: float) -> ExpectedFigure:
    """The share that kept to an objective: as the client saw it, up to what it would have seen so much earlier."""
    true, upto = (sum(value <= bound for value in seconds) / len(seconds) for bound in (objective, objective * LATENESS))
    return ExpectedFigure(panel, (legend,), "share", true, upto)


def _states() -> list[ExpectedFigure]:
    """One rank a group, and its core."""
    replicas = float(REPLICAS)
    return [
        ExpectedFigure("Processes over time", ("{{replica}} rank {{rank}}",), "state", 2 * replicas),
        ExpectedFigure("Groups", ("{{deployment}} target",), "state", replicas),
        ExpectedFigure("Groups", ("{{deployment}} live",), "state", replicas),
        ExpectedFigure("Groups over time", ("{{replica}}",), "state", replicas),
        ExpectedFigure("Groups over time", ("{{replica}} engine",), "state", replicas),
    ]


def shown(api: Api, phase: Phase) -> list[ShownFigure]:
    """Every expected figure beside what its panel shows."""
    queries = _queries(f"{window(phase)}s")
    return [ShownFigure(expected, _read(api, expected, queries, phase)) for expected in expected_figures(phase)]


def _queries(rates: str) -> dict[tuple[str, str], BoundQuery]:
    pages = [read(path, rates, USD_HOUR) for path in paths()]
    return {(panel.title, asked.legend): asked for page in pages for panel in page.panels for asked in panel.asked}


def _read(api: Api, expected: ExpectedFigure, queries: Mapping[tuple[str, str], BoundQuery], phase: Phase) -> float:
    exprs = [queries[expected.panel, legend].expr for legend in expected.legends]
    if expected.kind != "level":
        at = phase.ended + MARGIN_S - 0.5
        return sum(series.last for expr in exprs for series in api.ask(expr, at))
    lines = [line for expr in exprs for line in api.ask_range(expr, phase.began + EDGE_S, phase.ended - EDGE_S, 0.5)]
    instants = max(len(line.points) for line in lines)
    return sum(value for line in lines for _, value in line.points) / instants


# -- quantiles


@dataclass(frozen=True)
class Quantile:
    """One quantile twice, and the bounds of the histogram's buckets."""

    panel: str
    q: int
    server: float
    client: float
    bounds: tuple[float, ...]

    def buckets_apart(self, times: float = 1.0) -> int:
        """How many buckets lie between the server's and the client's, the latter multiplied by `times` first."""
        return abs(bisect.bisect_left(self.bounds, self.server) - bisect.bisect_left(self.bounds, times * self.client))


_QUANTILES: Mapping[str, tuple[tuple[float, ...], Callable[[Sequence[RequestResult]], Sequence[float]]]] = {
    "TTFT": (TTFT_BUCKETS, lambda records: _seconds(records, "ttft")),
    "TPOT": (TPOT_BUCKETS, lambda records: _seconds(records, "tpot")),
    "E2E": (E2E_BUCKETS, lambda records: _seconds(records, "e2e")),
    "Prompt tokens of a request": (LENGTH_BUCKETS, lambda records: [record.prompt_tokens for record in records]),
}


def quantiles(api: Api, phase: Phase) -> list[Quantile]:
    """Every quantile of the Latency board that a client can measure."""
    queries, at = _queries(f"{window(phase)}s"), phase.ended + MARGIN_S - 0.5
    compared = []
    for panel, (bounds, values) in _QUANTILES.items():
        for q in (50, 95, 99):
            if (asked := queries.get((panel, f"p{q}"))) is not None:
                client = float(np.percentile(values(phase.finished), q))
                compared.append(Quantile(panel, q, api.ask(asked.expr, at)[0].last, client, bounds))
    return compared


def _seconds(records: Sequence[RequestResult], name: str) -> list[float]:
    return [value for record in records if (value := getattr(record, name)) is not None]
