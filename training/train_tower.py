"""Trains a vision tower for a trained nano model: `python -m training.train_tower --member 31b --out DIR [--device cpu]`.

transformers' tower before the frozen text model, pictures of `training/pictures.py` as data. Two heads, thrown away in the end,
name colour and thing from the mean of the soft tokens: first alone, until the tower sees nine of ten, then beside the text model's
replies, which the soft tokens learn to prompt. The text model's weights, and so its answers to texts, stay. Runs so far:
`deploy/models/nano/trained/README.md`.
"""

import json
import math
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from transformers import AutoConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder, Gemma4VisionModel

from deploy.models.nano import TRAINED
from tests.nano import random_weights
from tests.nano.model_shapes import ModelShape, config
from tests.nano.nano_shapes import SHAPES, tensors
from tests.support.judge import assistants
from training import pictures
from training.pictures import COLOURS, THINGS, Picture
from training.train import ExampleBuilder, timed, training_parser, update

BUDGETS = (70,)  # soft tokens at most
PICTURES = 128  # of a step at the first budget; fewer at others
EXAM = 240  # pictures
LINES = 16
NAMING = 0.45  # of the time at most, before replies are learnt
SHARD = "vision.safetensors"


def resized(width: int, height: int, budget: int) -> tuple[int, int]:
    """The sides, multiples of 48, of a picture that gives at most so many soft tokens."""
    scale = math.sqrt(budget * 48 * 48 / (width * height))
    return int(width * scale / 48) * 48, int(height * scale / 48) * 48


@dataclass(frozen=True)
class PictureBatch:
    """Pictures of one size, and their conversations.

    pixels  uint8 [n, height, width, 3];  sides: width and height in front of the tower
    ids     int64 [n, length], `soft` of them at a row's `starts` for the picture's tokens;  graded: 1 on replies
    labels  int64 [n, 2], the colour and the thing
    """

    pixels: npt.NDArray[np.uint8]
    sides: tuple[int, int]
    ids: npt.NDArray[np.int64]
    soft: npt.NDArray[np.bool_]
    graded: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    skills: list[str]


