"""What boards and rules may name: the tables of metrics with the labels that scraped series carry, and the committed rules."""

from dataclasses import dataclass

import yaml

from dashboards.metrics import DISCOVERY_METRICS, ENGINE, TARGET_LABELS, Metric
from tests.support.repo_rules import ROOT

RULES = ROOT / "dashboards" / "alerts.yaml"
JOB = "quartet"  # the groups' exporters, found through the discovery endpoint
DISCOVERY_JOB = "quartet-discovery"  # the discovery endpoint's own metrics
SCRAPE_LABELS = ("job", "instance")  # what Prometheus adds to every series
_TARGET = (*SCRAPE_LABELS, *TARGET_LABELS)
_DEPLOYMENT = ("application", "deployment")
_REPLICA = (*_DEPLOYMENT, "replica")

# What Prometheus itself and Ray (a job of its own) expose, as far as boards and rules read it; with all of their labels.
EXTERNAL_METRICS: tuple[Metric, ...] = (
    Metric("up", "1 where the last scrape of a target worked.", label_names=" ".join(_TARGET)),
    Metric("prometheus_sd_http_failures_total", "Failed refreshes of the list of targets.", label_names=" ".join(SCRAPE_LABELS)),
    Metric("ray_serve_autoscaling_target_replicas", "Replicas that Serve aims at.", label_names=" ".join(_DEPLOYMENT)),
    Metric("ray_serve_autoscaling_desired_replicas", "The policy's answer, before its bounds.", label_names=" ".join(_DEPLOYMENT)),
)

# Row by name, and every label that a scraped series of it carries.
METRIC_OF_NAME: dict[str, Metric] = {metric.name: metric for metric in (*ENGINE, *DISCOVERY_METRICS, *EXTERNAL_METRICS)}
LABELS: dict[str, frozenset[str]] = {
    **{metric.name: frozenset((*metric.labels, *_TARGET)) for metric in ENGINE},
    **{metric.name: frozenset((*metric.labels, *SCRAPE_LABELS)) for metric in DISCOVERY_METRICS},
    **{metric.name: frozenset(metric.labels) for metric in EXTERNAL_METRICS},
}

# The labels that each recorded series has.
RECORDED_LABELS = {
    **{f"quartet:slo_burn:rate{window}": (*_DEPLOYMENT, "slo") for window in ("5m", "30m", "1h", "6h")},
    "quartet:requests_unaccounted": _REPLICA,
    "quartet:requests_waiting:sum": _DEPLOYMENT,
    "quartet:prefix_cache_hit_ratio:rate10m": _REPLICA,
    "quartet:waiting_tokens:sum": _DEPLOYMENT,
}


@dataclass(frozen=True)
class Rule:
    """One rule of the file; `labels`: what it puts on its series or alerts."""

    name: str
    expr: str
    labels: dict[str, str]
    summary: str = ""
    runbook: str = ""


def _rules(group: int, key: str) -> tuple[Rule, ...]:
    rules = yaml.safe_load(RULES.read_text())["groups"][group]["rules"]
    return tuple(Rule(rule[key], rule["expr"], rule.get("labels", {}), **rule.get("annotations", {})) for rule in rules)


RECORDS, ALERTS = _rules(0, "record"), _rules(1, "alert")
