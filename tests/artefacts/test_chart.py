"""The chart: every combination of its values renders, is valid by the schemas of Kubernetes and of the operators, and serves."""

import copy
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import environment
from deploy.cli.main import main
from deploy.settings import read_config, read_models
from tests.support.artefacts.manifests import (
    CHART,
    Manifest,
    Rendered,
    complaints,
    pods,
    render,
    render_model,
    serve_configs,
)
from tests.support.repo_rules import ROOT

pytest.importorskip("helm_python", reason="needs the extra [artefacts]")
pytest.importorskip("kubernetes_validate", reason="needs the extra [artefacts]")

from helm_python import HelmError, parse_set_string
from helm_python.chart import lint

pytestmark = pytest.mark.artefacts

GPUS = {"requestGPU": 4, "modelURL": "dummy:31b", "quartetConfig": {"tensorParallelSize": 4, "extraArgs": {"max_tokens": 9}}}
CLAIMS = ({}, {"pvcStorage": "10Gi", "storageClass": "fast"}, {"pvcExistingClaimName": "mine", "offline": True})
SWITCHES = (
    {},
    {
        "hf_token": {"secretName": "hub"},
        "limitCPU": 8,
        "limitMemory": "32Gi",
        "env": [{"name": "A", "value": "b"}],
        "envFromSecret": {"name": "s3"},
        "imagePullSecret": "registry",
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "serviceAccountName": "quartet",
        "serviceAnnotations": {"a": "b"},
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "a"},
        "modelRevision": "main",
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    },
)
POD_SCALINGS = ({"replicaCount": 2}, {"autoscaling": {"enabled": True}}, {"keda": {"enabled": True}})
POOLS = ({}, {"inferencePool": {"enabled": True, "endpointPickerRef": {"name": "picker"}}, "pdb": {"enabled": False}})
RAY_SCALINGS = ({"replicaCount": 2}, {"autoscaling": {"enabled": True, "minReplicas": 0}})
STORES: tuple[dict[str, Any], ...] = (
    {},
    {"backend": "rocksdb", "storageClass": "fast"},
    {"backend": "redis", "redisAddress": "redis:6379"},
    {"backend": "redis", "redisAddress": "redis:6379", "redisPassword": {"secretName": "redis"}},
)
UPGRADES = ({}, {"type": "None"}, {"type": "NewClusterWithIncrementalUpgrade", "gatewayClassName": "istio"})
CLUSTER_WIDE: tuple[dict[str, Any], ...] = (
    {},
    {
        "servingEngineSpec": {"apiKeys": {"secretName": "keys"}, "podMonitor": {"enabled": True, "additionalLabels": {"a": "b"}}},
        "networkPolicy": {"enabled": True, "clients": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]},
        "grafanaDashboards": {"enabled": True, "annotations": {"folder": "Quartet"}},
        "prometheusRule": {"enabled": True, "additionalLabels": {"release": "prometheus"}},
    },
)


def pod_models() -> Iterator[dict[str, Any]]:
    """Every combination of the values of a model that is served by pods."""
    for device, claim, switches, scaling, pool in itertools.product(({}, GPUS), CLAIMS, SWITCHES, POD_SCALINGS, POOLS):
        yield {**device, **claim, **switches, **scaling, **pool}


def ray_models() -> Iterator[dict[str, Any]]:
    """Every combination of the values of a model that is served by a RayService."""
    secrets: tuple[dict[str, Any], ...] = ({}, {"authSecretName": "ray"})
    product = itertools.product(({}, GPUS), CLAIMS, SWITCHES, RAY_SCALINGS, STORES, UPGRADES, secrets)
    for device, claim, switches, scaling, store, upgrade, secret in product:
        ray = {"enabled": True, "gcsFaultTolerance": store, "upgradeStrategy": upgrade, **secret}
        yield {**device, **claim, **switches, **scaling, "raySpec": ray}


@pytest.fixture(scope="module")
def combinations() -> list[Rendered]:
    """Each combination, without and with what is set for all models."""
    models = [*pod_models(), *ray_models()]
    return [render_model(model, **copy.deepcopy(others)) for model in models for others in CLUSTER_WIDE]


