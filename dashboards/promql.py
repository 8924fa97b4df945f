"""PromQL from the table: a query names its metric by the row, so that a typo, a strange label or a rate of a gauge raises.

    BOARD.rate("quartet_generation_tokens_total", by=("replica",))
    -> sum by (replica) (rate(quartet_generation_tokens_total{deployment=~"$deployment",...}[$__rate_interval]))

What a scraped series carries beside its row's own labels comes from service discovery: TARGET_LABELS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dashboards.metrics import DISCOVERY_METRICS, ENGINE, TARGET_LABELS, Metric
from engine.errors import ConfigError

JOB = "quartet"  # the groups' exporters, found through the discovery endpoint
DISCOVERY_JOB = "quartet-discovery"  # the discovery endpoint's own metrics
SCRAPE_LABELS = ("job", "instance")  # what Prometheus adds to every series
_TARGET = (*SCRAPE_LABELS, *TARGET_LABELS)
_DEPLOYMENT = ("application", "deployment")

# What Prometheus itself and Ray (a job of its own) expose, as far as boards and rules read it; with all of their labels.
EXTERNAL_METRICS: tuple[Metric, ...] = (
    Metric("up", "gauge", "1 where the last scrape of a target worked.", labels=_TARGET),
    Metric("prometheus_sd_http_failures_total", "counter", "Failed refreshes of the list of targets.", labels=SCRAPE_LABELS),
    Metric("ray_serve_autoscaling_target_replicas", "gauge", "Replicas that Serve aims at.", labels=_DEPLOYMENT),
    Metric("ray_serve_autoscaling_desired_replicas", "gauge", "The policy's answer, before its bounds.", labels=_DEPLOYMENT),
)

# Row by name, and every label that a scraped series of it carries.
METRIC_OF_NAME: dict[str, Metric] = {metric.name: metric for metric in (*ENGINE, *DISCOVERY_METRICS, *EXTERNAL_METRICS)}
LABELS: dict[str, frozenset[str]] = {
    **{metric.name: frozenset((*metric.labels, *_TARGET)) for metric in ENGINE},
    **{metric.name: frozenset((*metric.labels, *SCRAPE_LABELS)) for metric in DISCOVERY_METRICS},
    **{metric.name: frozenset(metric.labels) for metric in EXTERNAL_METRICS},
}


def row(name: str) -> Metric:
    """The row called `name`, ours or foreign. ConfigError when no table has it."""
    if name not in METRIC_OF_NAME:
        raise ConfigError(f"no table of metrics has a row {name!r}")
    return METRIC_OF_NAME[name]


@dataclass(frozen=True)
class Queries:
    """Builds queries over one window, inside one scope.

    `scope`: label -> PromQL pattern, put on every series whose row carries the label. `window`: what rates look back over.
    In `match`, a value that starts with `~` is a pattern. ConfigError: a row, kind or label that the table does not have.
    """

    scope: Mapping[str, str] = field(default_factory=dict)
    window: str = "$__rate_interval"

    def over(self, window: str) -> "Queries":
        """The same scope over another window."""
        return replace(self, window=window)

    def of(self, metric: Metric) -> str:
        """The series of a row that no table has: a recorded one."""
        return self._selector(metric.name, frozenset(metric.labels), {})

    def level(self, name: str, **match: str) -> str:
        """A gauge's series, one each."""
        return self._series(_expect(name, "gauge"), "", match)

    def total(self, name: str, by: tuple[str, ...] = (), fold: str = "sum", **match: str) -> str:
        """A gauge folded over its series: `sum`, `max`, `min`, `avg`, `count`."""
        return f"{_fold(fold, name, by)} ({self.level(name, **match)})"

    def count(self, name: str, by: tuple[str, ...] = (), **match: str) -> str:
        """A counter's value since its start, summed."""
        return f"{_fold('sum', name, by)} ({self._series(_expect(name, 'counter'), '', match)})"

    def rate(self, name: str, by: tuple[str, ...] = (), **match: str) -> str:
        """A counter's rate a second, or a histogram's observations a second, summed."""
        return self._moving("rate", name, by, match)

    def increase(self, name: str, by: tuple[str, ...] = (), **match: str) -> str:
        """How much a counter (a histogram's count) grew within the window, summed."""
        return self._moving("increase", name, by, match)

    def either(self, function: str, *counters: tuple[str, Mapping[str, str]], by: tuple[str, ...] = ()) -> str:
        """`rate` or `increase` of several counters, each a name and its `match`, as one sum; one without series is nothing."""
        moving = [f"{function}({self._series(_expect(name, 'counter'), '', match)}[{self.window}])" for name, match in counters]
        return f"{_fold('sum', counters[0][0], by)} ({' or '.join(moving)})"

    def mean(self, name: str) -> str:
        """A histogram's mean; no sample where nothing was observed, rather than NaN."""
        series = self._series(_expect(name, "histogram"), "_sum", {})
        return f"sum (rate({series}[{self.window}])) / ({self.rate(name)} > 0)"

    def quantile(self, q: float, name: str) -> str:
        """The q-quantile inside a histogram's buckets."""
        series = self._series(_expect(name, "histogram"), "_bucket", {})
        return f"histogram_quantile({q}, sum by (le) (rate({series}[{self.window}])))"

    def _moving(self, function: str, name: str, by: tuple[str, ...], match: Mapping[str, str]) -> str:
        metric = row(name)
        suffix = {"counter": "", "histogram": "_count"}.get(metric.kind)
        if suffix is None:
            raise ConfigError(f"{name} is a {metric.kind}: it has no {function}")
        return f"{_fold('sum', name, by)} ({function}({self._series(metric, suffix, match)}[{self.window}]))"

    def _series(self, metric: Metric, suffix: str, match: Mapping[str, str]) -> str:
        return self._selector(metric.name + suffix, LABELS[metric.name] | ({"le"} if suffix == "_bucket" else set()), match)

    def _selector(self, name: str, labels: frozenset[str], match: Mapping[str, str]) -> str:
        if strange := sorted(set(match) - labels):
            raise ConfigError(f"{name} has no label {strange[0]!r}")
        inside = {label: f"~{pattern}" for label, pattern in self.scope.items() if label in labels}
        pairs = [_matcher(label, value) for label, value in {**inside, **match}.items()]
        return name + (f"{{{','.join(pairs)}}}" if pairs else "")


BOARD = Queries({label: f"${label}" for label in ("application", "deployment", "replica")})
RULE = Queries(window="5m")


def _expect(name: str, kind: str) -> Metric:
    metric = row(name)
    if metric.kind != kind:
        raise ConfigError(f"{name} is a {metric.kind}, not a {kind}")
    return metric


def _fold(fold: str, name: str, by: tuple[str, ...]) -> str:
    if strange := sorted(set(by) - LABELS[row(name).name]):
        raise ConfigError(f"{name} has no label {strange[0]!r}")
    return f"{fold} by ({', '.join(by)})" if by else fold


def _matcher(label: str, value: str) -> str:
    return f'{label}=~"{value[1:]}"' if value.startswith("~") else f'{label}="{value}"'
