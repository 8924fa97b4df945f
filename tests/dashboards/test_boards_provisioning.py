"""The provisioning: Prometheus accepts its configuration, Grafana is given every board, and nothing listens beyond loopback."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring.committed import FOLDER, paths
from tests.support.monitoring.tables import DISCOVERY_JOB, JOB, RULES

pytestmark = pytest.mark.pure

CONFIG = FOLDER / "provisioning" / "prometheus.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())


def mounts(service: str) -> dict[str, str]:
    """In the container -> in the folder, of what is mounted from here."""
    split = [volume.split(":") for volume in COMPOSE["services"][service]["volumes"]]
    return {inside: here for here, inside, *_ in split if here.startswith("./")}


def exposed(compose: dict[str, Any]) -> list[str]:
    """Services that listen beyond loopback, or do not say where."""
    names = []
    for name, service in compose["services"].items():
        words = [*service.get("command", ()), *(f"{key}={value}" for key, value in service.get("environment", {}).items())]
        listens = [word for word in words if "web.listen-address=" in word or "HTTP_ADDR=" in word]
        bound = len(listens) == 1 and listens[0].partition("=")[2].startswith("127.0.0.1")
        if service.get("ports") or service["network_mode"] != "host" or not bound:
            names.append(name)
    return names


def test_both_listen_on_loopback_only() -> None:
    """Prometheus and Grafana say that they listen on 127.0.0.1; one that would not is reported."""
    assert exposed(COMPOSE) == []
    planted = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    planted["services"]["grafana"]["environment"].pop("GF_SERVER_HTTP_ADDR")
    planted["services"]["prometheus"]["command"][-1] = "--web.listen-address=0.0.0.0:9090"
    assert exposed(planted) == ["prometheus", "grafana"]


def test_every_board_and_rule_is_mounted() -> None:
    """What compose mounts exists, and every board, the rules and the data source are among it."""
    here = [FOLDER / path for service in COMPOSE["services"] for path in mounts(service).values()]
    assert all(path.exists() for path in here), here
    assert set(paths()) | {RULES, CONFIG} <= {path.resolve() for path in here}
    provider = yaml.safe_load((FOLDER / "provisioning/dashboards/quartet.yaml").read_text())["providers"][0]
    folder = Path(provider["options"]["path"])
    assert {folder / path.name for path in paths()} <= {Path(inside) for inside in mounts("grafana")}


def test_the_jobs_are_those_that_the_queries_name() -> None:
    """The scrape configuration has the jobs of our queries, and Grafana's data source is the Prometheus that compose starts."""
    jobs = {scrape["job_name"] for scrape in yaml.safe_load(CONFIG.read_text())["scrape_configs"]}
    assert {JOB, DISCOVERY_JOB, "ray", "prometheus"} == jobs
    source = yaml.safe_load((FOLDER / "provisioning/datasources/quartet.yaml").read_text())["datasources"][0]
    assert source["type"] == "prometheus"
    address = source["url"].removeprefix("http://")
    assert f"--web.listen-address={address}" in COMPOSE["services"]["prometheus"]["command"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here: apt-get install prometheus")
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    """`promtool check config` passes what compose mounts, and not a job twice."""
    shutil.copy(RULES, tmp_path / "alerts.yaml")
    shutil.copy(CONFIG, tmp_path / "prometheus.yaml")
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "prometheus.yaml").write_text(CONFIG.read_text().replace("job_name: ray", "job_name: quartet"))
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).returncode != 0
