"""The live proof of what an operator sees: `quartet serve` with two replicas, a real Prometheus that finds them by itself, and a
load generator that keeps its own ledger. One boot: a steady load, then one under which a replica is killed.
"""

import bisect
import math
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from dashboards.metrics import E2E_BUCKETS, LENGTH_BUCKETS, TPOT_BUCKETS, TTFT_BUCKETS
from engine.errors import ConfigError
from tests.support.load.request import RequestResult
from tests.support.monitoring.committed import BoundQuery, paths, read
from tests.support.monitoring.metrics_reference import lacking_aliases
from tests.support.monitoring.pictures import Span, draw, draw_all
from tests.support.monitoring.promcheck import names
from tests.support.monitoring.prometheus import Api, finite
from tests.support.monitoring.tables import ALERTS, JOB, RECORDS
from tests.support.stack.live_stack import CALIBRATION, CLIENTS, LEAD_S, RENAMED, REPLICAS, TPOT_S, TTFT_S, LiveRun, Phase, live_run

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not here: apt-get install prometheus"),
]

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


STEADY_S = 30.0
TOLERANCE = 0.20
STALE_S = 15.0
HEARTBEAT_S = 2.0  # what a replica has counted since its last heartbeat dies with it: at most so much
SEED = 8
PICTURES = "quartet_encoder_cache_queried"  # a share of those that were asked for: no answer where nobody sends any