def test_every_combination_of_values_is_valid(combinations: list[Rendered]) -> None:
    """No manifest has a key or a value that Kubernetes 1.37, KubeRay, KEDA or an operator would refuse."""
    distinct = {json.dumps(manifest): manifest for rendered in combinations for manifest in rendered.manifests}
    wrong = {complaint for manifest in distinct.values() for complaint in complaints(manifest)}
    print(f"{len(combinations)} combinations, {len(distinct)} manifests of {sorted({each['kind'] for each in distinct.values()})}")
    assert len(combinations) > 1000
    assert not wrong


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ("pods", ("spec", "template", "spec", "containers", 0, "imagePullPolicyy")),
        ("pods", ("spec", "progressDeadline")),
        ("ray", ("spec", "rayClusterConfig", "gcsFaultTolleranceOptions")),
        ("ray", ("spec", "upgradeStrategy", "maxSurge")),
        ("ray", ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "restartPolicyy")),
    ],
)
def test_a_planted_key_is_found(shape: str, path: tuple[str | int, ...]) -> None:
    """A key that the schemas do not know is a complaint that names it, in either shape and in pods inside a RayService."""
    rendered = render_model({"raySpec": {"enabled": shape == "ray"}})
    manifest = copy.deepcopy(rendered.one("RayService" if shape == "ray" else "Deployment"))
    assert not list(complaints(manifest))
    inner: Any = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "Always"
    assert any(str(path[-1]) in complaint for complaint in complaints(manifest))


def test_every_config_passes_check_config(
    combinations: list[Rendered], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each Serve config can be deployed, and check-config has nothing to say against it but what only the cluster knows."""
    keys = tmp_path / "keys"
    keys.touch()
    texts = {text for rendered in combinations for text in serve_configs(rendered)}
    expected = r"no keys, and http_options.host|keys: 0 of 0 holders"
    for number, text in enumerate(sorted(texts)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text.replace("/etc/quartet/keys/keys", str(keys)))
        assert main(["check-config", str(path), "--json"]) == 0, text
        notes = json.loads(capsys.readouterr().out)["applications"][0]["notes"]
        assert [note for note in notes if not re.match(expected, note)] == []
    print(f"{len(texts)} configs")
    assert len(texts) >= 24


def test_check_config_notes_a_drain_that_would_cut_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same comparison notices a limit in extraArgs that the chart's own times do not follow."""
    engine = {"extraArgs": {"limits": {"request_timeout_s": 900}}}
    (text,) = serve_configs(render_model({"quartetConfig": engine}))
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert main(["check-config", str(path)]) == 0
    assert "is below limits.request_timeout_s 900" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"replicas": 2}, "replicas"),
        ({"quartetConfig": {"maxModelLength": 4}}, "maxModelLength"),
        ({"quartetConfig": {"extraArgs": {"prefil_budget": 512}}}, "prefil_budget"),
        ({"quartetConfig": {"extraArgs": {"limits": {"body_byte": 512}}}}, "body_byte"),
        ({"quartetConfig": {"tensorParallelSize": 0}}, "tensorParallelSize"),
        ({"raySpec": {"upgradeStrategy": {"type": "Rolling"}}}, "type"),
        ({"name": "Upper_Case"}, "name"),
        ({"keda": {"minReplicaCount": 0}}, "minReplicaCount"),
    ],
)
def test_a_misspelt_key_is_refused(model: dict[str, Any], named: str) -> None:
    """The chart's schema refuses a key or a value that it does not know, names it, and takes the same values without it."""
    render_model({})
    with pytest.raises(HelmError, match=named):
        render_model(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"keda": {"enabled": True}, "autoscaling": {"enabled": True}}, "either it or autoscaling"),
        ({"keda": {"enabled": True}, "raySpec": {"enabled": True}}, "Ray Serve scales"),
        ({"inferencePool": {"enabled": True}}, "the Service of the endpoint picker"),
        (
            {"inferencePool": {"enabled": True, "endpointPickerRef": {"name": "a"}}, "raySpec": {"enabled": True}},
            "spreads requests itself",
        ),
        ({"raySpec": {"enabled": True, "gcsFaultTolerance": {"backend": "redis"}}}, "redisAddress"),
        ({"requestGPU": 4, "quartetConfig": {"tensorParallelSize": 2}}, "requestGPU 4 and tensorParallelSize 2"),
    ],
)
def test_values_that_contradict_each_other_are_refused(model: dict[str, Any], reason: str) -> None:
    """A combination that would not do what it says is refused with the reason."""
    with pytest.raises(HelmError, match=reason):
        render_model(model)