class PictureBatches:
    """A torch dataset: the item at a step is its batch."""

    def __init__(self, builder: ExampleBuilder, media: dict[str, int], seed: str, most: int) -> None:
        self._text, self._media, self._seed, self._most = builder.text, media, seed, most
        self._prompts: dict[str, tuple[list[int], tuple[int, int]]] = {}
        self._replies: dict[str, list[int]] = {}

    def __getitem__(self, step: int) -> PictureBatch:
        rng = random.Random(f"{self._seed}/{step}")
        budget, (width, height) = rng.choice(BUDGETS), pictures.size(rng)
        drawn = [pictures.draw(rng, width, height) for _ in range(max(1, self._most * BUDGETS[0] // budget))]
        sides = resized(width, height, budget)
        rows = [self._conversation(rng, picture, sides[0] * sides[1] // 48**2) for picture in drawn]
        ids, soft, graded = (
            np.zeros((len(rows), max(len(row[0]) for row in rows)), kind) for kind in (np.int64, np.bool_, np.int64)
        )
        for number, (row, start, span) in enumerate(rows):
            ids[number, : len(row)] = row
            soft[number, span] = True
            graded[number, start : len(row)] = 1
        pixels = np.stack([np.asarray(picture.image) for picture in drawn])
        labels = np.array([[list(COLOURS).index(picture.colour), THINGS.index(picture.thing)] for picture in drawn])
        return PictureBatch(pixels, sides, ids, soft, graded, labels, [picture.skill for picture in drawn])

    def _conversation(self, rng: random.Random, picture: Picture, tokens: int) -> tuple[list[int], int, slice]:
        """Ids, where the reply begins, and where the picture's tokens are: in front of the question or behind it."""
        prompt, places = self._prompt(picture.question)
        at = places[rng.random() < 0.2]
        media = [self._media["<|image>"], *[0] * tokens, self._media["<image|>"]]  # a soft token's own id is never embedded
        ids = [*prompt[:at], *media, *prompt[at:]]
        return ids + self._reply(picture.answer), len(ids), slice(at + 1, at + 1 + tokens)

    def _prompt(self, question: str) -> tuple[list[int], tuple[int, int]]:
        """Ids, and where the question begins and ends."""
        if question not in self._prompts:
            prompt = self._text.render_chat([{"role": "user", "content": question}])
            asked = self._text.encode(question, add_bos=False)
            begin = next(at for at in count() if prompt[at : at + len(asked)] == asked)
            self._prompts[question] = prompt, (begin, begin + len(asked))
        return self._prompts[question]

    def _reply(self, answer: str) -> list[int]:
        if answer not in self._replies:
            self._replies[answer] = self._text.encode(answer + "<turn|>", add_bos=False)
        return self._replies[answer]


class TowerTrainer:
    """A frozen text model, its tower and embedder, two heads, and their optimiser."""

    def __init__(self, folder: Path, shape: ModelShape, seed: int, device: str) -> None:
        self.shape, self.device = shape, device
        self.target = assistants.load_target(folder).to(device)
        with tempfile.TemporaryDirectory() as temporary:
            (Path(temporary) / "config.json").write_text(json.dumps(config(shape, "float32") | {"audio_config": None}))
            both = AutoConfig.from_pretrained(temporary, attn_implementation="sdpa")
        self.parts = nn.ModuleDict(
            {
                "vision_tower": Gemma4VisionModel(both.vision_config),
                "embed_vision": Gemma4MultimodalEmbedder(both.vision_config, both.text_config),
            }
        )
        for tensor in tensors(shape):
            if (name := tensor.name.removeprefix("model.")) in (state := self.parts.state_dict()):
                state[name].copy_(torch.as_tensor(start(random_weights.draw(tensor, shape, seed), tensor.kind, name)))
        self.parts.to(device).train()
        self.seen = torch.zeros((), device=device)  # the share of pictures that the heads name rightly, of late
        self.heads = nn.ModuleList(nn.Linear(shape.hidden, size) for size in (len(COLOURS), len(THINGS))).to(device)
        parameters = [*self.parts.parameters(), *self.heads.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=device == "cuda")

    def step(self, batch: PictureBatch, learning_rate: float, *, replies: bool) -> Tensor:
        """One update; the loss in nats a label, and a token of a reply. replies: not labels alone."""
        soft = self.soft_tokens(batch)
        loss, right = self.named(batch, soft)
        self.seen += 0.02 * (right.float().mean() - self.seen)
        if replies:
            loss = loss / 2 + self.answered(batch, soft)[0]
        return update(self.optimizer, self.parts.parameters(), loss, learning_rate)

    def named(self, batch: PictureBatch, soft: Tensor) -> tuple[Tensor, Tensor]:
        """The heads' loss, and which pictures both name rightly: bool [n]."""
        labels, pooled = torch.from_numpy(batch.labels).to(self.device), soft.float().mean(1)
        logits = [head(pooled) for head in self.heads]
        loss = sum(cross_entropy(row, labels[:, number]) for number, row in enumerate(logits))
        return loss, torch.stack([row.argmax(-1) for row in logits], 1).eq(labels).all(1)

    def answered(self, batch: PictureBatch, soft: Tensor) -> tuple[Tensor, Tensor]:
        """The text model's loss, and which replies greedy decoding gives rightly: bool [n]."""
        with self._autocast():
            rows = self._rows(batch, soft)
        ids, graded = (torch.from_numpy(part).to(self.device) for part in (batch.ids, batch.graded))
        cap, at = self.target.config.final_logit_softcapping, graded[:, 1:] == 1
        logits = cap * torch.tanh((rows[:, :-1][at].float() @ self.target.embed_tokens.weight.T) / cap)
        wrong = torch.zeros(at.shape, device=self.device).masked_scatter(at, (logits.argmax(-1) != ids[:, 1:][at]).float())
        return cross_entropy(logits, ids[:, 1:][at]), wrong.sum(1) == 0

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def soft_tokens(self, batch: PictureBatch) -> Tensor:
        """[n, tokens, hidden] of a batch's pictures, resized as transformers' processor does."""
        width, height = batch.sides
        pixels = torch.from_numpy(batch.pixels).to(self.device).permute(0, 3, 1, 2).float()
        pixels = interpolate(pixels, (height, width), mode="bicubic", antialias=True).round().clamp(0, 255) / 255
        patches = pixels.unflatten(3, (-1, 16)).unflatten(2, (-1, 16)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        x, y = torch.meshgrid(torch.arange(width // 16), torch.arange(height // 16), indexing="xy")
        positions = torch.stack([x, y], -1).flatten(0, 1).to(self.device).expand(len(pixels), -1, -1)
        with self._autocast():
            out = self.parts["vision_tower"](pixel_values=patches, pixel_position_ids=positions).last_hidden_state
            embedded = self.parts["embed_vision"](inputs_embeds=out)
        return embedded.view(len(pixels), -1, embedded.shape[-1])

    def _rows(self, batch: PictureBatch, soft: Tensor) -> Tensor:
        """The text model's final rows; a picture's tokens see each other on sliding layers, except in small members."""
        ids, image = torch.from_numpy(batch.ids).to(self.device), torch.from_numpy(batch.soft).to(self.device)
        embedded = self.target.embed_tokens(ids).float().masked_scatter(image[..., None], soft.float())
        positions = torch.arange(ids.shape[1], device=self.device)
        behind = positions[:, None] - positions
        near = ((behind >= 0) & (behind < self.shape.window)).expand(len(ids), 1, -1, -1)
        if not self.shape.small:
            near = near | (image[:, None, :, None] & image[:, None, None, :] & (behind < self.shape.window))
        masks = {"full_attention": (behind >= 0).expand(len(ids), 1, -1, -1), "sliding_attention": near}
        extra = {"per_layer_inputs": self.target.get_per_layer_inputs(ids, None)} if self.shape.small else {}
        return self.target(inputs_embeds=embedded, attention_mask=masks, use_cache=False, **extra).last_hidden_state

    def exam(self, batches: Sequence[PictureBatch]) -> dict[str, float]:
        """The share of right replies by kind of question, and of pictures that the heads name rightly."""
        marks = defaultdict[str, list[bool]](list)
        for batch in batches:
            with torch.no_grad():
                soft = self.soft_tokens(batch)
                marks["heads"] += self.named(batch, soft)[1].tolist()
                for skill, mark in zip(batch.skills, self.answered(batch, soft)[1].tolist(), strict=True):
                    marks[skill].append(mark)
        return {skill: round(sum(mark) / len(mark), 3) for skill, mark in sorted(marks.items())}

    def save(self, folder: Path, out: Path) -> None:
        """The tower in bf16 as a shard of its own, and the files of the checkpoint in `folder` that name it."""
        out.mkdir(parents=True, exist_ok=True)
        state = {
            f"model.{name}": value.detach().to(torch.bfloat16).cpu().contiguous() for name, value in self.parts.state_dict().items()
        }
        save_file(state, out / SHARD, {"format": "pt"})
        text, index = (json.loads((folder / name).read_text()) for name in ("config.json", "model.safetensors.index.json"))
        text["vision_config"] = config(self.shape, "bfloat16")["vision_config"]
        index["metadata"]["total_size"] += sum(value.nbytes for value in state.values())
        index["weight_map"] |= dict.fromkeys(sorted(state), SHARD)
        for name, value in (("config.json", text), ("model.safetensors.index.json", index)):
            (out / name).write_text(json.dumps(value, indent=2) + "\n")


def start(value: random_weights.Array, kind: str, name: str) -> random_weights.Array:
    """Where training begins: bounds that seldom bind, norms of 1, places as waves, so that unseen ones resemble those seen."""
    if kind in ("low", "high"):
        return value * np.float32(4)
    if name.endswith("position_embedding_table"):
        _, places, hidden = value.shape
        waves = np.arange(places)[:, None] * 2 * math.pi / np.geomspace(4, 128, hidden // 4)
        both = 0.7 * np.concatenate([np.sin(waves), np.cos(waves)], 1)
        return np.stack([np.concatenate(pair, 1) for pair in ((both, 0 * both), (0 * both, both))]).astype(np.float32)
    return np.ones_like(value) if kind == "norm" and "std_" not in name else value


def train(member: str, out: Path, *, seed: int, device: str, seconds: float, workers: int, say: Callable[[str], object]) -> None:
    """Trains a tower of `member` for so long, says how it goes, writes it and its exam into `out`."""
    torch.manual_seed(seed)
    folder, shape = TRAINED / member, SHAPES[member]
    builder = ExampleBuilder.of(folder, shape)
    trainer = TowerTrainer(folder, shape, seed, device)
    known = PictureBatches(builder, dict(shape.media), "exam", max(1, PICTURES // 8))
    asked = [known[number] for number in range(-(-EXAM * 8 // PICTURES))]
    data = PictureBatches(builder, dict(shape.media), str(seed), PICTURES)
    began, shown, replies = time.monotonic(), 0, False
    for step, done, batch in timed(data, seconds, workers):
        replies = replies or done > NAMING or (step % 50 == 0 and trainer.seen.item() > 0.9)
        loss = trainer.step(batch, 2e-3 * min(1, step / 50 + 0.02, 2.5 * (1 - done)), replies=replies)
        if done * LINES >= shown:
            shown += 1
            say(f"{member} {done * seconds:.0f} s step {step} loss {loss.item():.4f} {trainer.exam(asked[:4])}")
    trainer.save(folder, out)
    report = {
        "member": member,
        "seed": seed,
        "steps": step,
        "seconds": round(time.monotonic() - began),
        "accuracy": trainer.exam(asked),
    }
    (out / "vision_training.json").write_text(json.dumps(report, indent=2) + "\n")
    say(json.dumps(report))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = training_parser("train_tower", "Train a vision tower of a nano model.")
    parser.add_argument("--seconds", type=float, default=200.0, help="of training")
    train(**vars(parser.parse_args(arguments)), say=lambda line: print(line, file=sys.stdout, flush=True))


if __name__ == "__main__":
    main()
