"""The image: hadolint finds nothing, its sizes are within their budgets, and nano answers in it and in the chart's pod."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.artefacts.images import build
from tests.support.artefacts.manifests import Manifest, pods, render_model, serve_configs
from tests.support.repo_rules import ROOT

pytest.importorskip("helm_python", reason="needs the extra [artefacts]")

pytestmark = [pytest.mark.artefacts, pytest.mark.slow, pytest.mark.timeout(2400)]  # the first test builds the image

SCRIPT = Path(__file__).with_name("container.sh")
CPU_BUDGET = 2_800_000_000
CHANGE_BUDGET = 10_000_000
PODMAN = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4000:4000"]
shm_size = "2g"
[engine]
cgroup_manager = "cgroupfs"
"""
# What podman cannot do with a pod of the host's network: it maps no ports, its probes need systemd, and a volume of memory is
# root's folder on the disk.
NOT_PODMANS = ("ports", "startupProbe", "livenessProbe", "readinessProbe")


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    """The Dockerfile is clean, and a planted `apt-get upgrade` without cleaning is not."""
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("needs the extra [artefacts]")
    text = (ROOT / "deploy" / "image" / "Dockerfile").read_text()
    planted = tmp_path / "Dockerfile"
    for body, code in ((text, 0), (text.replace("WORKDIR /wheels", "RUN cd /wheels && apt-get install vim"), 1)):
        planted.write_text(body)
        assert subprocess.run([hadolint, str(planted)], check=False, timeout=60).returncode == code


def layers(image: str) -> dict[str, int]:
    """Bytes of each layer, by its digest."""
    history = json.loads(_podman("history", "--format", "json", image))
    sizes = [entry["size"] for entry in reversed(history) if entry["size"]]
    (inspected,) = json.loads(_podman("image", "inspect", image))
    return dict(zip(inspected["RootFS"]["Layers"], sizes, strict=True))


def _podman(*arguments: str) -> str:
    return subprocess.run(["podman", *arguments], check=True, capture_output=True, text=True, timeout=120).stdout


def test_sizes_are_within_their_budgets(image: str) -> None:
    """The CPU image is smaller than 2.8 GB, and the layer with the code, the last one, than 10 MB."""
    sizes = list(layers(image).values())
    print(f"{sum(sizes) / 1e9:.2f} GB, the last layer {sizes[-1] / 1e6:.1f} MB")
    assert sum(sizes) < CPU_BUDGET
    assert sizes[-1] < CHANGE_BUDGET


def test_a_changed_line_of_code_is_one_small_layer(image: str, checkout: Path) -> None:
    """After a change of a line the image has one layer that the old one had not, of less than 10 MB."""
    if os.environ.get("QUARTET_IMAGE"):
        pytest.skip("the image was built elsewhere: what it has in common with one of this machine says nothing")
    with (checkout / "engine" / "errors.py").open("a") as file:
        file.write("\nCHANGED = 1\n")
    before = layers(image)
    changed = layers(build("localhost/quartet:changed", checkout))
    new = [size for digest, size in changed.items() if digest not in before]
    print(f"new layers: {[f'{size / 1e6:.1f} MB' for size in new]}")
    assert len(new) == 1
    assert new[0] < CHANGE_BUDGET


@pytest.fixture(scope="module")
def log(image: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What container.sh saw."""
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(PODMAN)
    (folder / "pod.yaml").write_text(yaml.safe_dump_all(chart_pod(image)))
    environ = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
    ray = folder / "ray"
    write_ray_head(ray)
    command = ["unshare", "--mount", "--net", "bash", str(SCRIPT), image, str(folder / "pod.yaml"), str(ray)]
    done = subprocess.run(command, check=True, env=environ, stdout=subprocess.PIPE, text=True, timeout=1000)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


def chart_pod(image: str) -> list[Manifest]:
    """The chart's pod of nano, with its ConfigMap, as podman can run it."""
    repository, _, tag = image.rpartition(":")
    model: dict[str, Any] = {"repository": repository, "tag": tag, "imagePullPolicy": "Never", "requestCPU": 1}
    rendered = render_model(model | {"requestMemory": "2Gi", "quartetConfig": {"tensorParallelSize": 2, "dtype": "float32"}})
    (pod,) = pods(rendered.one("Deployment"))
    pod["metadata"]["name"] = "q"
    pod["spec"]["hostNetwork"] = True
    (container,) = pod["spec"]["containers"]
    for key in NOT_PODMANS:
        del container[key]
    for entries in (container["volumeMounts"], pod["spec"]["volumes"]):
        entries.remove(next(entry for entry in entries if entry["name"] == "shm"))
    return [rendered.one("ConfigMap"), {"apiVersion": "v1", "kind": "Pod", **pod}]


def write_ray_head(folder: Path) -> None:
    """The script of a RayService's head, and its Serve config, which the container's user can read."""
    engine = {"tensorParallelSize": 2, "dtype": "float32"}
    rendered = render_model({"quartetConfig": engine, "raySpec": {"enabled": True}})
    config = serve_configs(rendered)[0]
    head = pods(rendered.one("RayService"))[0]["spec"]["containers"][0]
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    (folder / "config.json").write_text(json.dumps(yaml.safe_load(config)))
    (folder / "start.sh").write_text(head["args"][0])
    folder.chmod(0o755)


def test_nano_answers_in_it(log: dict[str, str]) -> None:
    """As user 10001, with a root that is read-only and no network, it answers, is healthy, and ends with code 0 at SIGTERM."""
    assert log["answer"] == "472 + 389 = 861"
    assert log["user"] == "10001"
    assert log["written_to_root"] == "no"
    assert log["written_to_cache"] == "yes"
    assert log["health"] == "0"
    assert log["compiler"] == "ok"
    assert log["exit_code"] == "0"


def test_nano_answers_in_the_charts_pod(log: dict[str, str]) -> None:
    """The pod that the chart renders serves its ConfigMap's config, and metrics and discovery listen at its ports."""
    assert log["pod_answer"] == "472 + 389 = 861"
    assert log["pod_user"] == "10001"
    assert log["pod_metrics"] == "1"
    assert log["pod_groups"].startswith('quartet_groups{application="m"')
    assert log["pod_groups"].endswith(" 1.0")


def test_nano_answers_in_the_charts_ray_head(log: dict[str, str]) -> None:
    """Started as KubeRay starts it, with a token, it takes the Serve config by Ray's API, serves, drains, and ends at SIGTERM."""
    assert log["ray_deployed"] == "200"
    assert log["ray_answer"] == "472 + 389 = 861"
    assert log["ray_drained"] == "0"
    assert log["ray_replicas_left"] == "0"
    assert int(log["ray_stop_seconds"]) < 50  # Ray itself waits for 30 s; one that does not hear SIGTERM is killed after 60 s