def test_the_chart_has_manifests_without_a_values_file() -> None:
    """`helm template deploy/chart` gives a valid Deployment of Gemma 4 on four GPUs, and Helm's own lint finds nothing."""
    rendered = render()
    assert [complaint for manifest in rendered.manifests for complaint in complaints(manifest)] == []
    (container,) = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    report = lint(CHART, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == []


def documented_helm_lines() -> list[str]:
    """The commands of Helm in README.md and docs/kubernetes.md."""
    texts = [(ROOT / path).read_text() for path in ("README.md", "docs/kubernetes.md")]
    return [line for text in texts for line in re.findall(r"^helm .*$", text, re.MULTILINE)]


def test_the_documented_commands_give_valid_manifests() -> None:
    """Each `helm template` and `helm install` of the pages, as it stands, makes manifests that a cluster takes."""
    assert len(documented_helm_lines()) == 3
    for line in documented_helm_lines():
        program, command, name, chart, *options = shlex.split(line)
        assert (program, command in ("template", "install"), ROOT / chart) == ("helm", True, CHART)
        assert set(options[::2]) <= {"--set"}
        values = parse_set_string(",".join(options[1::2])) if options else {}
        begun = time.monotonic()
        rendered = render(name=name, **values)
        assert [complaint for manifest in rendered.manifests for complaint in complaints(manifest)] == []
        print(f"{line}: {len(rendered.manifests)} valid manifests after {time.monotonic() - begun:.2f} s")
        (container,) = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"]
        assert container["image"].startswith("REGISTRY/quartet:" if options else "quartet:")


def test_every_pod_has_time_to_finish_its_requests() -> None:
    """A pod's grace is longer than a request may take with what comes before and after it, and nothing cuts requests before. A
    RayService's node drains for longer than Serve needs to stop its replica: else Serve stops it before it starts another."""
    for ray in (False, True):
        model = {"requestTimeoutSeconds": 300, "raySpec": {"enabled": ray}}
        rendered = render_model(model)
        pod = pods(rendered.one("RayService" if ray else "Deployment"))[-1]["spec"]
        (container,) = pod["containers"]
        hook = container["lifecycle"]["preStop"]["exec"]["command"]
        assert pod["terminationGracePeriodSeconds"] >= int(hook[-1]) + (30 if ray else 330)
        assert hook[-1] == ("610" if ray else "5")
        assert "stop" not in hook
        if ray:
            (app,) = yaml.safe_load(rendered.one("RayService")["spec"]["serveConfigV2"])["applications"]
            assert int(hook[-1]) == app["deployments"][0]["graceful_shutdown_timeout_s"] + 300
            assert rendered.one("RayService")["spec"]["rayClusterDeletionDelaySeconds"] > 300
        else:
            assert container["args"][-2:] == ["--drain", "300"]


def test_pods_run_without_rights() -> None:
    """No container runs as root, may gain rights, or writes to its root."""
    for ray in (False, True):
        rendered = render_model({"raySpec": {"enabled": ray}})
        for pod in pods(rendered.one("RayService" if ray else "Deployment")):
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
            assert pod["spec"]["automountServiceAccountToken"] == (pod["spec"]["containers"][0]["name"] == "ray-head")
            for container in pod["spec"]["containers"]:
                rights = container["securityContext"]
                assert rights["readOnlyRootFilesystem"] is True
                assert rights["allowPrivilegeEscalation"] is False
                assert rights["capabilities"] == {"drop": ["ALL"]}


def test_names_and_ports_agree() -> None:
    """Every selector, port, claim and ConfigMap that a manifest names is there under that name."""
    for ray in (False, True):
        wide = copy.deepcopy(CLUSTER_WIDE[1])
        rendered = render_model({"pvcStorage": "1Gi", "raySpec": {"enabled": ray}}, **wide)
        templates = pods(rendered.one("RayService" if ray else "Deployment"))
        ports = {port["name"]: port["containerPort"] for pod in templates for port in pod["spec"]["containers"][0]["ports"]}
        config = yaml.safe_load(serve_configs(rendered)[0])
        metrics = config["applications"][0]["args"]["metrics"]
        assert ports["metrics"] == metrics["port"]
        assert ports["discovery"] == metrics["discovery"]["port"]
        assert ports["serve" if ray else "http"] == config["http_options"]["port"]
        assert {each["port"] for each in rendered.one("PodMonitor")["spec"]["podMetricsEndpoints"]} <= ports.keys()
        policy = rendered.one("NetworkPolicy")["spec"]
        open_ports = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())}
        assert open_ports <= set(ports.values())
        for selector in (policy["podSelector"], rendered.one("PodMonitor")["spec"]["selector"]):
            assert all(selector["matchLabels"].items() <= pod["metadata"]["labels"].items() for pod in templates)
        volumes = {name for pod in templates for name in _named(pod["spec"]["volumes"])}
        assert volumes == {"q-m-config", "q-m-models", "keys"}
        assert rendered.one("PersistentVolumeClaim")["metadata"]["name"] == "q-m-models"


def _named(volumes: list[Manifest]) -> Iterator[str]:
    for volume in volumes:
        match volume:
            case {"configMap": {"name": name}} | {"persistentVolumeClaim": {"claimName": name}} | {"secret": {"secretName": name}}:
                yield name


