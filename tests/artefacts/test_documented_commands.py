"""The commands of the pages on deployment: each is run here as it stands, or its block is marked `by-hand`."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.main import main
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.cpu

PAGES = ("one-machine", "kubernetes", "offline")
BLOCK = re.compile(r"^```([\w-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    """The blocks of a kind in all pages; commands to run have none."""
    texts = [(ROOT / "docs" / f"{page}.md").read_text() for page in PAGES]
    return [body for text in texts for found, body in BLOCK.findall(text) if found == kind]


def lines(kind: str) -> list[str]:
    """The lines of these blocks."""
    return [line for body in blocks(kind) for line in body.splitlines() if line]


def test_every_command_is_run_or_marked() -> None:
    """What no test runs is marked: building, installing and starting."""
    assert {line.split()[0] for line in lines("")} == {"quartet", "helm"}
    assert len(lines("by-hand")) >= 10
    kinds = {found for page in PAGES for found, _ in BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())}
    assert kinds == {"", "by-hand", "yaml", "ini"}


@pytest.mark.parametrize("line", [line for line in lines("") if line.startswith("quartet")])
def test_quartet_runs_them(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes the line: it ends as asked, or with the answer no on a machine without those GPUs."""
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(line)[1:]
    assert main(arguments) in (0, 1)
    with pytest.raises(SystemExit):
        main([*arguments, "--no-such-option"])


@pytest.mark.parametrize("line", lines("by-hand"))
def test_files_of_commands_by_hand_are_there(line: str) -> None:
    """Files of the checkout that a command names exist."""
    for word in shlex.split(line):
        name = word.rpartition("=")[2]
        if name.startswith(("deploy/", "docs/")):
            assert (ROOT / name).exists(), name


def example_values() -> dict[str, Any]:
    """The chart's values that kubernetes.md shows."""
    (body,) = blocks("yaml")
    return yaml.safe_load(body)


def test_the_examples_values_are_the_charts() -> None:
    """Each key of the example is one that values.yaml has."""
    known = yaml.safe_load((ROOT / "deploy" / "chart" / "values.yaml").read_text())
    assert _unknown(example_values(), known) == []
    assert _unknown({"networkPolicies": {}}, known) == ["networkPolicies"]


def _unknown(given: dict[str, Any], known: dict[str, Any]) -> list[str]:
    found = []
    for key, value in given.items():
        if key == "modelSpec":
            defaults = known["modelDefaults"] | {"name": ""}
            found += [name for model in value for name in _unknown(model, defaults)]
        elif key not in known:
            found.append(key)
        elif isinstance(value, dict) and key not in ("extraArgs", "labels"):
            found += _unknown(value, known[key])
    return found


def test_pages_link_to_files_that_exist() -> None:
    """Every relative link of the pages leads to a file."""
    for page in PAGES:
        folder = ROOT / "docs"
        for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", (folder / f"{page}.md").read_text()):
            assert Path(folder, target).exists(), target
