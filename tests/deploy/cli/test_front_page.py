"""README's table of configs and its commands are true: each config fits the GPUs that its row names."""

import re
import shlex
import subprocess

import pytest
import yaml

from deploy.cli.main import main
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

README = (ROOT / "README.md").read_text()
# The memory of the smallest GPU that a config's first line names, and one on which it cannot start.
FITS = {
    "gemma4": ("141GB", "16GiB"),
    "31b-two-gpus": ("80GB", "32GiB"),
    "31b-fp8": ("141GB", "80GB"),
    "26b": ("80GB", "48GiB"),
    "12b": ("48GB", "24GiB"),
    "e4b": ("24GB", "16GiB"),
}


@pytest.mark.parametrize("name", FITS)
def test_a_config_passes_its_check_and_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On the GPU that its row names `plan` says yes; on one that is smaller than its weights it says no."""
    path = str(ROOT / "deploy" / f"{name}.yaml")
    assert main(["check-config", path]) == 0
    enough, too_little = FITS[name]
    assert main(["plan", path, "--gpu-memory", enough]) == 0
    assert "it fits" in capsys.readouterr().out
    assert main(["plan", path, "--gpu-memory", too_little]) == 1


def test_the_front_page_names_each_config() -> None:
    named = set(re.findall(r"deploy/([\w-]+)\.yaml", README))
    assert named == {path.stem for path in (ROOT / "deploy").glob("*.yaml")}


def test_plans_of_the_front_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"^quartet (plan .*?|check-config .*?)(?:  #.*)?$", README, re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        assert main([str(ROOT / word) if word.endswith(".yaml") else word for word in shlex.split(line)]) == 0, line
        capsys.readouterr()


def test_the_first_requests_name_the_model_that_make_serves() -> None:
    """And its adapter."""
    args = yaml.safe_load((ROOT / "deploy/nano.yaml").read_text())["applications"][0]["args"]
    served = {args["served_model_name"], *args["adapters"]}
    assert set(re.findall(r'"model": "(.*?)"', README)) == served


def test_the_front_page_names_targets_of_make() -> None:
    """Targets that make does not have are an error of `make -n`: an invented one is."""
    targets = set(re.findall(r"\bmake ([a-z]+)\b", README))
    assert {"serve", "test"} <= targets
    for target in targets:
        assert _make(target) == 0, target
    assert _make("invented") != 0


def _make(target: str) -> int:
    return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, timeout=30, check=False).returncode
