"""Trains a drafter for a trained nano model: `python -m tests.nano.train_drafter --member 31b --out DIR [--device cpu]`.

transformers' own assistant classes over a frozen target, the target's exercises as data. Every position of a batch drafts at once:
behind token t + 1 from the target's final row t and its K and V up to t, through `PASSES` passes, each fed with the true token.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from deploy.models.nano import TRAINED
from deploy.models.nano.nano_shapes import SHAPES
from tests.nano.train import Batch, ExampleBuilder, rate
from tests.support.judge import assistants

PASSES = 4
STEPS = 3000
LINES = 10


class DrafterTrainer:
    """A frozen target, its drafter and their optimiser. hidden, width: of the drafter."""

    def __init__(self, folder: Path, member: str, device: str, hidden: int = 64, width: int = 128) -> None:
        self.shape, self.device = SHAPES[member], device
        self.target = assistants.load_target(folder).to(device)
        self.drafter = assistants.build(self.shape, hidden=hidden, width=width, ordered=False).to(device).train()
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.02)

    def step(self, batch: Batch, learning_rate: float) -> tuple[float, float]:
        """One update; the loss in nats a draft, and the tokens that a verification of PASSES drafts would give."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss, tokens = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), tokens

    def loss(self, batch: Batch) -> tuple[Tensor, float]:
        """The mean over drafts of reply tokens, and the mean length of right prefixes, the target's own token counted."""
        ids, owner, graded = (torch.from_numpy(part).long().to(self.device) for part in (batch.ids, batch.owner, batch.graded))
        count = ids.shape[1] - PASSES - 1  # positions that have all their drafts in the row
        place = torch.arange(ids.shape[1], device=self.device)
        behind = place[:, None] - place
        whole = (owner[:, None, :, None] == owner[:, None, None, :]) & (behind >= 0)
        masks = {"full_attention": whole, "sliding_attention": whole & (behind < self.shape.window)}
        with torch.no_grad():
            seen = self.target(input_ids=ids, attention_mask=masks, use_cache=False, return_shared_kv_states=True)
            rows = self.target.embed_tokens(ids)
        hidden, right, losses, lengths = seen.last_hidden_state[:, :count], None, [], []
        masks = {kind: mask[:, :, :count] for kind, mask in masks.items()}
        for number in range(1, PASSES + 1):
            embedded = self.drafter.pre_projection(torch.cat([rows[:, number : number + count], hidden], dim=-1))
            out = self.drafter.model(
                inputs_embeds=embedded, attention_mask=masks, position_ids=place[None, 1 : count + 1],
                shared_kv_states=seen.shared_kv_states, use_cache=False, logits_to_keep=None,
            ).last_hidden_state  # fmt: skip
            hidden, logits = self.drafter.post_projection(out), self.drafter.lm_head(out)
            wanted = ids[:, number + 1 : number + 1 + count]
            weight = graded[:, number + 1 : number + 1 + count] * (owner[:, number + 1 : number + 1 + count] == owner[:, :count])
            each = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
            losses.append((each * weight).sum() / weight.sum().clamp(min=1))
            hit = (logits.argmax(-1) == wanted) & (weight > 0)
            right = hit if right is None else right & hit
            lengths.append(right)
        begun = graded[:, 2 : 2 + count].sum().clamp(min=1)
        return torch.stack(losses).mean(), 1 + float(torch.stack(lengths).sum() / begun)

    def save(self, out: Path) -> None:
        """The checkpoint in bf16, as transformers writes it."""
        self.drafter.to(torch.bfloat16).save_pretrained(out)


def train(member: str, out: Path, *, seed: int, device: str, steps: int) -> None:
    """Trains a drafter of `member`, prints how it goes, writes the checkpoint into `out`."""
    folder = TRAINED / member
    builder = ExampleBuilder.of(folder, SHAPES[member])
    trainer, began = DrafterTrainer(folder, member, device), time.monotonic()
    for step in range(steps):
        loss, tokens = trainer.step(builder.batch(seed, step), rate(step / steps))
        if step % max(1, steps // LINES) == 0:
            sys.stdout.write(f"{time.monotonic() - began:.0f} s step {step} loss {loss:.4f} tokens a verification {tokens:.2f}\n")
            sys.stdout.flush()
    with torch.no_grad():
        _, tokens = trainer.loss(builder.batch(seed + 1, 0))
    trainer.save(out)
    report = {"member": member, "seed": seed, "steps": steps, "passes": PASSES, "tokens a verification": round(tokens, 3)}
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.nano.train_drafter", description="Train a drafter of a nano model.")
    parser.add_argument("--member", required=True, choices=sorted(SHAPES))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    train(**options)


if __name__ == "__main__":
    main()
