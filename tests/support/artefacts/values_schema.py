"""Writes the settings into the chart's schema: `python -m tests.support.artefacts.values_schema`.

The schema of the chart's own values is kept by hand. Helm refuses by it a key that the chart does not have; with our settings in
it, Helm also refuses a misspelt key under `extraArgs`.
"""

import json
from typing import Any

import msgspec

from deploy.settings import Settings
from tests.support.repo_rules import ROOT

PATH = ROOT / "deploy" / "chart" / "values.schema.json"


def values_schema() -> str:
    """The file as it should be."""
    document = json.loads(PATH.read_text())
    document["$defs"] = {"Model": document["$defs"]["Model"]} | settings_schemas()
    return json.dumps(document, indent=1) + "\n"


def settings_schemas() -> dict[str, Any]:
    """The JSON schema of each struct of settings, by its name. No key is required, and none is unknown."""
    _, schemas = msgspec.json.schema_components([Settings], ref_template="#/$defs/{name}")
    for schema in schemas.values():
        schema["additionalProperties"] = False
        schema.pop("required", None)
    return schemas


if __name__ == "__main__":
    PATH.write_text(values_schema())
