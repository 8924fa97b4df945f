"""Counts and observations of a table's row; families are made at the scrape.

prometheus-client's counters lock and its histograms search linearly, at each streamed token. One
thread writes; a concurrent scrape may miss the latest.
"""

from bisect import bisect_left
from itertools import accumulate, product
from math import inf
from typing import Any

from prometheus_client import Metric as Family
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from dashboards.metrics import LABEL_VALUES, Metric

Counts = dict[tuple[str, tuple[str, ...]], float]  # (counter, label values) -> value


class Series:
    """A counter or gauge by label values, known ones at zero from the start. After `most` series, new free labels share one."""

    def __init__(self, row: Metric, most: float = inf) -> None:
        self.row = row
        self._most = most
        known = product(*(LABEL_VALUES.get(label, ()) for label in row.labels))
        self.values: dict[tuple[str, ...], float] = dict.fromkeys(known, 0.0)

    def add(self, labels: tuple[str, ...], amount: float) -> None:
        if labels not in self.values and len(self.values) >= self._most:
            labels = ("other", *labels[1:])
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def family(self) -> Family:
        family = Family(self.row.stem, self.row.help, self.row.kind)
        for labels, value in self.values.copy().items():
            family.add_sample(self.row.name, dict(zip(self.row.labels, labels, strict=True)), value)
        return family


class FastHistogram:
    """A histogram without labels: a bisection and two additions."""

    def __init__(self, row: Metric) -> None:
        assert not row.labels, row.name
        self._row = row
        self._counts = [0] * (len(row.buckets) + 1)  # the last: above all bounds
        self._sum = 0.0

    def add(self, _: tuple[str, ...], seen: Any) -> None:
        """Observe a value, several or None."""
        for value in seen if isinstance(seen, list) else [seen]:
            if value is not None:
                self._counts[bisect_left(self._row.buckets, value)] += 1
                self._sum += value

    def family(self) -> Family:
        bounds = [*map(floatToGoString, self._row.buckets), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(self._row.name, self._row.help, buckets=buckets, sum_value=self._sum)
