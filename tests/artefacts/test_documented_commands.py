"""The commands of the pages on deployment: each is run here as it stands, or its block is marked `by-hand`."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from deploy.cli.main import main
from tests.support.repo_rules import ROOT
from tests.support.stack.machines import Machine, Machines
from tests.support.stack.ray_cluster import STORAGE, RayCluster

pytestmark = pytest.mark.cpu

PAGES = ("deployment", "laptop", "one-machine", "cluster", "kubernetes", "offline")
# What the pages leave to the reader, and what the tests on several machines have in its place.
PLACES = {"/var/lib/quartet/gcs": "/tmp/gcs", "quartet": "python -m deploy.cli", "my.yaml": "/tmp/cluster.yaml"}
PLACES |= {"HEAD:6379": "10.0.0.1:6379", "ID": "1f", "ends": "maintenance"}
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
    assert {line.split()[0] for line in lines("")} == {"quartet", "helm"}  # test_chart.py runs Helm's
    assert len(lines("nodes")) >= 4
    assert len(lines("by-hand")) >= 10
    kinds = {found for page in PAGES for found, _ in BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())}
    assert kinds == {"", "by-hand", "nodes", "yaml", "ini"}


@pytest.mark.parametrize("line", [line for line in lines("") if line.startswith("quartet")])
def test_quartet_runs_them(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes the line: it ends as asked, or with the answer no on a machine without those GPUs."""
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(line, comments=True)[1:]
    assert main(arguments) in (0, 1)
    with pytest.raises(SystemExit):
        main([*arguments, "--no-such-option"])


class Recorder(Machine):
    """A machine that notes the scripts it is given, and knows the other one as a node of Ray."""

    scripts: list[str]

    def run(self, script: str, environ: dict[str, str], timeout_s: float = 120) -> str:
        self.scripts.append(script)
        return '[{"node_id": "1f", "node_ip": "10.0.0.2"}]'


def scripts_on_machines(folder: Path) -> list[list[str]]:
    """The words of each command with which the tests on several machines start Ray, deploy, and drain a node."""
    recorders = []
    for number in (1, 2):
        recorder = Recorder.__new__(Recorder)
        recorder.__dict__ |= {"address": f"10.0.0.{number}", "folder": folder / str(number), "scripts": []}
        (recorder.folder / "tmp").mkdir(parents=True)
        recorders.append(recorder)
    cluster = RayCluster(cast("Machines", SimpleNamespace(machines=recorders)), STORAGE, 0.1)
    cluster.start_head()
    cluster.start_node(recorders[1])
    cluster.deploy()
    cluster.drain(recorders[1], 1000)
    return [words for recorder in recorders for script in recorder.scripts for words in commands(script)]


def commands(script: str) -> Iterator[list[str]]:
    """Yields the words of each command of a script or line."""
    for command in script.replace("/tmp/paced.yaml", "/tmp/cluster.yaml").replace("=", " ").split("&&"):
        yield shlex.split(command, comments=True)


def is_part(words: list[str], longer: list[str]) -> bool:
    """Whether a command is another one with some options left out."""
    rest = iter(longer)
    return all(word in rest for word in words)


def test_the_tests_on_several_machines_run_them(tmp_path: Path) -> None:
    """The commands of cluster.md are those of `make test-nodes`, which adds options. Another option is noticed."""
    run = scripts_on_machines(tmp_path)
    documented = "\n".join(lines("nodes"))
    for word, place in PLACES.items():
        documented = re.sub(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", place, documented)
    for line in documented.splitlines():
        for words in commands(line):
            assert any(is_part(words, longer) for longer in run), words
    assert not any(is_part(["ray", "start", "--heads"], longer) for longer in run)


def test_the_examples_of_configs_pass_their_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The models at one URL, and the replicas that scale, are configs that check-config takes; with a misspelt key they are not."""
    models, scaling = (yaml.safe_load(body) for body in blocks("yaml") if not body.startswith("servingEngineSpec"))
    config = yaml.safe_load((ROOT / "deploy" / "nano.yaml").read_text())
    for part in (models, {"applications": [config["applications"][0] | scaling]}):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config | part))
        assert main(["check-config", str(path)]) == 0, capsys.readouterr().out
        path.write_text(path.read_text().replace("min_replicas", "least_replicas").replace("served_model_name", "served_models"))
        assert main(["check-config", str(path)]) == 2
        capsys.readouterr()


@pytest.mark.parametrize("line", lines("by-hand"))
def test_files_of_commands_by_hand_are_there(line: str) -> None:
    """Files of the checkout that a command names exist."""
    for word in shlex.split(line, comments=True):
        name = word.rpartition("=")[2]
        if name.startswith(("deploy/", "docs/")):
            assert (ROOT / name).exists(), name


def example_values() -> dict[str, Any]:
    """The chart's values that kubernetes.md shows."""
    (body,) = (body for body in blocks("yaml") if body.startswith("servingEngineSpec"))
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
