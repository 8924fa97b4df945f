"""The committed nano checkpoints are what the training says it has written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.models.nano import TRAINED, trained
from tests.nano.model_shapes import config
from tests.nano.nano_shapes import SHAPES
from tests.nano.random_models import chat_template
from training import learn_tokenizer
from training.exercises import SKILLS, skills

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("member", trained())
def test_a_trained_checkpoint_is_its_shape(member: str, tmp_path: Path) -> None:
    """At most 8 MB of bf16, a tower of 1.3 MB, in the builder's layout; every skill at least 95 %; none of the exam was seen."""
    folder = TRAINED / member
    assert sum(path.stat().st_size for path in folder.glob("model*.safetensors")) <= 8_000_000
    assert sum(path.stat().st_size for path in folder.glob("vision.safetensors")) <= 1_300_000
    saved = json.loads((folder / "config.json").read_text())
    towers = {name: None for name in ("vision", "audio") if saved[f"{name}_config"] is None}
    shape = replace(SHAPES[member], **towers)
    assert saved == json.loads(json.dumps(config(shape, "bfloat16")))
    learn_tokenizer.write(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()
    assert (folder / "chat_template.jinja").read_text() == chat_template(config(SHAPES[member], "bfloat16"))
    report = json.loads((folder / "training.json").read_text())
    assert report["of the exam seen in training"] == 0
    assert min(report["accuracy"].values()) >= 0.95
    assert set(report["accuracy"]) == set(skills(member)) - {"story"}
    untaught = [skill for skill in SKILLS if skill not in skills(member)]
    assert not set(skills(member)) - set(SKILLS)
    print(f"{member} was trained on {len(skills(member))} skills, not on {untaught}")
