"""What check-config says of a checkpoint's folder and of a template, and doctor of templates."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from huggingface_hub import constants
from safetensors.numpy import save_file

from deploy.cli import machine_checks as checks
from deploy.cli.main import main
from deploy.models.nano import TRAINED
from deploy.settings import Settings
from engine.checkpoint import INDEX
from tests.support.repo_rules import ROOT
from tests.support.stack.serve_process import free_port

pytestmark = pytest.mark.pure

Captured = pytest.CaptureFixture[str]
OLDER = "{%- macro format_function_declaration(tool) -%}{%- endmacro -%}{%- macro strip_thinking(text) -%}{%- endmacro -%}"
CORRECTED = OLDER + "{%- if next_nt.found -%}{%- endif -%}"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TRAINED / "e2b", tmp_path / "copy"))


def refusal(capsys: Captured, folder: Path) -> str:
    """What check-config says of a config whose model is `folder`; empty: nothing."""
    args = {"model": str(folder), "served_model_name": "mine", "mtp": {}}
    code = main(["check-config", str(nano_yaml(folder / "mine.yaml", **args))])
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == ((2, 1) if said else (0, 0))
    return said


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_good_folder(copy: Path, capsys: Captured) -> None:
    """Nothing is said of a checkpoint that would be loaded, with a template or without, and with a head of its own."""
    (copy / "chat_template.jinja").unlink()
    edit(copy / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": "head.safetensors"}))
    save_file({"lm_head.weight": np.zeros((1024, 80), np.float32)}, copy / "head.safetensors")
    assert refusal(capsys, copy) == ""


def test_a_quantised_folder(copy: Path, capsys: Captured) -> None:
    """The format is named, and the exit code is 2."""
    quantised = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}
    edit(copy / "config.json", lambda config: config.update(quantised))
    assert "is quantised (modelopt, MXFP8)" in refusal(capsys, copy)


def test_tensors_that_are_missing_or_misshapen(copy: Path, capsys: Captured) -> None:
    """Each is named with its reason."""
    edit(copy / INDEX, lambda index: index["weight_map"].pop("model.language_model.norm.weight"))
    edit(copy / "config.json", lambda config: config["text_config"].update(vocab_size=1023))
    said = refusal(capsys, copy)
    assert "norm.weight lies in" in said
    assert "embed_tokens.weight has shape [1024, 80], not [1023, 80]" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: index.update(weight_map=[1]), "weight_map: Expected `object`, got `array`"),
        (lambda index: index["weight_map"].update(x=7), "weight_map: Expected `str`, got `int`"),
        (lambda index: index["weight_map"].update(x="/y.safetensors"), "x is said to lie in '/y.safetensors'"),
    ],
)
def test_an_index_that_is_none(
    copy: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    """Its file is named, in a folder and in the hub's cache."""
    edit(copy / INDEX, change)
    assert f"{copy / INDEX}: {said}" in refusal(capsys, copy)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(copy.parent))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot = shutil.copytree(copy, copy.parent / "models--a--b" / "snapshots" / "1")
    assert main(["check-config", str(nano_yaml(copy / "mine.yaml", model="a/b", revision="1", mtp={}))]) == 2
    assert f"{snapshot / INDEX}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: config["vision_config"].update(num_hidden_layers=3), "layers.2.mlp.down_proj.linear.weight is missing"),
        (lambda config: config.update(vision_config="siglip"), "config.json: vision_config: "),
        (lambda config: config["vision_config"].update(hidden_size=[1]), "vision_config: Expected `int`, got `array`"),
        (lambda config: config.update(audio_config={"audio_embed_dim": 640}), "embedding_projection.weight is missing; of an"),
    ],
)
def test_an_encoder_that_is_not_all_there(
    tmp_path: Path, capsys: Captured, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    """It is refused before any tensor is read, unless it is left out."""
    copy = Path(shutil.copytree(TRAINED / "31b", tmp_path / "copy"))
    assert refusal(capsys, copy) == ""
    edit(copy / "config.json", change)
    assert said in refusal(capsys, copy)
    assert main(["check-config", str(nano_yaml(copy / "mine.yaml", model=str(copy), mtp={}, language_model_only=True))]) == 0


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden_size": "80"}, "Expected `int`, got `str` - at `$.hidden`"),
        ({"num_attention_heads": 0}, "Expected `int` >= 1 - at `$.heads`"),
        ({"num_key_value_heads": 1 << 64}, "Expected `int` <= 2147483647 - at `$.layers[0].kv_heads`"),
    ],
)
def test_a_number_that_is_none(copy: Path, capsys: Captured, sizes: dict[str, Any], said: str) -> None:
    """A size in quotes, of nothing or of more than there is, is refused with its file."""
    edit(copy / "config.json", lambda config: config["text_config"].update(sizes))
    assert f"config.json: {said}" in refusal(capsys, copy)


