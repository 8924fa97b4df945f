"""A real Prometheus scrapes real exporters while a seeded script of load runs: the boards' and the rules' answers are true."""

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from tests.support.monitoring.committed import paths, read
from tests.support.monitoring.pictures import Span, draw, draw_all
from tests.support.monitoring.prometheus import Api, Prometheus
from tests.support.monitoring.query_checks import figures, silent
from tests.support.monitoring.scripted_exporters import ScriptedLoad, replay, scripted_load, serve_exporters, wait_scraped
from tests.support.monitoring.tables import RULES

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.alone,
    pytest.mark.slow,  # tests/serve/test_live.py asks the same of a real deployment; here the script knows the truth exactly
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not here: apt-get install prometheus"),
]

SECONDS = 20.0
AT = SECONDS - 3  # the script is still in full flow here
WINDOW = 10
# Scrapes are a second apart, and a quantile is interpolated inside a bucket that may be half as wide as its bound.
TOLERANCE = 0.20
RENAMED = "quartet_generation_tokens_total"


@dataclass(frozen=True)
class Run:
    """A rehearsal that is over: Prometheus still answers, and so does one that scraped the same under a wrong name."""

    load_script: ScriptedLoad
    began: float
    api: Api
    faulty: Api


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Three groups, twenty seconds."""
    load_script = scripted_load(seconds=SECONDS)
    with ExitStack() as stack:
        ready = stack.enter_context(serve_exporters(load_script.scripts))
        right, wrong = (stack.enter_context(Prometheus(scrapes, RULES)) for scrapes in (ready.scrapes, renaming(ready.scrapes)))
        for prometheus in (right, wrong):
            wait_scraped(prometheus.api, len(load_script.scripts) + 3)
        began = replay(load_script, ready)
        time.sleep(max(0.0, began + SECONDS + 2.5 - time.time()))  # two more scrapes
        yield Run(load_script, began, right.api, wrong.api)


def renaming(scrapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same jobs, with one metric called something else on the way in."""
    rule = {"source_labels": ["__name__"], "regex": RENAMED, "target_label": "__name__", "replacement": "quartet_generated_total"}
    return [{**scrape, "metric_relabel_configs": [rule]} for scrape in scrapes]


def test_every_query_of_every_board_and_rule_answers(run: Run) -> None:
    """Every panel query, recording rule and alert input returns finite data, and every rule is healthy."""
    assert silent(run.api, f"{WINDOW}s", run.began + AT) == []


def test_a_renamed_metric_is_caught(run: Run) -> None:
    """Where one metric has another name, the panels that show it are reported, and no other."""
    unanswered = silent(run.faulty, f"{WINDOW}s", run.began + AT)
    assert len(unanswered) >= 2
    assert [line for line in unanswered if RENAMED not in line] == []


def test_answers_agree_with_the_script(run: Run) -> None:
    """Rates, quantiles and means are within 20 % of what the script itself counts."""
    answers = figures(run.api, run.load_script, run.began, AT, WINDOW)
    print("\n".join(f"{figure.error:6.1%} {figure.answered:10.5g} {figure.true:10.5g} {figure.what}" for figure in answers))
    assert [figure for figure in answers if figure.error > TOLERANCE] == []


def test_a_group_left_out_is_caught(run: Run) -> None:
    """Against the counts of two groups of the three, the rates are off by far more than the tolerance."""
    two = replace(run.load_script, scripts=dict(list(run.load_script.scripts.items())[:2]))
    rates = figures(run.api, two, run.began, AT, WINDOW)[:4]
    assert all(figure.error > 0.35 for figure in rates), rates


def test_the_counts_add_up(run: Run) -> None:
    """After the last event every request received has exactly one end, by outcome as the script has them, to the last one."""
    now = run.began + SECONDS + 2
    requests = [request for group in run.load_script.scripts.values() for request in group.requests]
    answer = run.api.ask("sum by (outcome) (quartet_requests_total) > 0", now)
    ends = {series.labels["outcome"]: int(series.last) for series in answer}
    assert ends == Counter(request.outcome for request in requests)
    assert {series.last for series in run.api.ask("quartet:requests_unaccounted", now)} == {0.0}
    tokens = run.api.ask("sum (quartet_generation_tokens_total)", now)[0].last
    assert tokens == sum(len(request.tokens) for request in requests)
    assert tokens != sum(len(request.tokens) for request in requests[1:])


def test_the_boards_can_be_drawn(run: Run, tmp_path: Path) -> None:
    """Each board becomes a picture from these answers, small, and not the one that an empty Prometheus gives."""
    end = run.began + AT
    drawn = draw_all(run.api, SECONDS - 4, tmp_path, f"{WINDOW}s", end)
    assert len(drawn) == 3
    for path in drawn:
        full = path.read_bytes()
        assert 10_000 < len(full) < 300_000
    draw(read(paths()[0], f"{WINDOW}s"), run.api, Span(end - 7200, end - 7000, 10), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size < 0.6 * drawn[0].stat().st_size


def test_no_prometheus_is_one_clear_line() -> None:
    """An address without a Prometheus, and a query that it refuses, are ConfigErrors that name it."""
    with pytest.raises(ConfigError, match=r"no Prometheus answers at http://127\.0\.0\.1:9"):
        Api("http://127.0.0.1:9", timeout_s=1).ask("up")
