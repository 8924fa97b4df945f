"""`quartet env`: what it prints is what the launcher sets, in the words of a shell, systemd and Kubernetes."""

import re
import subprocess
from pathlib import Path

import msgspec
import pytest
import yaml

from deploy import environment
from deploy.cli import env_command
from deploy.cli.main import main
from deploy.edge.edge_settings import KEYS_VARIABLE, LIMITS_VARIABLE
from deploy.settings import Settings
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

Captured = pytest.CaptureFixture[str]
ODD = "a'b\"c`d$(e)$f\\g h#i"  # a name of a host may be that


def config(path: Path, **args: object) -> Path:
    app = {"import_path": "deploy.app:build", "args": {"model": "nano:31b", "limits": {"hosts": [ODD], "requests": 99}, **args}}
    path.write_text(yaml.safe_dump({"applications": [app]}))
    return path


def printed(capsys: Captured, path: Path | None, node: str, form: str) -> str:
    assert main(["env", "--for", node, "--format", form, *([str(path)] if path else [])]) == 0
    return capsys.readouterr().out


def read_by_shell(text: str, folder: Path) -> dict[str, str]:
    """What a shell that reads `text` hands to its children; systemd has the same rules between double quotes."""
    (folder / "file").write_text(text)
    command = ["env", "-i", "/bin/sh", "-ac", ". ./file; /usr/bin/env -0"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)


def read_by_kubernetes(text: str, _folder: Path) -> dict[str, str]:
    """What a container gets: `$$` is a dollar, `$(NAME)` the value of a variable, empty here."""
    values = {entry["name"]: entry["value"] for entry in yaml.safe_load(text)}
    return {name: re.sub(r"\$\$|\$\(\w+\)", lambda found: "$" * (found[0] == "$$"), value) for name, value in values.items()}


READERS = {"shell": read_by_shell, "systemd": read_by_shell, "kubernetes": read_by_kubernetes}


@pytest.mark.parametrize("node", ["head", "node"])
@pytest.mark.parametrize("form", READERS)
def test_every_format_carries_the_whole_table(tmp_path: Path, capsys: Captured, form: str, node: str) -> None:
    """Each value to the letter, with the limits and keys of the config; what follows from a machine's size for a shell alone."""
    path = config(tmp_path / "config.yaml", keys={"file": "/etc/keys"})
    found = READERS[form](printed(capsys, path, node, form), tmp_path)
    expected = environment.for_ray_start(head=node == "head")
    assert expected.items() <= found.items()
    assert msgspec.json.decode(found[LIMITS_VARIABLE])["hosts"] == [ODD]
    assert msgspec.json.decode(found[KEYS_VARIABLE])["file"] == "/etc/keys"
    assert ("RAY_SERVE_HAPROXY_MAXCONN" in found) == (form == "shell")
    assert ("RAY_health_check_period_ms" in found) == (node == "head")


@pytest.mark.parametrize("form", READERS)
def test_an_unquoted_value_is_not_what_it_was(tmp_path: Path, form: str) -> None:
    """Planted: the same values as they stand are read as others, or as none."""
    values = {"A": ODD}
    naive = "- {name: A, value: a$(e)}\n" if form == "kubernetes" else "A=a$(true)b\n"
    raw = {"A": "a$(e)"} if form == "kubernetes" else {"A": "a$(true)b"}
    quoted = "\n".join(env_command.FORMATS[form](values)) + "\n"
    assert READERS[form](quoted, tmp_path)["A"] == ODD
    assert READERS[form](naive, tmp_path)["A"] != raw["A"]


def test_a_replica_with_all_of_it_misses_nothing(tmp_path: Path) -> None:
    """On any node; of a head's environment each variable that is taken out is named. Planted: Ray's own environment lacks most."""
    settings = Settings.read({"model": "nano:31b", "limits": {"requests": 99}, "keys": {"file": "/etc/keys"}})
    for head in (True, False):
        full = environment.for_ray_start(head=head) | environment.guard({"/": settings}, "0.0.0.0")
        assert environment.missing(full, settings) == []
        for name in ("RAY_worker_niceness", LIMITS_VARIABLE, KEYS_VARIABLE):
            assert environment.missing({key: full[key] for key in full if key != name}, settings) == [name]
    assert len(environment.missing({}, settings)) > 15
    assert LIMITS_VARIABLE not in environment.missing({}, Settings.read({"model": "nano:31b"}))


def test_the_launcher_and_ray_start_have_one_table(tmp_path: Path) -> None:
    """What `quartet serve` sets for Ray, but its own ports and folder, `quartet env` prints, with what several machines need."""
    own: dict[str, str] = {}
    environment.prepare(own, tmp_path, {})
    private = {*environment.HAPROXY_FILES, *environment.haproxy_sizes(), *environment.ONE_MACHINE, "RAY_AUTH_TOKEN_PATH"}
    printed_ones = environment.for_ray_start(head=False)
    assert own.keys() - private == printed_ones.keys() - environment.SEVERAL_MACHINES.keys() - {"PYTHONPATH"}
    assert printed_ones["PYTHONPATH"].startswith(str(ROOT))
    assert {name: own[name] for name in environment.RAY} == environment.RAY


def test_what_cannot_be_served_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    """A config's own error, and nothing that a shell would take for an environment."""
    assert main(["env", "--for", "head", str(config(tmp_path / "bad.yaml", tp="many"))]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "tp: expected" in captured.err
