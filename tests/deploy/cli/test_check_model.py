"""`quartet check-model`: what it says of a folder, what it refuses, and what it does not import."""

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from deploy.cli import machine_checks as checks
from deploy.cli.check_model_command import member
from deploy.cli.main import main
from deploy.models.nano import TRAINED
from deploy.models.public_shapes import PUBLIC, config
from engine.geometry import parse_config
from engine.rank.load.tensor_files import INDEX
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

Captured = pytest.CaptureFixture[str]
OLDER = "{%- macro format_function_declaration(tool) -%}{%- endmacro -%}{%- macro strip_thinking(text) -%}{%- endmacro -%}"
CORRECTED = OLDER + "{%- if next_nt.found -%}{%- endif -%}"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TRAINED / "e2b", tmp_path / "copy"))


def check(capsys: Captured, folder: Path, code: int) -> dict[str, dict[str, Any]]:
    """Findings by name."""
    assert main(["check-model", "--json", str(folder)]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["good"] == (code == 0)
    return {finding["name"]: finding for finding in found["findings"]}


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_good_folder(capsys: Captured) -> None:
    """Shape, format, size, tokenizer and template have a line each, and the verdict is the last."""
    found = check(capsys, TRAINED / "31b", 0)
    assert list(found) == ["model", "format", "size", "tokenizer", "template"]
    assert "6 layers, hidden size 80, 1024 tokens" in found["model"]["found"]
    assert found["format"]["found"] == "safetensors of BF16, 3 files"
    assert main(["check-model", str(TRAINED / "31b")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{TRAINED / '31b'}: can be loaded"


@pytest.mark.parametrize("name", PUBLIC)
def test_members_are_known_by_their_shape(name: str) -> None:
    """A folder of a published shape is called by the member's name."""
    assert member(parse_config(config(PUBLIC[name], "bfloat16"))) == f"Gemma 4 {name}"


NO_TORCH = textwrap.dedent("""
    import sys

    class Blocked:
        def find_spec(self, name, *_):
            if name.partition(".")[0] in {"torch", "transformers", "ray"}:
                raise ImportError(name)

    sys.meta_path.insert(0, Blocked())
    from deploy.cli.main import main
    sys.exit(main(sys.argv[1:]))
""")


def test_it_needs_no_torch() -> None:
    """With torch, transformers and ray blocked it says the same; planted: a torch that is needed ends it."""
    for planted, code in (("", 0), ("import torch\n", 1)):
        script = NO_TORCH.replace("from deploy", planted + "from deploy")
        command = [sys.executable, "-c", script, "check-model", str(TRAINED / "e2b")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        assert ("can be loaded" in done.stdout) == (code == 0)


def test_a_quantised_folder(copy: Path, capsys: Captured) -> None:
    """The format is named, and the exit code is 1."""
    quantised = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    edit(copy / "config.json", lambda config: config.update(quantised))
    assert "is quantised (modelopt, NVFP4)" in check(capsys, copy, 1)["config"]["found"]
    assert main(["check-model", str(copy)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{copy}: would be refused"


def test_other_refusals_are_said_together(copy: Path, capsys: Captured) -> None:
    """A missing tensor and a tokenizer with more tokens than the model are both told, each with its reason."""
    edit(copy / INDEX, lambda index: index["weight_map"].pop("model.language_model.norm.weight"))
    edit(copy / "config.json", lambda config: config["text_config"].update(vocab_size=1023))
    found = check(capsys, copy, 1)
    assert "norm.weight lies in" in found["tensors"]["found"]
    assert "embed_tokens.weight has shape [1024, 80], not [1023, 80]" in found["tensors"]["found"]
    assert "highest id is 1023" in found["text"]["found"]


def test_a_saved_head_is_told(copy: Path, capsys: Captured) -> None:
    """A head of its own is said with its size."""
    edit(copy / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": "head.safetensors"}))
    save_file({"lm_head.weight": np.zeros((1024, 80), np.float32)}, copy / "head.safetensors")
    assert check(capsys, copy, 0)["head"]["found"].startswith("lm_head.weight is saved: dropped if it equals the embedding")


TEMPLATES = [(CORRECTED, "ok", "2026-07-09 or later"), (OLDER, "warn", "before 2026-07-09"), ("{{ 1 }}", "ok", "not Google's")]


def nano_yaml(path: Path, **args: Any) -> Path:
    document = yaml.safe_load((ROOT / "deploy" / "nano.yaml").read_text())
    document["applications"][0]["args"] |= args
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(("template", "state", "what"), TEMPLATES)
def test_templates(copy: Path, capsys: Captured, template: str, state: str, what: str) -> None:
    """A template from before Google's correction is a warning."""
    (copy / "chat_template.jinja").write_text(template)
    finding = check(capsys, copy, 0)["template"]
    assert (finding["state"], what in finding["found"]) == (state, True)


@pytest.mark.parametrize(("template", "state", "what"), TEMPLATES)
def test_doctor_knows_templates(copy: Path, template: str, state: str, what: str) -> None:
    """doctor says the same of a config's model, and of the file that the config names in its place."""
    (copy / "chat_template.jinja").write_text(template)
    (copy / "other.jinja").write_text(OLDER)
    for named, expected in ((None, (state, what)), ("other.jinja", ("warn", "before")), ("absent", ("warn", "absent is not here"))):
        chosen = {} if named is None else {"chat_template": str(copy / named)}
        (finding,) = checks.templates(nano_yaml(copy / "mine.yaml", model=str(copy), served_model_name="mine", **chosen))
        assert (finding.name, finding.state) == ("template of mine", expected[0])
        assert expected[1] in finding.found
    assert list(checks.templates(nano_yaml(copy / "mine.yaml", model="someone/else"))) == []


def test_doctor_looks_at_templates(copy: Path, capsys: Captured) -> None:
    """What it finds is among doctor's findings."""
    main(["doctor", "--json", str(nano_yaml(copy / "mine.yaml", model=str(copy), served_model_name="mine"))])
    assert "template of mine" in {each["name"] for each in json.loads(capsys.readouterr().out)["findings"]}


def test_a_folder_without_template(copy: Path, capsys: Captured) -> None:
    """It loads, for raw prompts alone."""
    (copy / "chat_template.jinja").unlink()
    assert check(capsys, copy, 0)["template"]["state"] == "warn"


def test_check_config_compiles_the_template_that_is_named(tmp_path: Path, capsys: Captured) -> None:
    """One that does not compile is an error of one line; one that is elsewhere is a note."""
    file = tmp_path / "template.jinja"
    path = nano_yaml(tmp_path / "mine.yaml", chat_template=str(file))
    wrong = "chat_template: chat template, line 1"
    for text, code, said in ((None, 0, "is not on this machine"), ("{% if %}", 2, wrong), ("", 0, "")):
        if text is not None:
            file.write_text(text)
        assert main(["check-config", str(path)]) == code
        captured = capsys.readouterr()
        assert said in (captured.err if code else captured.out)
