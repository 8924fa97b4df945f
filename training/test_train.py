"""Training of the nano models, on a scale that two cores can watch."""

import random
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import Nano
from tests.nano.nano_shapes import SHAPES
from tests.support.judge.oracle import load_oracle
from training import train
from training.exercises import SKILLS
from training.exercises import training as taught

pytestmark = pytest.mark.cpu


@pytest.fixture
def builder(nano: Nano) -> train.ExampleBuilder:
    return replace(train.ExampleBuilder.of(nano("31b"), SHAPES["31b"]), size=(2, train.ROW))


def trainer_of() -> train.Trainer:
    shape = SHAPES["31b"]
    return train.Trainer(train.start(shape, 0), shape.window, "cpu")


def test_a_row_keeps_its_conversations_apart(builder: train.ExampleBuilder, nano: Nano) -> None:
    """In fp32, a packed conversation has the logits that it has alone; with one shared mask (planted) it has not."""
    trainer = trainer_of()
    batch = builder.batch(0, 0)
    ids, owner, graded = trainer._on_device(batch)
    with torch.no_grad():
        packed = trainer._logits(ids, *trainer._masks(owner))
        mixed = trainer._logits(ids, *trainer._masks(owner.clamp(max=1)))
        for number in range(2, len(batch.marks) + 1):
            row, place = (owner == number).nonzero().unbind(1)
            alone = trainer.model(input_ids=ids[row, place][None], use_cache=False).logits[0]
            torch.testing.assert_close(packed[row, place], alone, atol=1e-4, rtol=0)
            if place[0] > 0:
                assert (mixed[row, place] - alone).abs().max() > 1e-2
    assert 0 < int(graded.sum()) < int((owner > 0).sum())


def test_no_example_is_lost_between_batches(builder: train.ExampleBuilder) -> None:
    """Packed batch after batch, every example comes once, in order, and exactly its reply is graded."""
    draw = builder.draw(random.Random(1))
    examples = [builder.example(taught(skill, draw)) for skill in SKILLS for _ in range(3)]
    waiting, rest, marks, graded = iter(examples), None, [], 0
    while True:
        batch, rest = train.pack(chain([rest] if rest else [], waiting), builder.size)
        if not len(batch.marks):
            break
        marks += batch.marks.tolist()
        graded += int(batch.graded.sum())
    assert marks == [example.mark for example in examples]
    assert graded == sum(len(example.ids) - example.start for example in examples)


@pytest.mark.slow
def test_steps_teach_and_the_checkpoint_loads(builder: train.ExampleBuilder, tmp_path: Path) -> None:
    """A few steps on one batch lower its loss by a third, and what is saved is what was trained, in bf16."""
    trainer = trainer_of()
    batch = builder.batch(0, 0)
    losses = [trainer.step(batch, 2e-3).item() for _ in range(6)]
    assert losses[-1] < losses[0] * 2 / 3, losses
    train.save(trainer, SHAPES["31b"], tmp_path, 0)
    saved = load_oracle(tmp_path).state_dict()
    for name, value in trainer.model.state_dict().items():
        np.testing.assert_array_equal(saved[name].float().numpy(), value.bfloat16().float().numpy(), err_msg=name)
