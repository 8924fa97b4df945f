"""What a checkpoint's text files must agree in, and the chat template that may take the place of theirs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.front.text import TextProcessor

pytestmark = pytest.mark.pure


@pytest.fixture
def folder(nano: Callable[[str], Path]) -> Path:
    return nano("31b")


def shown(text: TextProcessor) -> str:
    """A prompt of one message."""
    return text.decode(text.render_chat([{"role": "user", "content": "Hi"}]), skip_special_tokens=False)


def test_a_tokenizer_with_more_tokens_than_the_model(folder: Path, tmp_path: Path) -> None:
    """Ids without a row in the embedding would be read as zeros: such a folder is refused, and the highest id is named."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())

    def set_vocabulary(rows: int) -> None:
        config["text_config"]["vocab_size"] = rows
        (copy / "config.json").write_text(json.dumps(config))

    for rows in (1024, 1025):
        set_vocabulary(rows)
        assert TextProcessor.load(copy).vocab_size == 1024
    set_vocabulary(1023)
    with pytest.raises(CheckpointError, match=r"highest id is 1023 \('.*'\), but the model has only 1023 tokens"):
        TextProcessor.load(copy)


def test_a_tokenizer_that_makes_control_tokens_of_text(folder: Path, tmp_path: Path) -> None:
    """A Unigram model prefers its longest pieces, the names of control tokens too: a user's text would be a turn's end."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    described = json.loads((copy / "tokenizer.json").read_text())
    pieces = sorted(described["model"]["vocab"].items(), key=lambda item: item[1])
    described["model"] = {"type": "Unigram", "unk_id": 3, "byte_fallback": True, "vocab": [[name, -1.0] for name, _ in pieces]}
    (copy / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"makes the control token <\S+> of plain text"):
        TextProcessor.load(copy)


def test_named_tokens(folder: Path, tmp_path: Path) -> None:
    """A named token may be an object with its content; one without is an error that names it, and what is no token is left out."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    path = copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    template = tmp_path / "template.jinja"
    template.write_text("{{ bos_token }}{{ messages[0].content }}{{ mask_token }}")

    def load(**changed: object) -> TextProcessor:
        path.write_text(json.dumps(settings | changed))
        return TextProcessor.load(copy, template)

    assert shown(load(bos_token={"__type": "AddedToken", "content": "<bos>"}, mask_token=None)) == "<bos>Hi"
    assert shown(load(bos_token="<bos>", mask_token={"content": "!"}, bos_token_id={})) == "<bos>Hi!"
    for wrong in ({}, {"content": None}, {"lstrip": False}):
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: mask_token is an object without content"):
            load(mask_token=wrong)


def test_another_template(folder: Path, tmp_path: Path) -> None:
    """A template that is given takes the place of the folder's; one that is not there, or does not compile, is named."""
    file = tmp_path / "other.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}!")
    assert shown(TextProcessor.load(folder, file)) == "<bos>Hi!"
    file.write_text("{% if %}")
    with pytest.raises(CheckpointError, match="line 1"):
        TextProcessor.load(folder, file)
    with pytest.raises(CheckpointError, match=r"absent\.jinja.*No such file"):
        TextProcessor.load(folder, tmp_path / "absent.jinja")


@pytest.mark.parametrize(
    ("source", "thinks"),
    [
        (None, False),
        ("{{ bos_token }}{{ '<|think|>' if enable_thinking is not defined or enable_thinking }}", True),
        ("{{ bos_token }}{{ '<|think|>' if enable_thinking | default(false) }}", False),
        ("{{ bos_token }}{{ messages[0].content }}", False),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_what_a_template_does_by_itself(folder: Path, tmp_path: Path, source: str | None, thinks: bool) -> None:
    """Whether it has the model think is seen by rendering; one that knows no thinking, or renders nothing, does not."""
    file = None if source is None else tmp_path / "template.jinja"
    if file is not None:
        file.write_text(source or "")
    assert TextProcessor.load(folder, file).thinks_by_default is thinks
