"""A Prometheus: asking one over HTTP, and running one of our own in a temporary folder, bound to loopback.

The binary is the distribution's (`apt-get install prometheus`); nothing is downloaded.
"""

import json
import math
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine.errors import ConfigError
from tests.support.monitoring.tables import DISCOVERY_JOB, JOB
from tests.support.stack.serve_process import free_port

RAY_JOB = "ray"  # Ray's own exporters
READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
SCRAPES_BEFORE = 3  # each series is seen at zero before anything happens, or its first events would be missed
TARGETS_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Series:
    """One line of an answer: labels, and (unix time, value) points; NaN and infinities kept."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        """The newest value."""
        return self.points[-1][1]

    def named(self, legend: str) -> str:
        """Grafana's `{{label}}` form filled in."""
        for label, value in self.labels.items():
            legend = legend.replace(f"{{{{{label}}}}}", value)
        return legend


def finite(answer: Sequence[Series]) -> bool:
    """Whether there is an answer, and all of it numbers."""
    return bool(answer) and all(math.isfinite(value) for series in answer for _, value in series.points)


@dataclass(frozen=True)
class Api:
    """Prometheus' HTTP API at `url`. Every call raises ConfigError when it refuses the query or does not answer."""

    url: str
    timeout_s: float = 10.0

    def ask(self, expr: str, at: float | None = None) -> tuple[Series, ...]:
        """An instant query; `at` is unix time, None: now."""
        data = self._get("query", {"query": expr} | ({} if at is None else {"time": f"{at:.3f}"}))
        if data["resultType"] == "scalar":
            return (Series({}, (_point(data["result"]),)),)
        return tuple(Series(item["metric"], (_point(item["value"]),)) for item in data["result"])

    def ask_range(self, expr: str, start: float, end: float, step: float) -> tuple[Series, ...]:
        """A range query; unix times and seconds."""
        parameters = {"query": expr, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        return tuple(
            Series(item["metric"], tuple(map(_point, item["values"]))) for item in self._get("query_range", parameters)["result"]
        )

    def targets(self) -> list[dict[str, Any]]:
        """The targets that are scraped now."""
        return list(self._get("targets", {"state": "active"})["activeTargets"])

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health, last error and, for alerts, state."""
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    @property
    def version(self) -> str:
        """Its version, as 2.42.0+ds."""
        return str(self._get("status/buildinfo", {})["version"])

    def _get(self, what: str, parameters: Mapping[str, str]) -> Any:
        url = f"{self.url.rstrip('/')}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=self.timeout_s) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{self.url} refuses {parameters.get('query', what)}: {error.read().decode()[:500]}") from error
        except OSError as error:
            raise ConfigError(f"no Prometheus answers at {self.url}: {error}") from error


class Prometheus:
    """A Prometheus of ours while the `with` lasts: `scrapes` are its scrape_configs, `rules` a rules file."""

    def __init__(self, scrapes: Sequence[Mapping[str, Any]], rules: Path | None = None, interval_s: int = 1, port: int = 0) -> None:
        self._binary = shutil.which("prometheus")
        if self._binary is None:
            raise ConfigError("no `prometheus` on the PATH: on Debian and Ubuntu, `apt-get install prometheus`")
        self._folder = tempfile.TemporaryDirectory(prefix="quartet-prometheus-")
        self._port = port or free_port()
        self._config = {
            "global": {
                "scrape_interval": f"{interval_s}s",
                "scrape_timeout": f"{interval_s}s",
                "evaluation_interval": f"{interval_s}s",
            },
            "rule_files": [str(rules.resolve())] if rules else [],
            "scrape_configs": [itself(self._port), *scrapes],
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def api(self) -> Api:
        """How to ask it."""
        return Api(f"http://127.0.0.1:{self._port}")

    def __enter__(self) -> Self:
        assert self._binary is not None
        folder = Path(self._folder.name)
        (folder / "prometheus.yml").write_text(json.dumps(self._config))  # JSON is YAML
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *_dies_with_parent(),
                    self._binary,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and remove its folder; idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._folder.cleanup()

    def _wait_ready(self) -> None:
        assert self._process is not None
        end = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.api.url}/-/ready", timeout=1):
                    return
            except OSError:
                time.sleep(0.1)
        log = (Path(self._folder.name) / "log").read_text(errors="replace")
        raise ConfigError(f"Prometheus did not become ready: {log[-800:]}")


def wait_scraped(api: Api, targets: int) -> None:
    """Until every target has been scraped SCRAPES_BEFORE times, Ray's once; ConfigError when one never is."""
    end = time.monotonic() + TARGETS_TIMEOUT_S
    while time.monotonic() < end:
        seen = api.ask("count_over_time(up[30s])")
        enough = (series.last >= (1 if series.labels["job"] == RAY_JOB else SCRAPES_BEFORE) for series in seen)
        if len(seen) >= targets and all(enough):
            return
        time.sleep(0.2)
    raise ConfigError(f"not scraped: {[(target['scrapeUrl'], target['lastError']) for target in api.targets()]}")


def itself(port: int) -> dict[str, Any]:
    """The scrape of its own figures, which has those of service discovery."""
    return {"job_name": "prometheus", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}


def jobs(discovery: str, refresh_s: int = 1, ray_interval_s: int = 5) -> tuple[dict[str, Any], ...]:
    """scrape_configs for all that the discovery endpoint whose list is at `discovery` knows: the groups, itself, Ray's nodes."""
    base = discovery.removesuffix("/targets")
    lists = {JOB: f"{base}/targets", RAY_JOB: f"{base}/ray"}
    listed = {
        job: {"job_name": job, "http_sd_configs": [{"url": url, "refresh_interval": f"{refresh_s}s"}]} for job, url in lists.items()
    }
    listed[RAY_JOB] |= {"scrape_interval": f"{ray_interval_s}s", "scrape_timeout": f"{ray_interval_s}s"}  # half a megabyte a node
    return (*listed.values(), {"job_name": DISCOVERY_JOB, "static_configs": [{"targets": [base.removeprefix("http://")]}]})


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


def _dies_with_parent() -> list[str]:
    """What a command begins with to end with us, even where we are killed; nothing where util-linux is not."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
