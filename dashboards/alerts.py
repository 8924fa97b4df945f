"""Recording and alerting rules: objectives and how fast their budgets burn, and what an operator must know.

`python -m dashboards.alerts` writes `dashboards/alerts.yaml`. A rule's annotations say what happened and what to do (`runbook`).
Burn rate: the share of requests that broke the objective, over the share that may (1 - target). At 1 the budget lasts its period of
30 days, at 14.4 two days. A page needs a long window, for weight, and a short one, so that it ends when the trouble does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboards.metrics import OUTCOMES, Metric
from dashboards.promql import DISCOVERY_JOB, JOB, RULE, Queries
from engine.errors import ConfigError

FILE = Path(__file__).parent / "alerts.yaml"
BURN_WINDOWS = ("5m", "30m", "1h", "6h")
FAST_BURN, SLOW_BURN = 14.4, 6.0
BY_DEPLOYMENT = ("application", "deployment")
BY_REPLICA = (*BY_DEPLOYMENT, "replica")

# A group's end ends its replica too, which Prometheus will hardly scrape once more: what it took along is in the retired counts,
# and read from there alone, so that nothing is there twice.
ENDED_REQUESTS = ("quartet_requests_total", {"outcome": "~" + "|".join(outcome for outcome in OUTCOMES if outcome != "dead")})
FAILED_REQUESTS = ("quartet_requests_total", {"outcome": "~error|refused"})  # not by the client's fault; and:
LOST_REQUESTS = ("quartet_retired_requests_total", {"outcome": "dead"})


@dataclass(frozen=True)
class Objective:
    """A share of requests that must be good. `bad` and `all` are rates of requests over `{window}`."""

    name: str
    target: float

    def burn(self, window: str) -> str:
        """PromQL of the burn rate over `window`, by application and deployment; no sample without traffic."""
        asked = RULE.over(window)
        if self.name == "availability":
            bad = asked.either("rate", FAILED_REQUESTS, LOST_REQUESTS, by=BY_DEPLOYMENT)
            total = asked.either("rate", ENDED_REQUESTS, LOST_REQUESTS, by=BY_DEPLOYMENT)
        else:
            bad = asked.rate("quartet_slo_requests_total", BY_DEPLOYMENT, slo=self.name, verdict="bad")
            total = asked.rate("quartet_slo_requests_total", BY_DEPLOYMENT, slo=self.name)
        return f"({bad} / ({total} > 0)) / {1 - self.target:.6g}"


OBJECTIVES = (Objective("ttft", 0.99), Objective("tpot", 0.99), Objective("availability", 0.999))


@dataclass(frozen=True)
class RecordingRule:
    """A recording rule; `label_names`: the labels of its series."""

    name: str
    expr: str
    label_names: tuple[str, ...]
    labels: tuple[tuple[str, str], ...] = ()

    def document(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {"record": self.name, "expr": self.expr} | ({"labels": dict(self.labels)} if self.labels else {})


@dataclass(frozen=True)
class Alert:
    """An alerting rule. `pending_for`: how long it holds before it fires. `page` wakes somebody, `ticket` waits for the morning."""

    name: str
    expr: str
    pending_for: str
    severity: str
    summary: str
    runbook: str

    def document(self) -> dict[str, Any]:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.pending_for,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": self.runbook},
        }


def burn_name(window: str) -> str:
    """The recorded burn rate over `window`: application, deployment, slo."""
    return f"quartet:slo_burn:rate{window}"


def _burns() -> Iterator[RecordingRule]:
    for window in BURN_WINDOWS:
        for slo in OBJECTIVES:
            yield RecordingRule(burn_name(window), slo.burn(window), (*BY_DEPLOYMENT, "slo"), (("slo", slo.name),))


_RECEIVED = RULE.count("quartet_requests_received_total", BY_REPLICA)
_ENDED = RULE.count("quartet_requests_total", BY_REPLICA)
_OPEN = RULE.total("quartet_requests_in_flight", BY_REPLICA)
_HITS = RULE.over("10m").rate("quartet_prefix_cache_hit_tokens_total", BY_REPLICA)
_LOOKUPS = RULE.over("10m").rate("quartet_prefix_cache_queried_tokens_total", BY_REPLICA)

RECORDS: tuple[RecordingRule, ...] = (
    *_burns(),
    RecordingRule("quartet:requests_unaccounted", f"{_RECEIVED} - {_ENDED} - {_OPEN}", BY_REPLICA),
    RecordingRule("quartet:requests_waiting:sum", RULE.total("quartet_requests_waiting", BY_DEPLOYMENT), BY_DEPLOYMENT),
    RecordingRule("quartet:prefix_cache_hit_ratio:rate10m", f"{_HITS} / ({_LOOKUPS} > 0)", BY_REPLICA),
    RecordingRule("quartet:waiting_tokens:sum", RULE.total("quartet_waiting_tokens", BY_DEPLOYMENT), BY_DEPLOYMENT),
)


def recorded(name: str, queries: Queries = RULE) -> str:
    """The series that a rule records as `name`, inside the scope of `queries`; ConfigError when no rule does."""
    for record in RECORDS:
        if record.name == name:
            return queries.of(Metric(name, "gauge", "", labels=record.label_names))
    raise ConfigError(f"no rule records {name!r}")


def _burning(short: str, long: str, factor: float) -> str:
    return f"{recorded(burn_name(short))} > {factor} and {recorded(burn_name(long))} > {factor}"


_WAITING, _QUEUE = recorded("quartet:requests_waiting:sum"), recorded("quartet:waiting_tokens:sum")
_HIT_RATIO = recorded("quartet:prefix_cache_hit_ratio:rate10m")
_STALL = RULE.total("quartet_rank_stall_seconds", BY_REPLICA, fold="max")
_STEP_BOUND = RULE.total("quartet_engine_step_bound_seconds", BY_REPLICA, fold="max")
_TARGET_REPLICAS = RULE.total("ray_serve_autoscaling_target_replicas", BY_DEPLOYMENT, fold="max")

ALERTS: tuple[Alert, ...] = (
    Alert(
        "QuartetBudgetBurnsFast",
        _burning("5m", "1h", FAST_BURN),
        "1m",
        "page",
        "{{ $labels.deployment }}: the {{ $labels.slo }} budget of 30 days would be gone in two",
        "Latency board, row of that objective. Queue time high: add groups or shed load (max_queued). Prefill high: long prompts,"
        " see prompt lengths. TPOT high: Operator board, running sequences and step time. Availability: there, ends by outcome.",
    ),
    Alert(
        "QuartetBudgetBurnsSlowly",
        _burning("30m", "6h", SLOW_BURN),
        "5m",
        "ticket",
        "{{ $labels.deployment }}: the {{ $labels.slo }} budget of 30 days would be gone in five",
        "As for QuartetBudgetBurnsFast, without haste: is the objective right for this load, is max_replicas reached?",
    ),
    Alert(
        "QuartetEngineDown",
        f"{RULE.total('quartet_engine_up', BY_REPLICA, fold='min')} == 0",
        "10s",
        "page",
        "{{ $labels.replica }}: its group has ended and the replica still answers scrapes",
        "The replica exits by itself and Serve starts a new one within seconds. If this stays, read the replica's log for the line"
        " that names the process and how it ended, and end the replica.",
    ),
    Alert(
        "QuartetTargetUnreachable",
        f"{RULE.level('up', job=f'~{JOB}|{DISCOVERY_JOB}')} == 0",
        "30s",
        "page",
        "{{ $labels.instance }} is listed and does not answer scrapes",
        "A replica that hangs, or a network between it and Prometheus. A dead one leaves the list by itself (quartet_group_up).",
    ),
    Alert(
        "QuartetGroupsMissing",
        f"{_TARGET_REPLICAS} - on (application, deployment) {RULE.total('quartet_groups', BY_DEPLOYMENT)} > 0",
        "10m",
        "page",
        "{{ $labels.deployment }}: {{ $value }} groups fewer than Serve aims at, for ten minutes",
        "No node has that many free GPUs (`ray status`), or groups fail while they boot: Status board, restarts by cause.",
    ),
    Alert(
        "QuartetRankStalled",
        f"{_STALL} > 0.5 * {_STEP_BOUND}",
        "0s",
        "page",
        "{{ $labels.replica }}: a process owes a step for {{ $value }} s, more than half of its bound",
        "Status board, stall by rank: one rank alone means its GPU (dmesg, Xid), all ranks mean the collective or the core. The"
        " group is ended at the bound and restarted; py-spy before that shows where it hangs.",
    ),
    Alert(
        "QuartetRestartLoop",
        f"{RULE.over('30m').increase('quartet_group_restarts_total', BY_DEPLOYMENT)} > 2.5",
        "0s",
        "page",
        "{{ $labels.deployment }}: three groups or more ended unasked within 30 minutes",
        "Status board, restarts by cause. killed: out of memory (dmesg) or a person. rank_stalled: a GPU. diverged: a GPU that"
        " computed something else, the log names the ranks. failed: its log says why. Take a bad node out of the cluster.",
    ),
    Alert(
        "QuartetRequestsLost",
        f"{RULE.increase('quartet_retired_requests_total', BY_DEPLOYMENT, outcome='dead')} > 0",
        "0s",
        "ticket",
        "{{ $labels.deployment }}: {{ $value }} requests ended with their group",
        "Each open stream got an error event, or was cut where the replica itself was killed. Find the group's end in the Status"
        " board, restarts by cause.",
    ),
    Alert(
        "QuartetRequestsUnaccounted",
        f"abs({recorded('quartet:requests_unaccounted')}) > 0",
        "2m",
        "ticket",
        "{{ $labels.replica }}: received, ended and open requests differ by {{ $value }}",
        "A defect of ours: a request without an end, or with two. Keep the replica's log, and report it.",
    ),
    Alert(
        "QuartetQueueGrows",
        f"min_over_time({_WAITING}[5m]) > 0 and {_QUEUE} > {_QUEUE} offset 5m",
        "5m",
        "ticket",
        "{{ $labels.deployment }}: requests wait since ten minutes, and more of them",
        "Is max_replicas reached (Operator board, groups)? Are pages the limit (KV cache) or slots (running = slots)?",
    ),
    Alert(
        "QuartetPoolSaturated",
        f"{RULE.total('quartet_kv_usage_ratio', (*BY_REPLICA, 'group'), fold='max')} > 0.97",
        "10m",
        "ticket",
        "{{ $labels.replica }}: the {{ $labels.group }} KV pool is {{ $value | humanizePercentage }} full for ten minutes",
        "Full pool: contexts are long, add groups or lower max_seqs. Sliding pool: it is sized by slots; raise its share.",
    ),
    Alert(
        "QuartetPoolThrashes",
        f"{RULE.rate('quartet_preemptions_total', BY_REPLICA)} > 0.2 * {RULE.rate('quartet_requests_received_total', BY_REPLICA)}",
        "5m",
        "ticket",
        "{{ $labels.replica }}: more than one preemption for five requests",
        "Sequences are put back and computed again: TTFT and cost suffer. Fewer slots (max_seqs) or more pages.",
    ),
    Alert(
        "QuartetPrefixCacheCollapsed",
        f"{_HIT_RATIO} < 0.02 and {_HIT_RATIO} offset 1h > 0.2",
        "10m",
        "ticket",
        "{{ $labels.replica }}: the prefix cache finds nothing any more; an hour ago it found more than a fifth",
        "Operator board, prefix cache: pages evicted fast means the working set outgrew the pools (more replicas, or route a"
        " conversation to the replica that has it). None evicted means other prompts: a date or an id at their beginning?",
    ),
    Alert(
        "QuartetDiscoveryStale",
        f"{RULE.increase('prometheus_sd_http_failures_total')} > 0",
        "5m",
        "ticket",
        "Prometheus cannot read the list of groups; it scrapes the last list it got",
        'Is the discovery endpoint up (`up{job="quartet-discovery"}`)? It restarts with the application.',
    ),
)


def document() -> str:
    """The rules file's text."""
    import yaml

    groups = [
        {"name": "quartet-recording", "rules": [record.document() for record in RECORDS]},
        {"name": "quartet-alerts", "rules": [alert.document() for alert in ALERTS]},
    ]
    head = "# Written by `make dashboards` from dashboards/alerts.py: edit that.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    FILE.write_text(document())
