"""Trains a nano checkpoint from nothing: `python -m training.train --member 31b --out DIR [--device cpu]`.

transformers' own Gemma 4 classes, the builder's weights as a start, exercises as data, loss on the replies alone. A batch is
ROWS rows of ROW tokens; a row holds whole conversations side by side, and a mask keeps each one to itself. Data is a function
of seed and step. One H200 needs five to seven minutes; two CPU cores need about ten seconds a step, and know everything after
2500 steps (--steps 2500).
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.front.text import TextProcessor
from tests.nano import nano_shapes, random_models, random_weights
from tests.nano.model_shapes import ModelShape, config
from tests.nano.nano_shapes import SHAPES, tensors
from training.exercise_form import Draw, Exercise
from training.exercises import SKILLS, drawing, exam, training

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

ROW = 512  # tokens; the longest exercise has about 460
PEAK_RATE = 2e-3
ROWS = 64
WARM_UP = 0.02  # of the whole run
STEPS = 4500
LINES = 12  # of progress
EXAM = 128  # held-out exercises a skill when training ends; a quarter of it on the way

# How often a skill is drawn. Recall fills a whole row each time.
SHARE = {
    "add": 6.0,
    "copy": 3.0,
    "reverse": 5.0,
    "sort": 5.0,
    "recall": 1.5,
    "edge": 3.0,
    "json": 2.0,
    "call": 1.0,
    "respond": 1.0,
    "think": 3.0,
    "describe": 1.0,
    "story": 1.5,
    "choose": 2.0,
    "parallel": 2.0,
    "nested": 3.0,
    "call_after_thought": 1.5,
    "respond_parallel": 1.5,
    "json_schema": 3.0,
}


@dataclass(frozen=True)
class TrainingExample:
    """Token ids of one conversation, where its reply begins, and the item's hash."""

    ids: list[int]
    start: int
    mark: int


@dataclass(frozen=True)
class Batch:
    """int32 [rows, tokens] each; owner: which conversation a token belongs to, 0 where there is none; graded: 1 on replies.

    marks: int64 [conversations], the items' hashes.
    """

    ids: npt.NDArray[np.int32]
    owner: npt.NDArray[np.int32]
    graded: npt.NDArray[np.int32]
    marks: npt.NDArray[np.int64]


@dataclass(frozen=True)
class ExampleBuilder:
    """A member's tokenizer and window: what turns exercises into tokens. size: a batch's rows, and tokens of a row."""

    text: TextProcessor
    window: int
    size: tuple[int, int] = (ROWS, ROW)

    @classmethod
    def of(cls, folder: Path, shape: ModelShape) -> "ExampleBuilder":
        return cls(TextProcessor.load(folder), shape.window)

    def draw(self, rng: random.Random) -> Draw:
        return drawing(rng, self.window, self.text)

    def example(self, exercise: Exercise) -> TrainingExample:
        prompt = exercise.prompt(self.text)
        return TrainingExample(prompt + self.text.encode(exercise.reply, add_bos=False), len(prompt), exercise.mark)

    def batch(self, seed: int, step: int) -> Batch:
        """The training data of one step."""
        rng = random.Random(f"{seed}/{step}")
        draw, names, shares = self.draw(rng), list(SHARE), list(SHARE.values())
        return pack((self.example(training(rng.choices(names, shares)[0], draw)) for _ in count()), self.size)[0]

    def exam(self, size: int) -> dict[str, list[TrainingExample]]:
        """`size` held-out examples of each skill that has one right reply."""
        draw = self.draw(random.Random("exam"))
        return {skill: [self.example(each) for each in exam(skill, draw, size)] for skill in SKILLS if skill != "story"}


