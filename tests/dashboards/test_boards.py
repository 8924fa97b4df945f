"""The boards: every query holds against the table, and Grafana can lay it out."""

import json
import re
from itertools import combinations
from typing import Any

import pytest

from dashboards.metrics import DISCOVERY_METRICS, ENGINE
from engine.errors import ConfigError
from tests.support.monitoring.committed import bind, paths, read
from tests.support.monitoring.promcheck import complaints, names
from tests.support.monitoring.tables import ALERTS, RECORDS

pytestmark = pytest.mark.pure

# Rows that no panel and no rule shows, on purpose.
UNDRAWN = {
    "quartet_kv_cache_usage_ratio",          # for gateways that read one figure; boards show both pools
    "quartet_kv_pages", "quartet_kv_page_tokens",    # vLLM's cache_config_info
    "quartet_build_info",                    # read by a person
    "quartet_request_inference_time_seconds",    # prefill and decode are drawn apart
    "quartet_request_generation_tokens", "quartet_engine_step_tokens",    # for vLLM's boards
    "quartet_adapter_requests", "quartet_adapter_slots",    # there are none where no adapters are served
    "quartet_key_requests_total",            # there are none where no keys are set
    "quartet_key_tokens_total",
}  # fmt: skip


def committed() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in paths()]


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def structure(board: dict[str, Any]) -> list[str]:
    """What Grafana, or a person, would stumble over."""
    problems = []
    ids = [panel["id"] for panel in board["panels"]]
    problems += [f"id {number} twice" for number in sorted({one for one in ids if ids.count(one) > 1})]
    for one, other in combinations(board["panels"], 2):
        if overlap(one["gridPos"], other["gridPos"]):
            problems.append(f"{one['title']} lies on {other['title']}")
    for panel in panels(board):
        if not (panel.get("description") and panel["fieldConfig"]["defaults"].get("unit") and panel["targets"]):
            problems.append(f"{panel['title']} lacks a description, a unit or a query")
    problems += [f"a fixed datasource {uid}" for uid in datasources(board) if uid != "${datasource}"]
    return problems


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    apart = (
        one["x"] + one["w"] <= other["x"]
        or other["x"] + other["w"] <= one["x"]
        or one["y"] + one["h"] <= other["y"]
        or other["y"] + other["h"] <= one["y"]
    )
    return not apart


def datasources(node: Any) -> list[str]:
    if isinstance(node, dict):
        here = [node["datasource"]["uid"]] if isinstance(node.get("datasource"), dict) else []
        return here + [uid for value in node.values() for uid in datasources(value)]
    return [uid for value in node for uid in datasources(value)] if isinstance(node, list) else []


def queries() -> list[tuple[str, str, str]]:
    """(where, bound expression, legend) of every query of every board."""
    pages = [read(path, "1m") for path in paths()]
    drawn = [(page.uid, panel) for page in pages for panel in page.panels]
    return [(f"{uid}: {panel.title}", asked.expr, asked.legend) for uid, panel in drawn for asked in panel.asked]


def test_three_boards_of_few_panels() -> None:
    """Operator, Latency and Status, 25 to 40 panels between them, each board under an address of its own."""
    boards = committed()
    assert {board["uid"] for board in boards} == {"quartet-operator", "quartet-latency", "quartet-status"}
    assert 25 <= sum(len(panels(board)) for board in boards) <= 40


@pytest.mark.parametrize("board", committed(), ids=lambda board: str(board["uid"]))
def test_structure(board: dict[str, Any]) -> None:
    """Unique ids, nothing overlaps, every panel says what it shows, and every query asks the datasource that the reader chose."""
    assert structure(board) == []
    assert board["templating"]["list"][0]["name"] == "datasource"


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("panels", 3, "id"), 2, "id 2 twice"),
        (("panels", 3, "gridPos", "x"), 0, " lies on "),
        (("panels", 3, "description"), "", "lacks a description"),
        (("panels", 3, "targets", 0, "datasource", "uid"), "prom1", "a fixed datasource prom1"),
    ],
)
def test_a_planted_fault_of_structure_is_caught(path: tuple[str | int, ...], value: object, why: str) -> None:
    """A duplicate id, an overlap, a panel without words and a fixed datasource are each reported."""
    board = committed()[0]
    node = board
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    problems = structure(board)
    assert problems
    assert all(why in line for line in problems), problems


def test_every_query_holds_against_the_table() -> None:
    """Every metric of every query is a row with the right suffix, every label exists, every legend's label is in the answer."""
    asked = queries()
    assert len(asked) > 50
    wrong = [f"{where}: {line}" for where, expr, legend in asked for line in complaints(expr, legend)]
    assert wrong == []


@pytest.mark.parametrize(
    ("expr", "legend", "why"),
    [
        ("sum(rate(quartet_generated_tokens_total[1m]))", "", "nothing is called quartet_generated_tokens_total"),
        ("sum(rate(quartet_generation_tokens[1m]))", "", "nothing is called quartet_generation_tokens"),
        ("rate(quartet_time_to_first_token_seconds[1m])", "", "nothing is called quartet_time_to_first_token_seconds"),
        ('quartet_requests_total{finish="stop"}', "", "quartet_requests_total has no label 'finish'"),
        ("sum by (pool) (quartet_kv_pages)", "", "no label 'pool'"),
        ("sum by (replica) (quartet_kv_pages)", "{{group}}", "the legend names 'group'"),
        ("rate(quartet_requests_running[1m])", "", "rate of quartet_requests_running, which is a gauge"),
        ('quartet_time_to_first_token_seconds_bucket{le="0.42"}', "", "has no bucket 0.42"),
        ("histogram_quantile(0.9, sum by (replica) (rate(quartet_e2e_request_latency_seconds_bucket[1m])))", "", "without le"),
        ("quartet_groups - on (replica) quartet_engine_up", "", "one side lacks 'replica'"),
        ("quartet:slo_burn:rate7m", "", "nothing is called quartet:slo_burn:rate7m"),
    ],
)
def test_a_planted_fault_of_a_query_is_caught(expr: str, legend: str, why: str) -> None:
    """A wrong name, suffix, label, bucket, fold, legend or kind gives exactly one complaint, which names it."""
    problems = complaints(expr, legend)
    assert len(problems) == 1, problems
    assert why in problems[0]


def test_a_variable_that_the_board_lacks_is_caught() -> None:
    """A query with a variable that nobody defines raises, with its name."""
    with pytest.raises(ConfigError, match=r"nothing defines \$price"):
        bind("a * $price", {"datasource": "x"})


def test_every_row_is_shown_or_says_why_not() -> None:
    """Each row of the table stands in a panel, a rule, or the list above; retired counters stand for their living siblings."""
    exprs = [expr for _, expr, _ in queries()] + [rule.expr for rule in (*RECORDS, *ALERTS)]
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for expr in exprs for name in names(expr)}
    summed = ("quartet_retired_", "quartet_deployment_")
    rows = {row.name for row in (*ENGINE, *DISCOVERY_METRICS) if not row.name.startswith(summed)}
    assert rows - shown == UNDRAWN
