"""One declaration of each setting: what is added to engine/config.py is in YAML, check-config, engine and reference."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import EngineSettings
from tests.support.repo_rules import ROOT
from tests.support.settings_reference import PATH, reference

pytestmark = pytest.mark.pure

FIELD = '    spare_pages: Annotated[int, Meta(ge=1, le=9)] = 3\n    """pages kept for later"""\n'
# engine.config from its source with one line more; then whatever argv asks of the code around it.
PATCH = """
import linecache, pathlib, sys, types
module = types.ModuleType("engine.config")
module.__file__ = "<with one more>"
source = pathlib.Path("engine/config.py").read_text()
mark = "    prefix_cache: "
assert source.count(mark) == 1
sys.modules["engine.config"] = module
source = source.replace(mark, sys.argv.pop(1) + mark)
linecache.cache[module.__file__] = len(source), None, source.splitlines(keepends=True), module.__file__
exec(compile(source, module.__file__, "exec"), module.__dict__)
import engine
engine.config = module
"""
ENGINE = """
from deploy.models.resolve import resolve
from deploy.placement import configure
from deploy.settings import Settings
import msgspec
def made(**args):
    return configure(Settings.read({"model": "nano:31b", **args}), resolve("nano:31b"), resolve, has_gpus=False)
print(made().spare_pages, msgspec.msgpack.decode(msgspec.msgpack.encode(made(spare_pages=7)))["spare_pages"])
"""


def patched(code: str, *argv: str, field: str = FIELD, code_of_exit: int = 0) -> str:
    """What a process prints that runs `code` beside an engine with one setting more."""
    command = [sys.executable, "-c", PATCH + code, field, *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code_of_exit, done.stderr
    return done.stdout + done.stderr


CLI = "from deploy.cli.main import main; sys.exit(main(sys.argv[1:]))"


def config(path: Path, **args: Any) -> str:
    app = {"name": "q", "import_path": "deploy.app:build", "args": {"model": "nano:31b", "device": "cpu", **args}}
    path.write_text(yaml.safe_dump({"applications": [app]}))
    return str(path)


def test_a_setting_that_is_declared_once_is_everywhere(tmp_path: Path) -> None:
    """One field in engine/config.py: the engine gets it, YAML, check-config and the reference know it with its bounds."""
    assert patched(ENGINE).split() == ["3", "7"]
    found = json.loads(patched(CLI, "check-config", config(tmp_path / "good.yaml", spare_pages=5), "--json"))
    assert found["applications"][0]["settings"]["spare_pages"] == 5
    bad = config(tmp_path / "bad.yaml", spare_pages=10)
    assert "spare_pages: expected int <= 9, not 10" in patched(CLI, "check-config", bad, code_of_exit=2)
    page = patched("from tests.support.settings_reference import reference; print(reference())")
    assert "| `spare_pages` | `3` | integer, at least 1, at most 9 | pages kept for later |" in page


def test_without_the_field_nobody_knows_it(tmp_path: Path) -> None:
    """Planted: the same questions where the field is missing."""
    text = patched(CLI, "check-config", config(tmp_path / "good.yaml", spare_pages=5), field="", code_of_exit=2)
    assert "spare_pages: unknown setting" in text


def test_the_committed_reference_is_current() -> None:
    """`python -m tests.support.settings_reference` would change nothing; every setting of the engine is in it with its help."""
    page = reference()
    assert PATH.read_text(encoding="utf-8") == page
    for name in EngineSettings.__struct_fields__:
        assert f"| `{name}` |" in page or f"## `{name}`" in page