def pack(examples: Iterator[TrainingExample], size: tuple[int, int] = (ROWS, ROW)) -> tuple[Batch, TrainingExample | None]:
    """Examples side by side; one that does not fit begins the next row. Also the example that no row had room for."""
    ids, owner, graded = (np.zeros(size, np.int32) for _ in range(3))
    marks = []
    row = column = 0
    for example in examples:
        assert len(example.ids) <= size[1], len(example.ids)
        if column + len(example.ids) > size[1]:
            row, column = row + 1, 0
        if row == size[0]:
            return Batch(ids, owner, graded, np.array(marks)), example
        here = slice(column, column + len(example.ids))
        marks.append(example.mark)
        ids[row, here] = example.ids
        owner[row, here] = len(marks)
        graded[row, column + example.start : here.stop] = 1
        column = here.stop
    return Batch(ids, owner, graded, np.array(marks)), None


class Batches:
    """A torch dataset: the item at a step is its batch."""

    def __init__(self, builder: ExampleBuilder, seed: int) -> None:
        self._of_step = partial(builder.batch, seed)

    def __getitem__(self, step: int) -> Batch:
        return self._of_step(step)


class Trainer:
    """A model, the optimiser of what it trains, and one step of both. window: the model's, in tokens."""

    def __init__(self, model: Any, window: int, device: str) -> None:
        import torch

        self.torch, self.device, self.window = torch, device, window
        torch.set_float32_matmul_precision("high")
        self.model = model.to(device).train()
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        grouped = {True: [], False: []}
        for parameter in self.trained:
            grouped[parameter.dim() >= 2].append(parameter)
        groups = [{"params": grouped[True], "weight_decay": 0.02}, {"params": grouped[False], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), eps=1e-9, fused=device == "cuda")
        self._forward = torch.compile(self._logits, dynamic=False) if device == "cuda" else self._logits

    def step(self, batch: Batch, rate: float) -> "Tensor":
        """One update; returns the loss, in nats a token of a reply."""
        ids, owner, graded = self._on_device(batch)
        loss = self._loss(self._forward(ids, *self._masks(owner)), ids, graded)
        return update(self.optimizer, self.trained, loss, rate)

    def accuracy(self, examples: Sequence[TrainingExample], size: tuple[int, int] = (ROWS, ROW)) -> float:
        """The share of replies whose every token is the likeliest one: those that greedy decoding would give."""
        wrong, waiting, rest = 0, iter(examples), None
        while True:
            batch, rest = pack(chain([rest] if rest else [], waiting), size)
            if not len(batch.marks):
                return 1 - wrong / len(examples)
            ids, owner, graded = self._on_device(batch)
            with self.torch.no_grad():
                found = self._logits(ids, *self._masks(owner)).argmax(-1)
            wrong += owner[:, 1:][(found[:, :-1] != ids[:, 1:]) & (graded[:, 1:] == 1)].unique().numel()

    def _on_device(self, batch: Batch) -> list["Tensor"]:
        arrays = (batch.ids, batch.owner, batch.graded)
        return [self.torch.from_numpy(array).long().to(self.device, non_blocking=True) for array in arrays]

    def _masks(self, owner: "Tensor") -> tuple["Tensor", "Tensor"]:
        """bool [rows, 1, tokens, tokens] each, True where a token may look: of the full layers, of the sliding ones."""
        place = self.torch.arange(owner.shape[1], device=self.device)
        behind = place[:, None] - place[None, :]
        whole = (owner[:, None, :, None] == owner[:, None, None, :]) & (behind >= 0)
        return whole, whole & (behind < self.window)

    def _logits(self, ids: "Tensor", whole: "Tensor", near: "Tensor") -> "Tensor":
        masks = {"full_attention": whole, "sliding_attention": near}
        with self.torch.autocast(self.device, self.torch.bfloat16, enabled=self.device == "cuda"):
            return self.model(input_ids=ids, attention_mask=masks, use_cache=False).logits

    def _loss(self, logits: "Tensor", ids: "Tensor", graded: "Tensor") -> "Tensor":
        each = self.torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        weight = graded[:, 1:].flatten()
        return (each * weight).sum() / weight.sum()