def test_boards_and_alerts_are_those_of_dashboards() -> None:
    """The ConfigMaps and the PrometheusRule hold the files of dashboards/, every word of them."""
    rendered = render_model({}, **copy.deepcopy(CLUSTER_WIDE[1]))
    folder = CHART.parent.parent / "dashboards"
    boards = {name: text for each in rendered.of("ConfigMap") for name, text in each["data"].items() if name.endswith(".json")}
    assert {name: json.loads(text) for name, text in boards.items()} == {
        path.name: json.loads(path.read_text()) for path in folder.glob("*.json")
    }
    assert rendered.one("PrometheusRule")["spec"] == yaml.safe_load((folder / "alerts.yaml").read_text())


def test_notes_print_the_first_curl() -> None:
    """What Helm prints at its end is the command that asks the model by its name, at the Service that is there."""
    rendered = render_model({})
    service = rendered.one("Service")
    assert f"service/{service['metadata']['name']} 8000:{service['spec']['ports'][0]['port']}" in rendered.notes
    assert '"model": "m"' in rendered.notes
    assert "No API keys" in rendered.notes
    with_keys = render_model({"raySpec": {"enabled": True}}, servingEngineSpec={"apiKeys": {"secretName": "keys"}})
    assert "service/q-m-serve-svc 8000:8000" in with_keys.notes
    assert "authorization: Bearer KEY" in with_keys.notes
    assert "No API keys" not in with_keys.notes


def test_limits_and_keys_change_the_cluster_and_other_settings_do_not() -> None:
    """The guard around Serve reads limits and keys when Ray starts: they change the pods of a RayService, and nothing else does."""

    def guards(**settings: Any) -> set[str]:
        model = {"raySpec": {"enabled": True}, "quartetConfig": {"extraArgs": settings}}
        service = render_model(model).one("RayService")
        return {pod["metadata"]["annotations"]["checksum/guard"] for pod in pods(service)}

    assert guards() == guards(build="2")
    assert guards() != guards(limits={"requests": 99})
    assert guards() != guards(keys={"variable": "KEYS"})


@pytest.mark.parametrize(("kind", "position"), [("head", 0), ("node", 1)])
def test_a_ray_pod_starts_ray_with_the_environment_of_quartet_env(kind: str, position: int, tmp_path: Path) -> None:
    """The command of a pod hands `ray start` every variable of deploy/environment.py, with the guard's limits, in either pod."""
    rendered = render_model({"raySpec": {"enabled": True}})
    container = pods(rendered.one("RayService"))[position]["spec"]["containers"][0]
    config = tmp_path / "config.yaml"
    config.write_text(serve_configs(rendered)[0])
    expected = environment.for_ray_start(head=kind == "head") | environment.guard(read_models(read_config(config), ""), "0.0.0.0")
    script = container["args"][0].replace("/etc/quartet/config/config.yaml", str(config))
    started = _environment_of(container["command"], script)
    assert {name: started.get(name) for name in expected} == expected
    assert "RAY_SERVE_HAPROXY_NBTHREAD" in started
    planted = _environment_of(container["command"], script.replace('eval "$settings"', ""))
    assert planted.keys() & environment.RAY.keys() == set()


def test_a_ray_pod_that_has_no_environment_does_not_start(tmp_path: Path) -> None:
    """Where `quartet env` refuses the config, Ray is not started without its variables."""
    rendered = render_model({"raySpec": {"enabled": True}})
    container = pods(rendered.one("RayService"))[0]["spec"]["containers"][0]
    absent = container["args"][0].replace("/etc/quartet/config/config.yaml", str(tmp_path / "absent.yaml"))
    with pytest.raises(subprocess.CalledProcessError):
        _environment_of(container["command"], absent)


def _environment_of(command: list[str], script: str) -> dict[str, str]:
    """The environment in which a container's script starts Ray, which `env` stands in for. CalledProcessError: it did not."""
    script = script.replace("quartet env", f"{sys.executable} -m deploy.cli env")
    script = script.replace("exec tini -- $KUBERAY_GEN_RAY_START_CMD", "exec env -0")
    given = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    printed = subprocess.run(
        [*command, script], cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    ).stdout
    return dict(line.split("=", 1) for line in printed.split("\0") if line)


def test_the_documented_values_are_valid() -> None:
    """The file of values in docs/kubernetes.md gives a RayService that scales, and all that it switches on."""
    (body,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    rendered = render(**yaml.safe_load(body))
    assert [complaint for manifest in rendered.manifests for complaint in complaints(manifest)] == []
    assert "autoscaling_config" in rendered.one("RayService")["spec"]["serveConfigV2"]
    assert {"PodMonitor", "PrometheusRule", "NetworkPolicy"} <= {manifest["kind"] for manifest in rendered.manifests}
