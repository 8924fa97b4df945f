"""compose.yaml: valid by the Compose specification, and it names files, ports and configs that are there."""

import re
from typing import Any

import pytest
import yaml

from tests.support.repo_rules import ROOT

compose_spec = pytest.importorskip("compose_spec", reason="needs the extra [artefacts]")

pytestmark = pytest.mark.artefacts

TEXT = (ROOT / "compose.yaml").read_text()
STACK: dict[str, Any] = yaml.safe_load(TEXT)["services"]["quartet"]


@pytest.mark.parametrize("path", ["compose.yaml", "dashboards/compose.yaml"])
def test_it_is_valid(path: str) -> None:
    """The Compose specification takes the file, and refuses it with a misspelt key."""
    text = (ROOT / path).read_text()
    compose_spec.PyCompose.from_yaml(text).validate()
    with pytest.raises(ValueError, match="imagee"):
        compose_spec.PyCompose.from_yaml(text.replace("image:", "imagee:", 1))


def test_the_stack_is_the_image_with_all_gpus() -> None:
    """It builds deploy/image/Dockerfile, reserves the GPUs, keeps its caches, and drains before it is killed."""
    assert (ROOT / STACK["build"]["dockerfile"]).is_file()
    (device,) = STACK["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert STACK["volumes"] == ["cache:/var/cache/quartet"]
    assert STACK["command"][2:] == ["--drain", "600"]
    assert STACK["stop_grace_period"] == "11m"
    assert STACK["read_only"]


def test_the_config_is_in_the_image() -> None:
    """The config that it serves unless CONFIG names another is in the checkout, and listens where the others look for it."""
    (config,) = re.findall(r"CONFIG:-([^}]+)}", TEXT)
    assert yaml.safe_load((ROOT / config).read_text())["http_options"]["host"] == "127.0.0.1"
    assert yaml.safe_load(TEXT)["include"] == ["dashboards/compose.yaml"]