def silent(api: Api, window: str, at: float) -> list[str]:
    """Every panel query, recording and alert input without a finite answer at `at` (unix time)."""
    unanswered = []
    for page in (read(path, window) for path in paths()):
        asked = [(f"{page.uid}: {panel.title}", query.expr) for panel in page.panels for query in panel.asked]
        asked = [(where, expr) for where, expr in asked if PICTURES not in expr]
        unanswered += [f"{where}: {expr}" for where, expr in asked if not finite(api.ask(expr, at))]
    unanswered += [f"records {record.name}" for record in RECORDS if not finite(api.ask(record.name, at))]
    needed = {name for alert in ALERTS for name in names(alert.expr)}
    unanswered += [f"alerts need {name}" for name in sorted(needed) if not finite(api.ask(name, at))]
    return unanswered + [f"{rule['name']}: {rule['lastError']}" for rule in api.rules() if rule["health"] != "ok"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    with live_run(tmp_path_factory.mktemp("live"), STEADY_S, None, SEED, faults=True) as seen:
        yield seen


def test_every_query_of_every_board_and_rule_answers(run: LiveRun) -> None:
    """Every panel query, recording rule and alert input is finite, under load and after a death; before there was anything, not.
    Where one metric has another name, what shows it is not, and all else is."""
    steadily = f"{window(run.steady)}s", run.steady.ended + MARGIN_S
    assert silent(run.api, *steadily) == []
    assert silent(run.api, "20s", run.settled) == []
    assert len(silent(run.api, "20s", run.steady.began - 3600)) > 60
    assert run.renamed is not None
    unanswered = silent(run.renamed, *steadily)
    assert len(unanswered) >= 2
    assert [line for line in unanswered if RENAMED not in line] == []


def test_prometheus_holds_every_name_of_vllm(run: LiveRun) -> None:
    """All that METRICS.md promises, with their colons. Planted: the library's server, in tests/dashboards/test_page_server.py."""
    found = run.api.ask(f'{{job="{JOB}",__name__=~"vllm:.*"}}', run.settled)
    assert lacking_aliases({series.labels["__name__"] for series in found}) == set()


def test_the_boards_can_be_drawn(run: LiveRun, tmp_path: Path) -> None:
    """Each board becomes a picture from these answers, small, and not the one that an empty Prometheus gives."""
    drawn = draw_all(run.api, STEADY_S, tmp_path, "10s", run.steady.ended)
    assert len(drawn) == 3
    assert all(10_000 < len(path.read_bytes()) < 300_000 for path in drawn)
    hours_ago = Span(run.steady.began - 7200, run.steady.began - 7000, 10)
    draw(read(paths()[0], "10s"), run.api, hours_ago, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size < 0.6 * drawn[0].stat().st_size


def test_no_prometheus_is_one_clear_line() -> None:
    """An address without a Prometheus is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=r"no Prometheus answers at http://127\.0\.0\.1:9"):
        Api("http://127.0.0.1:9", timeout_s=1).ask("up")


def test_boards_agree_with_the_load_generator(run: LiveRun) -> None:
    """Whatever a panel shows that the client counts, too, is within 20 % of the client's own figure; a share within 0.1 of it."""
    assert len(run.steady.finished) == run.steady.ledger.sent > 20
    found = shown(run.api, run.steady)
    print("\n" + "\n".join(map(str, found)))
    assert len(found) > 20
    assert [str(each) for each in found if each.error > TOLERANCE] == []


@pytest.mark.parametrize("fault", ["doubled", "dropped"])
def test_a_group_counted_twice_or_left_out_is_caught(run: LiveRun, fault: str) -> None:
    """The same comparison fails for every rate and level where one of the two groups is scraped as two, or not at all."""
    api = getattr(run, fault)
    ours = [each for each in shown(api, run.steady) if each.expected.kind in ("rate", "level")]
    assert len(ours) == 8
    split = "USD"  # over the groups, which are miscounted alike
    close = [each for each in ours if each.error <= TOLERANCE]
    hidden = [str(each) for each in close if split not in each.expected.panel]
    assert hidden == []


def test_histograms_agree_with_the_client_within_a_bucket(run: LiveRun) -> None:
    """p50 and p99 of TTFT and TPOT (clock points of engine/events.py) are within a bucket of the client's; of 4 x, not."""
    found = quantiles(run.api, run.steady)
    for each in found:
        print(f"{each.panel} p{each.q}: server {each.server:.4g}, client {each.client:.4g}, {each.buckets_apart()} buckets apart")
    assert {(each.panel, each.q) for each in found} >= {(panel, q) for panel in ("TTFT", "TPOT") for q in (50, 99)}
    assert [each for each in found if each.buckets_apart() > 1] == []
    assert [each for each in found if each.panel in ("TTFT", "TPOT") and each.buckets_apart(times=4) <= 1] == []


def test_a_killed_replicas_series_go_stale(run: LiveRun) -> None:
    """Within 15 s no series of it answers, nor is it a target; the other's still do. It is down, and counted once, as vanished."""
    death = run.death
    print(f"\nstale after {death.stale:.1f} s, off the list after {death.unlisted:.1f} s, retired after {death.retired:.1f} s")
    print(f"its successor is up after {death.sums[-1][0]:.1f} s")
    assert death.stale <= STALE_S
    assert death.unlisted <= STALE_S
    other = next(replica for replica in run.replicas if replica != death.replica)
    when = death.killed + STALE_S
    for name, replica, answers in (
        ("up", death.replica, 0),
        ("quartet_engine_up", death.replica, 0),
        ("quartet_engine_up", other, 1),
    ):
        assert len(run.api.ask(f'{name}{{replica="{replica}"}}', when)) == answers, (name, replica)
    restarts = run.api.ask("sum by (cause) (quartet_group_restarts_total) > 0", run.settled)
    assert {series.labels["cause"]: series.last for series in restarts} == {"vanished": 1}
    assert run.api.ask(f'quartet_group_up{{replica="{death.replica}"}}', run.settled)[0].last == 0
    assert run.api.ask("quartet_groups", run.settled)[0].last == len(run.replicas)


def total(run: LiveRun, name: str) -> float:
    """Over all that live or have lived."""
    both = (f"sum(quartet_{name})", f"sum(quartet_retired_{name})")
    return sum(run.api.ask(expr, run.settled)[0].last for expr in both)


def test_a_death_counts_nothing_twice_and_loses_one_heartbeat_at_most(run: LiveRun) -> None:
    """All-time totals never fall, nor exceed what the client has sent, and end as running and retired; one heartbeat may lack."""
    sent = CALIBRATION + run.steady.ledger.sent + run.failover.ledger.sent
    sums = [received for _, received, _ in run.death.sums]
    assert sums == sorted(sums)
    assert [each for each in run.death.sums if each[1] > each[2]] == []
    assert len({received for since, received, _ in run.death.sums if since < run.death.retired}) > 3, "it goes on meanwhile"
    for name in ("requests_received_total", "requests_total", "generation_tokens_total"):
        assert run.api.ask(f"sum(quartet_deployment_{name})", run.settled)[0].last == total(run, name)
    recent = run.failover.around(run.death.killed - HEARTBEAT_S, run.death.killed + 0.5)
    received, ended = total(run, "requests_received_total"), total(run, "requests_total")
    assert run.death.before < received == ended
    print(f"\nsent {sent}, received {received:g}; {recent} begun or ended around the kill")
    assert sent - recent <= received <= sent
    done = [*run.steady.finished, *run.failover.finished]
    tokens, prompts = (sum(getattr(each, name) for each in done) for name in ("output_tokens", "prompt_tokens"))
    least = 0.97
    most = sent / len(done) + 0.03  # nobody was told the usage of what was on its way
    assert tokens * least <= total(run, "generation_tokens_total") <= tokens * most
    assert prompts * least <= total(run, "prompt_tokens_total") <= prompts * most
    dead = run.api.ask("sum(quartet_retired_generation_tokens_total)", run.settled)[0].last
    assert total(run, "generation_tokens_total") + dead > tokens * (most + 0.1), "were the dead's counted twice, it would show"


def test_every_request_that_was_cut_is_accounted_for(run: LiveRun) -> None:
    """The client's ledger balances; what did not finish is cut or failed there, dead and lost here, and nothing is silent."""
    balance = run.failover.ledger.balance()
    print("\n", {end: count for end, count in balance.items() if count})
    assert balance["conserved"]
    ends = Counter(record.end for record in run.failover.ledger.records)
    assert set(ends) <= {"finished", "cut", "failed", "refused", "unreachable"}
    broken = ends["cut"] + ends["failed"]
    assert broken > 0
    assert all(record.detail for record in run.failover.ledger.records if record.end != "finished")
    lost = run.api.ask('sum(quartet_retired_requests_total{outcome="dead"})', run.settled)[0].last
    recent = run.failover.around(run.death.killed - HEARTBEAT_S, run.death.killed + 0.5)
    assert lost > 0
    assert abs(lost - broken) <= recent
    unaccounted = run.api.ask("quartet:requests_unaccounted", run.settled)
    assert finite(unaccounted)
    assert {series.last for series in unaccounted} == {0.0}


def test_scrapes_are_small(run: LiveRun) -> None:
    """What one scrape of a replica costs, with two of them under load: nine of ten take half a second at most, and all one."""
    at = run.steady.ended - 1
    for name, quantile, bound in (
        ("scrape_duration_seconds", 0.9, 0.5), ("scrape_duration_seconds", 1, 1.0), ("scrape_samples_scraped", 1, 2000)
    ):  # fmt: skip
        found = [series.last for series in run.api.ask(f'quantile_over_time({quantile}, {name}{{job="quartet"}}[20s])', at)]
        print(f"\n{name}, quantile {quantile}: {[f'{value:.4g}' for value in found]}")
        assert len(found) == len(run.replicas)
        assert max(found) < bound
