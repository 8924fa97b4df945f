"""What a row of the table has counted or observed; the family that Prometheus reads is made at the scrape.

Not prometheus-client's own: its counters take a lock at each call, its histogram walks the buckets from the lowest, and a streamed
token pays for both. One thread writes; a scrape on another may miss what is written at that moment.
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
    """A counter or gauge: `values` holds a figure for each combination of label values, known ones at zero from the start.

    Of labels whose values are free, such as the holders of API keys, those that come after `most` series share one.
    """

    def __init__(self, row: Metric, most: float = inf) -> None:
        self.row = row
        self._most = most
        known = product(*(LABEL_VALUES.get(label, ()) for label in row.labels))
        self.values: dict[tuple[str, ...], float] = dict.fromkeys(known, 0.0)

    def add(self, labels: tuple[str, ...], amount: float) -> None:
        """Add `amount` to the series with these label values."""
        if labels not in self.values and len(self.values) >= self._most:
            labels = ("other", *labels[1:])
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def family(self) -> Family:
        """Make the family that Prometheus reads."""
        family = Family(self.row.stem, self.row.help, self.row.kind)
        for labels, value in self.values.copy().items():
            family.add_sample(self.row.name, dict(zip(self.row.labels, labels, strict=True)), value)
        return family


class FastHistogram:
    """A histogram without labels: an observation is a bisection and two additions."""

    def __init__(self, row: Metric) -> None:
        assert not row.labels, row.name
        self._row = row
        self._counts = [0] * (len(row.buckets) + 1)  # the last: above all bounds
        self._sum = 0.0

    def add(self, _: tuple[str, ...], seen: Any) -> None:
        """Observe one value, several or none: each counts in the first bucket that is not below it."""
        for value in seen if isinstance(seen, list) else [seen]:
            if value is not None:
                self._counts[bisect_left(self._row.buckets, value)] += 1
                self._sum += value

    def family(self) -> Family:
        """Make the family that Prometheus reads, as prometheus-client's own histogram does."""
        bounds = [*map(floatToGoString, self._row.buckets), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(self._row.name, self._row.help, buckets=buckets, sum_value=self._sum)
