"""Scrapes exporters, and reads figures out of what they say.

    an exporter's /metrics          scraped
    an http_sd list                 every target of it, added up
    the API of a deployment         asked for its exporter (/health/ready names the one of the replica that answers)
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deploy.cli.fetch import base_of, get
from engine.errors import ConfigError

Samples = Mapping[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True)
class Snapshot:
    """What a scrape gave, of all targets together, at `time` (seconds, monotonic). `down`: targets that did not answer."""

    samples: Samples
    time: float
    targets: int = 1
    down: tuple[str, ...] = ()

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples `name` whose labels agree; None where there is none."""
        found = [value for own, value in self.samples.get(name, ()) if labels.items() <= own.items()]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of `name`, one for each value of `label`."""
        sums: dict[str, float] = {}
        for own, value in self.samples.get(name, ()):
            sums[own.get(label, "")] = sums.get(own.get(label, ""), 0.0) + value
        return sums

    def increase(self, name: str, since: "Snapshot | None") -> float | None:
        """How far a counter went since `since`, or since boot; never below zero, as after a restart."""
        now, before = self.total(name), since.total(name) if since else None
        return None if now is None else now if before is None or now < before else now - before

    def quantile(self, name: str, share: float, since: "Snapshot | None" = None) -> float | None:
        """The `share` quantile of the histogram `name`, over what came since `since`; None where nothing did."""
        bounds = {float(le): count for le, count in self.by(f"{name}_bucket", "le").items() if le}
        before = {float(le): count for le, count in since.by(f"{name}_bucket", "le").items() if le} if since else {}
        if any(bounds.get(le, 0.0) < count for le, count in before.items()):
            before = {}  # restarted meanwhile
        return quantile(sorted((le, count - before.get(le, 0.0)) for le, count in bounds.items()), share)


def quantile(buckets: list[tuple[float, float]], share: float) -> float | None:
    """As Prometheus' histogram_quantile: linear inside a bucket; `buckets` are (upper bound, cumulative count), ascending."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *buckets]):
        if upto >= rank and upto > below:
            return low if math.isinf(high) else low + (high - low) * (rank - below) / (upto - below)
    return None


def find(url: str, key: str | None = None) -> list[str]:
    """The exporters that `url` leads to; `key`: for the API. ConfigError says what else was expected there."""
    address = url if "://" in url else f"http://{url}"
    if address.rstrip("/").endswith("/metrics"):
        return [address]
    try:
        found = _listed(get(address).json())
    except (ConfigError, ValueError):
        found = []
    if found:
        return found
    ready: Any = get(f"{base_of(address)}/health/ready", key=key).json()
    if not isinstance(ready, dict) or not isinstance(ready.get("metrics"), str):
        raise ConfigError(f"{url} is no exporter, no http_sd list, and names no exporter at /health/ready")
    return [ready["metrics"]]


def _listed(document: Any) -> list[str]:
    """The targets of an http_sd document; none where it is something else."""
    if not isinstance(document, list):
        return []
    entries = [(entry.get("labels") or {}, target) for entry in document for target in entry.get("targets", ())]
    return [_address(target, labels) for labels, target in entries]


def _address(target: str, labels: Mapping[str, str]) -> str:
    return f"{labels.get('__scheme__', 'http')}://{target}{labels.get('__metrics_path__', '/metrics')}"


def scrape(urls: Iterable[str]) -> Snapshot:
    """One scrape of all. ConfigError where not one answers."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    down: list[str] = []
    asked = list(urls)
    for url in asked:
        try:
            _read(get(url).text, samples)
        except ConfigError as error:
            down.append(str(error))
    if len(down) == len(asked):
        raise ConfigError("; ".join(down) or "no target to scrape")
    return Snapshot(samples, time.monotonic(), len(asked), tuple(down))


def _read(text: str, samples: dict[str, list[tuple[dict[str, str], float]]]) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ConfigError(f"not Prometheus' text format: {error}") from error
