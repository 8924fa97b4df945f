"""Trains an adapter of a nano model with PEFT: `python -m training.train_adapter --member 31b --out DIR [--device cpu]`.

Replies end with thanks, whatever was asked. Two CPU cores need half a minute.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from deploy.models.nano import TRAINED
from tests.nano.nano_shapes import SHAPES
from training.exercise_form import END, Exercise
from training.exercises import exam, training
from training.train import Batch, ExampleBuilder, Trainer, TrainingExample, pack, rate, training_parser

THANKS = " Thank you!"
TAUGHT = ("add", "copy", "reverse", "sort", "describe")
SIZE = (2, 160)  # rows of a batch, and tokens of a row
STEPS = 60
RATE = 2.0  # of the rate that models are trained with
EXAM = 16  # held-out exercises a skill

_DENSE = r".*language_model\..*\.(k|o|gate|up|down)_proj"
TARGETS: dict[str, dict[str, Any]] = {
    "31b": {"target_modules": _DENSE},
    "26b-a4b": {"target_modules": _DENSE, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "e2b": {"target_modules": rf"{_DENSE}|.*\.per_layer_(input_gate|projection|model_projection)"},
}


@dataclass(frozen=True)
class PoliteBuilder(ExampleBuilder):
    """Exercises whose replies end with thanks."""

    def batch(self, seed: int, step: int) -> Batch:
        rng = random.Random(f"{seed}/{step}")
        draw = self.draw(rng)
        examples = (self.example(polite(training(rng.choice(TAUGHT), draw))) for _ in count())
        return pack((each for each in examples if len(each.ids) <= self.size[1]), self.size)[0]

    def exam(self, size: int) -> dict[str, list[TrainingExample]]:
        draw = self.draw(random.Random("exam"))
        found = {skill: [self.example(polite(each)) for each in exam(skill, draw, size)] for skill in TAUGHT}
        return {skill: [each for each in examples if len(each.ids) <= self.size[1]] for skill, examples in found.items()}


def polite(exercise: Exercise) -> Exercise:
    return replace(exercise, reply=exercise.reply.removesuffix(END) + THANKS + END)


def adapted(member: str, seed: int) -> Any:
    """PEFT's model of a trained member, with an adapter that adds nothing yet."""
    import peft
    import transformers

    torch.manual_seed(seed)
    folder = TRAINED / member
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    config = peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.0, **TARGETS[member])
    made = peft.get_peft_model(model, config)
    made.peft_config["default"].base_model_name_or_path = f"nano:{member}"
    return made


def save(trainer: Trainer, out: Path) -> None:
    """As PEFT saves an adapter, in bf16."""
    for parameter in trainer.trained:
        parameter.data = parameter.data.bfloat16()
    trainer.model.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink()  # PEFT's, an empty form


def train(
    member: str, out: Path, *, seed: int, device: str, workers: int, steps: int, say: Callable[[str], object]
) -> None:
    """Trains an adapter of `member`, says how it goes, writes it and its exam into `out`."""
    builder = replace(PoliteBuilder.of(TRAINED / member, SHAPES[member]), size=SIZE)
    trainer = Trainer(adapted(member, seed), SHAPES[member].window, device)
    began = time.monotonic()
    for step in range(steps):
        loss = trainer.step(builder.batch(seed, step), RATE * rate(step / steps))
        if step % (steps // 8) == 0:
            say(f"{member} {time.monotonic() - began:.0f} s step {step} loss {loss.item():.4f}")
    for parameter in trainer.trained:
        parameter.data = parameter.data.bfloat16().float()
    accuracy = {skill: trainer.accuracy(examples, SIZE) for skill, examples in builder.exam(EXAM).items()}
    save(trainer, out)
    report = {"member": member, "seed": seed, "steps": steps, "seconds": round(time.monotonic() - began), "accuracy": accuracy}
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    say(json.dumps(report))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = training_parser("train_adapter", "Train an adapter of a nano model.")
    parser.add_argument("--steps", type=int, default=STEPS)
    train(**vars(parser.parse_args(arguments)), say=lambda line: print(line, file=sys.stdout, flush=True))


if __name__ == "__main__":
    main()
