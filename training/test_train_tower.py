"""Training of the nano towers: what a batch holds, and that the frozen text model reads it as transformers' and our own do."""

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from deploy.edge.media.rasters import resized, target_size
from deploy.models.nano import TRAINED
from tests.nano.model_shapes import config
from tests.nano.nano_shapes import SHAPES
from training import pictures, train_tower
from training.train import ExampleBuilder

pytestmark = pytest.mark.cpu

MEDIA = dict(SHAPES["31b"].media)


def batches(member: str, most: int) -> train_tower.PictureBatches:
    return train_tower.PictureBatches(ExampleBuilder.of(TRAINED / member, SHAPES[member]), MEDIA, "test", most)


def test_a_batch_holds_what_the_edge_would_send() -> None:
    """Pictures are resized to what the edge makes of them, and stand beside the question between their two markers."""
    before = 0
    for step in range(6):
        batch = batches("31b", 4)[step]
        height, width = batch.pixels.shape[1:3]
        assert batch.sides[::-1] in {target_size(height, width, budget) for budget in train_tower.BUDGETS}
        for ids, soft, graded in zip(batch.ids, batch.soft, batch.graded, strict=True):
            (places,) = soft.nonzero()
            assert len(places) == places[-1] - places[0] + 1 == batch.sides[0] * batch.sides[1] // 48**2
            assert (ids[places[0] - 1], ids[places[-1] + 1]) == (MEDIA["<|image>"], MEDIA["<image|>"])
            assert ids[graded == 1][-1] == 106
            assert graded.sum() >= 2
            before += ids[places[-1] + 2] == 106
    assert 0 < before < 6 * 4


def test_rows_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's patches, tower and masks give the logits of transformers' whole model; a narrower window (planted)
    does not."""
    shape = SHAPES["31b"]
    trainer = train_tower.TowerTrainer(TRAINED / "31b", shape, 0, "cpu")
    monkeypatch.setattr(train_tower, "BUDGETS", (140,))
    batch = batches("31b", 2)[0]
    assert batch.soft.sum(1)[0] > shape.window
    model = whole_model(trainer)
    pixels = np.stack([resized(pictures.Image.fromarray(one), batch.sides[::-1]) for one in batch.pixels])
    sized = replace(batch, pixels=pixels)
    columns, rows = (side // 16 for side in batch.sides)
    patches = pixels.reshape(len(pixels), rows, 16, columns, 16, 3).swapaxes(2, 3).reshape(len(pixels), rows * columns, 768) / 255
    positions = np.stack([np.tile(np.arange(columns), rows), np.repeat(np.arange(rows), columns)], 1)[None].repeat(len(pixels), 0)
    soft = torch.from_numpy(batch.soft)
    ids = torch.from_numpy(batch.ids).masked_fill(soft, MEDIA["<|image|>"])
    with torch.no_grad():
        expected = model(
            input_ids=ids, mm_token_type_ids=soft.long(), pixel_values=torch.from_numpy(patches).float(),
            image_position_ids=torch.from_numpy(positions),
        ).logits  # fmt: skip
        own = trainer._rows(batch, trainer.soft_tokens(sized)) @ trainer.target.embed_tokens.weight.T
        trainer.shape = replace(shape, window=shape.window - 8)
        narrow = trainer._rows(batch, trainer.soft_tokens(sized)) @ trainer.target.embed_tokens.weight.T
    length = int(batch.graded[0].nonzero()[0][-1])
    own, narrow = (30 * torch.tanh(logits / 30) for logits in (own, narrow))
    torch.testing.assert_close(own[0, :length], expected[0, :length], atol=2e-4, rtol=0)
    assert (narrow[0, :length] - expected[0, :length]).abs().max() > 2e-2


def whole_model(trainer: train_tower.TowerTrainer) -> transformers.PreTrainedModel:
    """transformers' model of pictures and texts with the trainer's weights."""
    both = transformers.AutoConfig.for_model(**json.loads(json.dumps(config(trainer.shape, "float32") | {"audio_config": None})))
    model = transformers.AutoModelForImageTextToText.from_config(both, attn_implementation="sdpa").eval()
    state = {f"model.{name}": value for name, value in trainer.parts.state_dict().items()}
    state |= {f"model.language_model.{name}": value for name, value in trainer.target.state_dict().items()}
    model.load_state_dict(state, strict=False)
    return model


@pytest.mark.slow
def test_a_step_teaches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A few steps on one batch lower its loss by a third; what is saved has the text model's files beside it named."""
    monkeypatch.setattr(train_tower, "BUDGETS", (70,))
    trainer = train_tower.TowerTrainer(TRAINED / "e2b", SHAPES["e2b"], 0, "cpu")
    batch = batches("e2b", 4)[0]
    losses = [trainer.step(batch, 2e-3, replies=True).item() for _ in range(8)]
    assert losses[-1] < losses[0] * 2 / 3, losses
    trainer.save(TRAINED / "e2b", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(trainer.parts.state_dict()) <= {
        name.removeprefix("model.") for name, file in index.items() if file == "vision.safetensors"
    }


def test_pictures_differ() -> None:
    """Every colour and thing is drawn, and two pictures of one thing are not alike."""
    rng = random.Random(0)
    drawn = [pictures.draw(rng, 64, 64) for _ in range(900)]
    assert {(one.colour, one.thing) for one in drawn} == set(product(pictures.COLOURS, pictures.THINGS))
    assert len({one.image.tobytes() for one in drawn}) == 900
