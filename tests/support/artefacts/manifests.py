"""The chart's manifests, rendered by Helm's own library, and what Kubernetes' and the operators' schemas say of them."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jsonschema
import yaml

from tests.support.artefacts.crd_schemas import FOLDER, closed
from tests.support.repo_rules import ROOT

CHART = ROOT / "deploy" / "chart"
RELEASE = "q"
NAMESPACE = "serving"
KUBERNETES = "1.37"

Manifest = dict[str, Any]


class Rendered(NamedTuple):
    """What `helm template` prints, and what `helm install` says at its end."""

    manifests: list[Manifest]
    notes: str

    def one(self, kind: str) -> Manifest:
        """The one manifest of that kind."""
        (found,) = self.of(kind)
        return found

    def of(self, kind: str) -> list[Manifest]:
        """The manifests of that kind."""
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]


def render(name: str = RELEASE, **values: Any) -> Rendered:
    """Renders the chart with these values instead of its own. HelmError: the schema or a template refuses them."""
    texts = _chart().render(values, name=name, namespace=NAMESPACE)
    notes = texts.pop("quartet/templates/NOTES.txt")
    documents = [document for text in texts.values() for document in yaml.load_all(text, yaml.CSafeLoader)]
    return Rendered([document for document in documents if document is not None], notes)


def render_model(model: dict[str, Any], **values: Any) -> Rendered:
    """Renders one model, named `m`."""
    engine = {"modelSpec": [{"name": "m"} | model]} | values.pop("servingEngineSpec", {})
    return render(servingEngineSpec=engine, **values)


@cache
def _chart() -> Any:
    from helm_python import Chart

    return Chart.load(CHART)


def complaints(manifest: Manifest) -> Iterator[str]:
    """Yields what an API server with strict validation would refuse."""
    kind = manifest["kind"]
    schema = _schema(kind)
    if schema is None:
        yield from _kubernetes(manifest)
        return
    for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest):
        yield f"{kind}: {error.json_path}: {error.message[:200]}"
    for pod in pods(manifest):
        yield from _kubernetes({"apiVersion": "v1", "kind": "Pod", **pod})


def _kubernetes(manifest: Manifest) -> Iterator[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{manifest['kind']}: {'.'.join(map(str, error.path))}: {error.message[:200]}"


@cache
def _schema(kind: str) -> dict[str, Any] | None:
    path = FOLDER / f"{kind}.json"
    if not path.is_file():
        return None
    schema = closed(json.loads(path.read_text()))
    schema["properties"]["metadata"] = {"type": "object"}  # which an API server knows for every kind
    return schema


def pods(manifest: Manifest) -> list[Manifest]:
    """The pods' templates of a manifest: metadata and spec."""
    spec = manifest["spec"]
    if manifest["kind"] == "Deployment":
        return [spec["template"]]
    if manifest["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    return []


def serve_configs(rendered: Rendered) -> list[str]:
    """The Serve configs of all models: of `quartet serve`, and of RayServices."""
    maps = [manifest["data"] for manifest in rendered.of("ConfigMap")]
    texts = [data["config.yaml"] for data in maps if "config.yaml" in data]
    return texts + [service["spec"]["serveConfigV2"] for service in rendered.of("RayService")]
