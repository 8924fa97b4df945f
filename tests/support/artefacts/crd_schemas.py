"""The schemas of others' objects that the chart makes, cut from their definitions (tests/artefacts/schemas/README.md).

    python -m tests.support.artefacts.crd_schemas CRD.yaml ...    writes tests/artefacts/schemas/KIND.json of each
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.repo_rules import ROOT

FOLDER = ROOT / "tests" / "artefacts" / "schemas"
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_PROSE = ("description", "format", "title")
_KEPT = ("x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string")


def schema_of(definition: dict[str, Any]) -> dict[str, Any]:
    """The schema of a definition's first served version, without prose. Templates of pods and Services are left open: they are
    validated by Kubernetes' own schemas."""
    version = next(each for each in definition["spec"]["versions"] if each["served"])
    return _cut(version["schema"]["openAPIV3Schema"])


def _cut(schema: dict[str, Any]) -> dict[str, Any]:
    cut: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _PROSE or (key.startswith("x-") and key not in _KEPT):
            continue
        if key == "properties":
            cut[key] = {name: _opened(name, inner) for name, inner in value.items()}
        elif key in ("anyOf", "allOf", "oneOf"):
            cut[key] = [_cut(inner) for inner in value]
        elif isinstance(value, dict) and key in ("items", "additionalProperties", "not"):
            cut[key] = _cut(value)
        else:
            cut[key] = value
    return cut


def _opened(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    of_pods = name == "template" and "spec" in schema.get("properties", ())
    return OPEN if of_pods or name in ("serveService", "headService") else _cut(schema)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as an API server with strict validation has it: an object with properties has no others."""
    made = {key: _closed_value(key, value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def _closed_value(key: str, value: Any) -> Any:
    if key == "properties":
        return {name: closed(inner) for name, inner in value.items()}
    if key == "items" or (key == "additionalProperties" and isinstance(value, dict)):
        return closed(value)
    return value  # an anyOf says of properties above what else holds


def main() -> None:
    for path in sys.argv[1:]:
        definition = yaml.safe_load(Path(path).read_text())
        kind = definition["spec"]["names"]["kind"]
        (FOLDER / f"{kind}.json").write_text(json.dumps(schema_of(definition), indent=None, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
