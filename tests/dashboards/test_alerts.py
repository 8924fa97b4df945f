"""The rules: promtool accepts them, and each alert fires when it must and only then."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring.promcheck import complaints, names
from tests.support.monitoring.tables import ALERTS, RECORDED_LABELS, RECORDS, RULES

pytestmark = pytest.mark.pure

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here: apt-get install prometheus")

PLACE = 'application="quartet",deployment="gemma"'
ON = f'{PLACE},replica="r1",job="quartet",instance="10.0.0.1:1"'
MINUTES_OF_DAY = 480


def slo(slo: str, good: int, bad: int, until: int = MINUTES_OF_DAY) -> dict[str, str]:
    """Requests judged each minute; after `until` minutes none is bad any more."""
    last = bad * until
    still = f" {last}x{MINUTES_OF_DAY - until}" if until < MINUTES_OF_DAY else ""
    return {
        f'quartet_slo_requests_total{{{ON},slo="{slo}",verdict="good"}}': f"0+{good}x{MINUTES_OF_DAY}",
        f'quartet_slo_requests_total{{{ON},slo="{slo}",verdict="bad"}}': f"0+{bad}x{until}{still}",
    }


def request_counts(received: int, ended: int, in_flight: int) -> dict[str, str]:
    return {
        f"quartet_requests_received_total{{{ON}}}": f"{received}x20",
        f'quartet_requests_total{{{ON},outcome="stop"}}': f"{ended}x20",
        f"quartet_requests_in_flight{{{ON}}}": f"{in_flight}x20",
    }


@dataclass(frozen=True)
class Case:
    """At minute `at`, with these series a minute apart, `alert` fires so many times."""

    alert: str
    series: dict[str, str]
    at: str
    fires: int

    def expectation(self) -> dict[str, Any]:
        firing = f'ALERTS{{alertname="{self.alert}",alertstate="firing"}}'
        samples = [{"labels": "{}", "value": self.fires}] if self.fires else []
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in self.series.items()],
            "promql_expr_test": [{"expr": f"count({firing})", "eval_time": self.at, "exp_samples": samples}],
        }


BOUND = f"quartet_engine_step_bound_seconds{{{ON}}}"
STALL = f'quartet_rank_stall_seconds{{{ON},rank="%d"}}'
RESTARTS = f'quartet_group_restarts_total{{{PLACE},cause="killed"}}'
PREEMPTED, RECEIVED = f"quartet_preemptions_total{{{ON}}}", f"quartet_requests_received_total{{{ON}}}"
WAITING, QUEUE = f"quartet_requests_waiting{{{ON}}}", f"quartet_waiting_tokens{{{ON}}}"
LOOKED_UP = f"quartet_prefix_cache_queried_tokens_total{{{ON}}}"
FOUND = f"quartet_prefix_cache_hit_tokens_total{{{ON}}}"
DRAFTED, ACCEPTED = f"quartet_draft_tokens_total{{{ON}}}", f"quartet_accepted_draft_tokens_total{{{ON}}}"
DEAD = f'quartet_retired_requests_total{{{PLACE},outcome="dead"}}'
ANSWERED, REFUSED, LATE = (f'quartet_requests_total{{{ON},outcome="{outcome}"}}' for outcome in ("stop", "refused", "deadline"))
POOL = f'quartet_kv_usage_ratio{{{ON},group="%s"}}'
TARGET, GROUPS = f"ray_serve_autoscaling_target_replicas{{{PLACE}}}", f"quartet_groups{{{PLACE}}}"
DISCOVERY = 'prometheus_sd_http_failures_total{job="prometheus"}'

CASES = (
    Case("QuartetBudgetBurnsFast", slo("ttft", 80, 20), "70m", 1),
    Case("QuartetBudgetBurnsFast", slo("ttft", 88, 12), "70m", 0),               # burns at 12: not yet a page
    Case("QuartetBudgetBurnsFast", slo("tpot", 80, 20, until=60), "70m", 0),     # over: the short window has forgotten
    Case("QuartetBudgetBurnsSlowly", slo("ttft", 92, 8), "400m", 1),
    Case("QuartetBudgetBurnsSlowly", slo("ttft", 95, 5), "400m", 0),
    Case("QuartetEngineDown", {f"quartet_engine_up{{{ON}}}": "1x4 0x10"}, "8m", 1),
    Case("QuartetEngineDown", {f"quartet_engine_up{{{ON}}}": "1x20"}, "8m", 0),
    Case("QuartetTargetUnreachable", {f"up{{{ON}}}": "1x4 0x10"}, "8m", 1),
    Case("QuartetTargetUnreachable", {f"up{{{ON}}}": "1x20", 'up{job="other"}': "0x20"}, "8m", 0),
    Case("QuartetGroupsMissing", {TARGET: "2x30", GROUPS: "1x30"}, "15m", 1),
    Case("QuartetGroupsMissing", {'ray_serve_autoscaling_target_replicas{application="a",deployment="Quartet"}': "1x30"}, "15m", 1),
    Case("QuartetGroupsMissing", {TARGET: "2x30", GROUPS: "1x5 2x25"}, "15m", 0),      # it only took a while to boot
    Case("QuartetRankStalled", {BOUND: "30x10", STALL % 0: "0x10", STALL % 1: "0x4 20x6"}, "6m", 1),
    Case("QuartetRankStalled", {BOUND: "30x10", STALL % 0: "0x10", STALL % 1: "0x4 10x6"}, "6m", 0),
    Case("QuartetRestartLoop", {RESTARTS: "0x10 1x5 2x5 3x10"}, "28m", 1),
    Case("QuartetRestartLoop", {RESTARTS: "0x10 1x5 2x20"}, "28m", 0),
    Case("QuartetRequestsLost", {DEAD: "0x5 7x10"}, "8m", 1),
    Case("QuartetRequestsLost", {DEAD: "7x20"}, "8m", 0),
    Case("QuartetBudgetBurnsFast", {ANSWERED: "0+100x65", DEAD: "0+2x65"}, "65m", 1),  # groups die, and nobody else can tell
    Case("QuartetBudgetBurnsFast", {ANSWERED: "0+100x65", DEAD: "0+1x65"}, "65m", 0),
    Case("QuartetBudgetBurnsFast", {ANSWERED: "0+100x65", LATE: "0+2x65"}, "65m", 1),   # no death yet: no series of one
    Case("QuartetBudgetBurnsFast", {ANSWERED: "0+100x65", REFUSED: "0+9x65"}, "65m", 0),   # what clients asked wrongly is theirs
    Case("QuartetRequestsUnaccounted", request_counts(100, 90, 9), "10m", 1),
    Case("QuartetRequestsUnaccounted", request_counts(100, 90, 10), "10m", 0),
    Case("QuartetQueueGrows", {WAITING: "5x30", QUEUE: "100+50x30"}, "20m", 1),
    Case("QuartetQueueGrows", {WAITING: "5x30", QUEUE: "1000-10x30"}, "20m", 0),
    Case("QuartetPoolSaturated", {POOL % "full": "0.99x30", POOL % "sliding": "0.5x30"}, "15m", 1),
    Case("QuartetPoolSaturated", {POOL % "full": "0.95x30", POOL % "sliding": "0.5x30"}, "15m", 0),
    Case("QuartetPoolThrashes", {PREEMPTED: "0+30x30", RECEIVED: "0+60x30"}, "15m", 1),
    Case("QuartetPoolThrashes", {PREEMPTED: "0+3x30", RECEIVED: "0+60x30"}, "15m", 0),
    Case("QuartetPrefixCacheCollapsed", {LOOKED_UP: "0+600x120", FOUND: "0+300x60 18000x60"}, "95m", 1),
    Case("QuartetPrefixCacheCollapsed", {LOOKED_UP: "0+600x120", FOUND: "0+300x120"}, "95m", 0),
    Case("QuartetPrefixCacheCollapsed", {LOOKED_UP: "0+600x120", FOUND: "0x120"}, "95m", 0),  # it never found anything
    Case("QuartetDraftsRejected", {DRAFTED: "0+600x40", ACCEPTED: "0+6x40"}, "30m", 1),
    Case("QuartetDraftsRejected", {DRAFTED: "0+600x40", ACCEPTED: "0+18x40"}, "30m", 0),
    Case("QuartetDraftsRejected", {DRAFTED: "0+30x40", ACCEPTED: "0x40"}, "30m", 0),    # trials alone, a draft in two seconds
    Case("QuartetDiscoveryStale", {DISCOVERY: "0+6x30"}, "15m", 1),
    Case("QuartetDiscoveryStale", {DISCOVERY: "6x30"}, "15m", 0),
)  # fmt: skip

# The text of a notification: the template is filled in with the labels and the value.
TOLD = {
    "interval": "1m",
    "input_series": [{"series": f"quartet_engine_up{{{ON}}}", "values": "1x4 0x10"}],
    "alert_rule_test": [
        {
            "alertname": "QuartetEngineDown",
            "eval_time": "8m",
            "exp_alerts": [
                {
                    "exp_labels": {"severity": "page", "application": "quartet", "deployment": "gemma", "replica": "r1"},
                    "exp_annotations": {
                        "summary": "r1: its group has ended and the replica still answers scrapes",
                        "runbook": next(alert.runbook for alert in ALERTS if alert.name == "QuartetEngineDown"),
                    },
                }
            ],
        }
    ],
}
BURN = {
    "interval": "1m",
    "input_series": [{"series": name, "values": values} for name, values in slo("ttft", 80, 20).items()],
    "promql_expr_test": [
        {
            "expr": "quartet:slo_burn:rate1h",
            "eval_time": "70m",
            "exp_samples": [
                {"labels": 'quartet:slo_burn:rate1h{application="quartet",deployment="gemma",slo="ttft"}', "value": 20}
            ],
        }
    ],
}


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60, check=False)


def judged(folder: Path, rules: str, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """`promtool test rules` over these rules and tests."""
    (folder / "rules.yaml").write_text(rules)
    (folder / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}))
    return promtool("test", "rules", str(folder / "tests.yaml"))


def planted(expr: str, *alerts: str) -> str:
    """The rules whose alerts, or those of these names, ask for `expr`. Without recordings, which nothing then reads."""
    rules = yaml.safe_load(RULES.read_text())["groups"][1]
    kept = [rule | {"expr": expr} for rule in rules["rules"] if not alerts or rule["alert"] in alerts]
    return yaml.safe_dump({"groups": [rules | {"rules": kept}]})


def test_every_rule_holds_against_the_table() -> None:
    """Every metric and label of every rule exists, recorded names included, and a recording carries the labels it states."""
    exprs = {rule.name: rule.expr for rule in RECORDS} | {rule.name: rule.expr for rule in ALERTS}
    assert [f"{name}: {line}" for name, expr in exprs.items() for line in complaints(expr)] == []
    for record in RECORDS:
        text = " ".join(f"{{{{{label}}}}}" for label in set(RECORDED_LABELS[record.name]) - record.labels.keys())
        assert complaints(record.expr, text) == [], record.name
    assert complaints("quartet_engine_down == 0") == ["nothing is called quartet_engine_down"]


def test_every_alert_says_what_to_do() -> None:
    """Names are unique, each has a summary, a runbook and one of two severities, and its templates name labels that it has."""
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    for alert in ALERTS:
        assert alert.labels["severity"] in ("page", "ticket")
        assert len(alert.runbook) > 40, alert.name
        named = " ".join(f"{{{{{label}}}}}" for label in re.findall(r"{{ \$labels\.(\w+) }}", alert.summary))
        assert complaints(alert.expr, named) == [], alert.name


def test_every_recording_is_read() -> None:
    """No recording rule without an alert."""
    read = {name for alert in ALERTS for name in names(alert.expr)}
    assert {record.name for record in RECORDS} - read == set()


@needs_promtool
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    """`promtool check rules` passes the committed file, and not one with a broken expression."""
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stderr
    assert f"{len(RECORDS) + len(ALERTS)} rules found" in done.stdout
    (tmp_path / "rules.yaml").write_text(planted("sum by (replica (quartet_engine_up) == 0", "QuartetEngineDown"))
    assert promtool("check", "rules", str(tmp_path / "rules.yaml")).returncode != 0


@needs_promtool
def test_alerts_fire_when_they_must_and_at_no_other_time(tmp_path: Path) -> None:
    """Every alert has a case in which it fires and one, close by, in which it does not; the burn rate is that of a hand's sum."""
    for fires in (0, 1):
        assert {case.alert for case in CASES if case.fires == fires} == {alert.name for alert in ALERTS}
    done = judged(tmp_path, RULES.read_text(), [*(case.expectation() for case in CASES), TOLD, BURN])
    assert done.returncode == 0, done.stderr


@needs_promtool
@pytest.mark.parametrize(("expr", "fires"), [("quartet_no_such_metric == 0", 1), ("vector(1)", 0)])
def test_planted_faults_in_rules_are_caught(expr: str, fires: int, tmp_path: Path) -> None:
    """Alerts that ask for a metric nobody has, and alerts that always fire, each fail a case of their own."""
    cases = {case.alert: case.expectation() for case in CASES if case.fires == fires}
    done = judged(tmp_path, planted(expr), [*cases.values()])
    assert done.returncode == 1
    assert set(re.findall(r'alertname=\\?"(\w+)', done.stdout + done.stderr)) == {alert.name for alert in ALERTS}