def test_templates_by_name(copy: Path, capsys: Captured) -> None:
    """Tokenizers of old had a list of templates: it is refused with its file, unless there is a chat_template.jinja."""
    edit(copy / "tokenizer_config.json", lambda config: config.update(chat_template=[{"name": "default", "template": "x"}]))
    assert refusal(capsys, copy) == ""
    (copy / "chat_template.jinja").unlink()
    assert refusal(capsys, copy).endswith(f"{copy / 'tokenizer_config.json'}: chat_template is no text\n")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": "hot"}, "Expected `float | null`, got `str` - at `$.temperature`"),
        ({"do_sample": False, "top_k": 1.5}, "Expected `int | null`, got `float` - at `$.top_k`"),
        ({"do_sample": "no"}, "Expected `bool | null`, got `str` - at `$.do_sample`"),
        ({"temperature": -1}, "Expected `float` >= 0.0 - at `$.temperature`"),
        ({"top_p": 7}, "Expected `float` <= 1.0 - at `$.top_p`"),
    ],
)
def test_defaults_of_generation_that_are_none(copy: Path, capsys: Captured, values: dict[str, Any], said: str) -> None:
    """The file and the key are named, by `serve` too, before Ray is up; keys that nobody reads may hold anything."""
    path = copy / "generation_config.json"
    edit(path, lambda config: config.update(dict.fromkeys(values), assistant_early_exit="x", max_length=[]))
    assert refusal(capsys, copy) == ""
    edit(path, lambda config: config.update(values))
    assert refusal(capsys, copy).endswith(f"{path}: {said}\n")
    assert main(["serve", str(copy / "mine.yaml"), "--port", str(free_port())]) == 2
    assert capsys.readouterr().err == f"quartet: {path}: {said}\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("x", "Expected `int`, got `str` - at `$[0]`"),
        ([1, None], "Expected `int`, got `null` - at `$[1]`"),
        (-1, "Expected `int` >= 0 - at `$[0]`"),
        ([1, 1024], "Expected `int` <= 1023 - at `$[1]`"),
        (10**30, "Expected `int` <= 1023 - at `$[0]`"),
    ],
)
def test_ids_that_the_model_has_not(copy: Path, capsys: Captured, given: object, said: str) -> None:
    """They are refused with their folder and key, wherever they stand. Planted: the last id that it has."""
    generation, config = copy / "generation_config.json", copy / "config.json"
    for path, key in ((generation, "suppress_tokens"), (generation, "eos_token_id"), (config, "eos_token_id")):
        edit(path, lambda values: values.update({key: [1023]}))  # noqa: B023 - called at once
        assert refusal(capsys, copy) == ""
        edit(path, lambda values: values.update({key: given}))  # noqa: B023 - called at once
        assert refusal(capsys, copy).endswith(f"{copy}: {key}: {said}\n")
        edit(path, lambda values: values.pop(key))  # noqa: B023 - called at once


def test_a_folder_without_weights(copy: Path, capsys: Captured) -> None:
    """A download that has brought the small files alone is refused; so is what has no config.json."""
    for path in (*copy.glob("*.safetensors"), copy / INDEX):
        path.unlink()
    assert "holds no *.safetensors" in refusal(capsys, copy)
    (copy / "config.json").unlink()
    assert "has no config.json" in refusal(capsys, copy)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