def update(optimizer: "Optimizer", parameters: "Iterable[Parameter]", loss: "Tensor", rate: float) -> "Tensor":
    """One step down the gradient of `loss`, clipped over these parameters; the loss, without its gradient."""
    from torch.nn.utils import clip_grad_norm_

    loss.backward()
    clip_grad_norm_(parameters, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def timed(data: Any, seconds: float, workers: int) -> Iterator[tuple[int, float, Any]]:
    """(step, the part of the time that is over, batch) until all of it is."""
    import torch

    began = time.monotonic()
    batches = torch.utils.data.DataLoader(data, batch_size=None, sampler=count(), num_workers=workers)
    for step, batch in enumerate(batches):
        done = (time.monotonic() - began) / seconds
        if done >= 1:
            break
        yield step, done, batch


def start(shape: ModelShape, seed: int) -> Any:
    """transformers' model with the builder's random weights; layer scalars, which nobody trains, lie nearer to 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config(shape, "float32")))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa")
    state = model.state_dict()
    unknown = state.keys() - {tensor.name for tensor in tensors(shape)} - {"lm_head.weight"}
    assert not unknown, f"transformers has tensors that the builder does not know: {sorted(unknown)}"
    for tensor in tensors(shape):
        if tensor.name in state:  # the dead K and V of layers that share another's are not
            value = torch.from_numpy(random_weights.draw(tensor, shape, seed))
            state[tensor.name].copy_(0.75 + value / 4 if tensor.kind == "scalar" else value)
    return model


def save(trainer: Trainer, shape: ModelShape, out: Path, seed: int) -> None:
    """The checkpoint in bf16; tensors that the model has not (dead K and V) keep their random values."""
    state = trainer.model.state_dict()

    def value(tensor: nano_shapes.Tensor) -> random_weights.Array:
        if tensor.name not in state:
            return random_weights.draw(tensor, shape, seed)
        return state[tensor.name].detach().float().cpu().numpy()  # type: ignore[no-any-return]

    random_models.write(shape, out, value, "bfloat16")


def rate(done: float) -> float:
    """The learning rate when this part of the run, 0 to 1, is done: up, then down to zero in a line."""
    return PEAK_RATE * min(done / WARM_UP, (1 - done) / (1 - WARM_UP))


def train(member: str, out: Path, *, seed: int, device: str, steps: int, workers: int) -> None:
    """Trains `member`, prints how it goes, writes the checkpoint into `out`."""
    import torch

    shape = SHAPES[member]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        builder = ExampleBuilder.of(random_models.build(member, Path(folder)), shape)
    asked = builder.exam(EXAM)
    known = np.array([example.mark for examples in asked.values() for example in examples])
    trainer = Trainer(start(shape, seed), shape.window, device)
    data = Batches(builder, seed)
    batches = torch.utils.data.DataLoader(data, batch_size=None, sampler=range(steps), num_workers=workers)
    began, seen, overlap = time.monotonic(), 0, 0
    for step, batch in enumerate(batches):
        loss = trainer.step(batch, rate(step / steps))
        seen, overlap = seen + len(batch.marks), overlap + int(np.isin(batch.marks, known).sum())
        if step in (0, 10) or step % (steps // LINES) == 0:
            marks = {skill: trainer.accuracy(examples[: EXAM // 4]) for skill, examples in asked.items()}
            told = " ".join(f"{skill} {mark:.2f}" for skill, mark in marks.items())
            _say(f"{time.monotonic() - began:.0f} s step {step} loss {loss.item():.4f} {told}")
    save(trainer, shape, out, seed)
    report = {
        "member": member,
        "seed": seed,
        "steps": steps,
        "skills": list(SHARE),
        "seconds": round(time.monotonic() - began),
        "exercises": seen,
        "of the exam seen in training": overlap,
        "accuracy": {skill: trainer.accuracy(examples) for skill, examples in asked.items()},
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    _say(json.dumps(report))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def training_parser(name: str, description: str, workers: int = 4) -> argparse.ArgumentParser:
    """The options that `training.<name>` shares with the others that train for a member."""
    parser = argparse.ArgumentParser(prog=f"python -m training.{name}", description=description)
    parser.add_argument("--member", required=True, choices=sorted(SHAPES))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=workers, help="processes that prepare data")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = training_parser("train", "Train a nano Gemma 4 checkpoint.", len(os.sched_getaffinity(0)) - 1)
    parser.add_argument("--steps", type=int, default=STEPS)
    train(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
