"""What the image, the chart, the unit and compose say again is what the code says: a change of one side fails here."""

import re
import tomllib

import pytest
import yaml

from dashboards.metrics import ENGINE
from deploy.settings import http_address, read_config
from tests.support.artefacts.values_schema import PATH, values_schema
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

CHART = ROOT / "deploy" / "chart"
DOCKERFILE = (ROOT / "deploy" / "image" / "Dockerfile").read_text()


def pinned(name: str) -> str:
    """The version of a distribution in constraints.txt."""
    (version,) = re.findall(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(version)


def test_the_chart_has_the_version_of_the_code() -> None:
    """The chart, and the image that it names, have the version of pyproject.toml; its RayService has the pinned Ray."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert values["servingEngineSpec"]["modelDefaults"]["raySpec"]["rayVersion"] == pinned("ray")


def test_the_schema_has_the_settings_of_today() -> None:
    """values.schema.json holds extraArgs to our settings: `make docs` writes it. A setting that it lacks is noticed."""
    assert PATH.read_text() == values_schema()
    assert PATH.read_text().replace('"prefill_budget"', '"prefill_budgets"') != values_schema()


def test_boards_and_alerts_are_linked() -> None:
    """The chart's copies of boards and alerts are links to dashboards/, so that there is one of each."""
    names = {path.name for path in (CHART / "files").iterdir()}
    assert names == {"alerts.yaml", *(path.name for path in (ROOT / "dashboards").glob("*.json"))}
    for path in (CHART / "files").iterdir():
        assert path.is_symlink()
        assert path.resolve() == ROOT / "dashboards" / path.name


def test_the_unit_lets_gpus_work() -> None:
    """Nothing in the unit takes away devices, code made at run time or system calls, by name or by what it implies."""
    unit = (ROOT / "deploy" / "systemd" / "quartet.service").read_text()

    def keys(text: str) -> set[str]:
        return set(re.findall(r"^(\w+)=", text, re.MULTILINE))

    closing = {"DeviceAllow", "DevicePolicy", "MemoryDenyWriteExecute", "PrivateDevices", "ProtectClock", "SystemCallFilter"}
    assert keys(unit) & closing == set()
    assert keys(unit + "\nProtectClock=yes") & closing == {"ProtectClock"}
    assert {"NoNewPrivileges", "ProtectSystem", "CapabilityBoundingSet"} <= keys(unit)


def test_metrics_that_the_chart_scales_by_exist() -> None:
    """HorizontalPodAutoscaler and ScaledObject ask for metrics that replicas have."""
    asked = set(re.findall(r"quartet_\w+", (CHART / "templates" / "autoscaling.yaml").read_text()))
    assert asked == {"quartet_requests_running", "quartet_requests_waiting"}
    assert asked <= {row.name for row in ENGINE}


def test_the_image_has_all_that_serves() -> None:
    """Every package and file that a container needs is in the build's context, and tests are not."""
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert {"kernels", "engine", "cluster", "deploy", "dashboards", "quartet.py", "pyproject.toml", "constraints.txt"} <= kept
    assert "tests" not in kept
    assert "deploy/image/drain-node.sh" in (CHART / "templates" / "rayservice.yaml").read_text()
    assert (ROOT / "deploy" / "image" / "drain-node.sh").is_file()
    assert "!deploy/image/drain-node.sh" in (ROOT / ".dockerignore").read_text()


def test_the_image_has_what_doctor_asks_for() -> None:
    """gcc and Python's headers are installed in the image that runs, and its port is that of the configs."""
    installed = DOCKERFILE.partition("FROM base AS wheels")[0]
    for package in ("gcc", "libc6-dev", "python3-dev", "bash", "wget", "tini"):
        assert re.search(rf"[ \t]{package}(?=[ \t])", installed), package
    _, port = http_address(read_config(ROOT / "deploy" / "nano.yaml"))
    assert f"EXPOSE {port}" in DOCKERFILE
    assert f"http://127.0.0.1:{port}/health/ready" in DOCKERFILE


def test_the_image_installs_the_pinned_kernels() -> None:
    """FlashInfer's kernels and launchers, where they are asked for, have the version of FlashInfer itself."""
    (pattern,) = re.findall(r"version=\$\(sed -n '([^']*)' constraints.txt\)", DOCKERFILE)
    assert pattern == "s/^flashinfer-python==//p"
    assert all(f'"{package}==${{version}}"' in DOCKERFILE for package in ("flashinfer-cubin", "flashinfer-jit-cache"))
    assert re.fullmatch(r"[0-9.]+(post\d+)?", pinned("flashinfer-python"))