def test_a_file_that_must_not_be_read(copy: Path, capsys: Captured, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's: it is named, by `serve` too, before Ray is up."""
    opened = Path.open

    def refuses(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *how, **more)

    assert refusal(capsys, copy) == ""
    monkeypatch.setattr(Path, "open", refuses)
    said = f"quartet: [Errno 13] Permission denied: '{copy / name}'\n"
    assert refusal(capsys, copy) == said
    assert main(["serve", str(copy / "mine.yaml"), "--port", str(free_port())]) == 2
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", INDEX])
def test_a_file_without_an_end(copy: Path, capsys: Captured, name: str) -> None:
    """Brackets deeper than Python's stack are no JSON."""
    (copy / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    assert f"{copy / name} is not JSON: maximum recursion depth" in refusal(capsys, copy)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja", INDEX])
def test_a_link_that_leads_nowhere(copy: Path, capsys: Captured, name: str) -> None:
    """A file that may be absent is not absent then: it is named."""
    assert refusal(capsys, copy) == ""
    (copy / name).unlink()
    (copy / name).symlink_to("nowhere")
    assert f"{copy / name}" in refusal(capsys, copy)


def test_an_index_that_is_a_folder(copy: Path, capsys: Captured) -> None:
    """It is named, by `serve` too, before Ray is up."""
    (copy / INDEX).unlink()
    (copy / INDEX).mkdir()
    said = f"quartet: [Errno 21] Is a directory: '{copy / INDEX}'\n"
    assert refusal(capsys, copy) == said
    assert main(["serve", str(copy / "mine.yaml"), "--port", str(free_port())]) == 2
    assert capsys.readouterr().err == said


def test_a_tokenizer_that_is_missing(copy: Path, capsys: Captured) -> None:
    """A folder without its tokenizer is refused by that file's name."""
    (copy / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(capsys, copy)


def test_a_hub_snapshot_that_is_not_all_here(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note while `serve` would download the rest, of a drafter too; refused where it may not, and where nothing is absent."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    target, drafter = (tmp_path / f"models--a--{name}" / "snapshots" / "1" for name in ("b", "b-assistant"))
    shutil.copytree(TRAINED / "31b", target, ignore=shutil.ignore_patterns("assistant"))
    shutil.copytree(TRAINED / "31b" / "assistant", drafter)
    path = nano_yaml(tmp_path / "mine.yaml", model="a/b", revision="1", mtp={"model": "a/b-assistant"})
    for folder in (target.parents[1], drafter.parents[1]):
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("1")

    def notes() -> list[str]:
        assert main(["check-config", str(path), "--json"]) == 0
        return [note.partition(":")[0] for note in json.loads(capsys.readouterr().out)["applications"][0]["notes"]]

    assert notes() == []
    for file in (target / "tokenizer.json", next(target.glob("*.safetensors")), next(drafter.glob("*.safetensors"))):
        file.rename(tmp_path / "kept")
        assert notes() == ["mtp.model" if file.parent == drafter else "model"]
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert main(["check-config", str(path)]) == 2
        assert str(file.parent) in capsys.readouterr().err
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        (tmp_path / "kept").rename(file)
    (target / "tokenizer.json").write_text("{}")
    assert main(["check-config", str(path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


TEMPLATES = [(CORRECTED, "ok", "not Google's"), (OLDER, "warn", "from before 2026-07-09"), ("{{ 1 }}", "ok", "not Google's")]


def nano_yaml(path: Path, **args: Any) -> Path:
    document = yaml.safe_load((ROOT / "deploy" / "nano.yaml").read_text())
    document["applications"][0]["args"] |= {"adapters": {}} | args
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(("template", "state", "what"), TEMPLATES)
def test_doctor_knows_templates(copy: Path, template: str, state: str, what: str) -> None:
    """doctor says the same of a config's model, and of the file that the config names in its place."""
    (copy / "chat_template.jinja").write_text(template)
    (copy / "other.jinja").write_text(OLDER)
    for named, expected in ((None, (state, what)), ("other.jinja", ("warn", "before")), ("absent", ("warn", "absent is not here"))):
        chosen = {} if named is None else {"chat_template": str(copy / named)}
        (finding,) = checks.templates(Settings(model=str(copy), served_model_name="mine", **chosen))
        assert (finding.name, finding.state) == ("template of mine", expected[0])
        assert expected[1] in finding.found
    assert list(checks.templates(Settings(model="someone/else"))) == []


def test_doctor_looks_at_templates(copy: Path, capsys: Captured) -> None:
    """What it finds is among doctor's findings."""
    main(["doctor", "--json", str(nano_yaml(copy / "mine.yaml", model=str(copy), served_model_name="mine"))])
    assert "template of mine" in {each["name"] for each in json.loads(capsys.readouterr().out)["findings"]}


def test_check_config_compiles_the_template_that_is_named(tmp_path: Path, capsys: Captured) -> None:
    """One that does not compile is an error of one line; one that is elsewhere is a note."""
    file = tmp_path / "template.jinja"
    path = nano_yaml(tmp_path / "mine.yaml", chat_template=str(file))
    wrong = "mine.yaml: chat template, line 1"
    for text, code, said in ((None, 0, "is not on this machine"), ("{% if %}", 2, wrong), ("", 0, "")):
        if text is not None:
            file.write_text(text)
        assert main(["check-config", str(path)]) == code
        captured = capsys.readouterr()
        assert said in (captured.err if code else captured.out)
    assert main(["check-config", str(nano_yaml(path, chat_template=str(tmp_path)))]) == 2
    assert f"chat template {tmp_path}: [Errno 21] Is a directory" in capsys.readouterr().err
