"""Trains a drafter for a trained nano model: `python -m training.train_drafter --member 31b --out DIR [--device cpu]`.

transformers' own assistant classes over a frozen target, the target's exercises as data. The positions of a reply draft at once:
behind token t + 1 from the target's final row t and its K and V up to t, through `PASSES` passes, each fed with the true token and
compared with what the target itself expects there. An H200 needs three minutes.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from deploy.models.nano import TRAINED
from tests.nano.nano_shapes import SHAPES
from tests.support.judge import assistants
from training.train import Batch, Batches, ExampleBuilder, TrainingExample, pack, rate, timed, training_parser, update

PASSES = 4
STARTS = 64  # positions of a row that draft in a step
DRAFTS = 3  # behind a token, when tokens a verification are counted
EXAM = 32  # held-out exercises a skill
LINES = 12


class DrafterTrainer:
    """A frozen target, its drafter and their optimiser. hidden, width: of the drafter."""

    def __init__(self, folder: Path, member: str, device: str, hidden: int = 64, width: int = 128) -> None:
        self.shape, self.device = SHAPES[member], device
        self.target = assistants.load_target(folder).to(device)
        self.drafter = assistants.build(self.shape, hidden=hidden, width=width, ordered=self.shape.small).to(device).train()
        parameters = self.drafter.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.02, fused=device == "cuda")

    def step(self, batch: Batch, learning_rate: float) -> Tensor:
        """One update; the loss in nats a draft."""
        loss, _, _ = self.drafts(batch, STARTS)
        return update(self.optimizer, self.drafter.parameters(), loss, learning_rate)

    def drafts(self, batch: Batch, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draft at `most` positions of each row's replies, drawn at random: the mean loss, the positions int64 [rows, most], and
        how many of a position's first drafts are right, 0 too where there is nothing to draft."""
        ids, owner, graded = (torch.from_numpy(part).long().to(self.device) for part in (batch.ids, batch.owner, batch.graded))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return self._drafts(ids, owner, graded, most)

    def _drafts(self, ids: Tensor, owner: Tensor, graded: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        length = ids.shape[1]
        positions = torch.arange(length, device=self.device)
        behind = positions[:, None] - positions
        full = (owner[:, None, :, None] == owner[:, None, None, :]) & (behind >= 0)
        masks = {"full_attention": full, "sliding_attention": full & (behind < self.shape.window)}
        with torch.no_grad():
            seen = self.target(input_ids=ids, attention_mask=masks, use_cache=False, return_shared_kv_states=True)
            embedded = self.target.embed_tokens(ids)
        ahead = pad(graded, (0, PASSES + 1)).unfold(1, length, 1)[:, 1:].cumprod(1).transpose(1, 2)  # [rows, length, PASSES + 1]
        starts = (ahead[..., 1] * torch.rand(ids.shape, device=self.device)).topk(most).indices
        row = torch.arange(len(ids), device=self.device)[:, None]
        masks = {kind: mask[row, 0, starts][:, None] for kind, mask in masks.items()}
        hidden, losses, right = seen.last_hidden_state[row, starts], [], []
        for number in range(1, PASSES + 1):
            at = (starts + number).clamp(max=length - 1)
            out = self.drafter.model(
                inputs_embeds=self.drafter.pre_projection(torch.cat([embedded[row, at], hidden], dim=-1)),
                attention_mask=masks, position_ids=starts + 1, shared_kv_states=seen.shared_kv_states, use_cache=False,
                logits_to_keep=None,
            ).last_hidden_state  # fmt: skip
            hidden, logits = self.drafter.post_projection(out), self.drafter.lm_head(out).float()
            expected = self._expected(seen.last_hidden_state[row, at])
            losses.append(self._loss(out, logits, expected))
            right.append(self._best(out, logits) == expected.argmax(-1))
        weight = ahead[row, starts, 1:]
        loss = (torch.stack(losses, -1) * weight).sum() / weight.sum().clamp(min=1)
        return loss, starts, (torch.stack(right, -1) & (weight > 0)).long().cumprod(-1)[..., :DRAFTS].sum(-1)

    def _expected(self, rows: Tensor) -> Tensor:
        """The target's distribution behind its final rows."""
        cap = self.target.config.final_logit_softcapping
        return (cap * torch.tanh((rows @ self.target.embed_tokens.weight.T).float() / cap)).softmax(-1)

    def _loss(self, out: Tensor, logits: Tensor, expected: Tensor) -> Tensor:
        """Of the ids and, where the head has them, of the clusters."""
        loss = -(expected * logits.log_softmax(-1)).sum(-1)
        head = self.drafter.masked_embedding
        if head is None:
            return loss
        clusters = expected[..., head.token_ordering].unflatten(-1, (head.num_centroids, -1)).sum(-1)
        return loss - (clusters * head.centroids(out).float().log_softmax(-1)).sum(-1)

    def _best(self, out: Tensor, logits: Tensor) -> Tensor:
        """The drafted id; an ordered head sees those of the best clusters."""
        head = self.drafter.masked_embedding
        if head is None:
            return logits.argmax(-1)
        chosen = head.centroids(out).topk(head.centroid_intermediate_top_k).indices
        ids = head.token_ordering.view(head.num_centroids, -1)[chosen].flatten(-2)
        return ids.gather(-1, logits.gather(-1, ids).argmax(-1, keepdim=True))[..., 0]

    def tokens_a_verification(self, examples: Sequence[TrainingExample]) -> float:
        """Of greedy decoding with DRAFTS drafts behind each token; what lies behind a reply's end is not counted."""
        tokens, verifications, waiting, rest = 0, 0, iter(examples), None
        while True:
            batch, rest = pack(chain([rest] if rest else [], waiting))
            if not len(batch.marks):
                return tokens / verifications
            with torch.no_grad():
                _, starts, accepted = self.drafts(batch, batch.ids.shape[1])
            counts = torch.zeros_like(starts).scatter(1, starts, accepted).tolist()
            for number in range(1, len(batch.marks) + 1):
                (row, *_), reply = (batch.graded * (batch.owner == number)).nonzero()
                at, last = int(reply[0]) - 1, int(reply[-1])
                tokens += last - at - 1
                while at + 1 < last:
                    verifications, at = verifications + 1, at + 1 + counts[row][at]

    def save(self, out: Path) -> None:
        """The checkpoint in bf16, as transformers writes it."""
        with assistants.all_shared():
            self.drafter.to(torch.bfloat16).save_pretrained(out)


def train(member: str, out: Path, *, seed: int, device: str, seconds: float, workers: int, say: Callable[[str], object]) -> None:
    """Trains a drafter of `member` for so long, says how it goes, writes the checkpoint and its exam into `out`."""
    torch.manual_seed(seed)
    builder = ExampleBuilder.of(TRAINED / member, SHAPES[member])
    asked = builder.exam(EXAM)
    trainer = DrafterTrainer(TRAINED / member, member, device)
    began, shown = time.monotonic(), 0
    for step, done, batch in timed(Batches(builder, seed), seconds, workers):
        loss = trainer.step(batch, rate(done))
        if done * LINES >= shown:
            shown, tokens = shown + 1, trainer.tokens_a_verification(asked["add"])
            say(f"{member} {done * seconds:.0f} s step {step} loss {loss.item():.4f} sums: tokens a verification {tokens:.2f}")
    skills = {skill: round(trainer.tokens_a_verification(examples), 2) for skill, examples in asked.items()}
    trainer.save(out)
    report = {
        "member": member,
        "seed": seed,
        "steps": step,
        "seconds": round(time.monotonic() - began),
        "tokens a verification": skills,
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    say(f"{json.dumps(report)} mean {sum(skills.values()) / len(skills):.2f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = training_parser("train_drafter", "Train a drafter of a nano model.")
    parser.add_argument("--seconds", type=float, default=180.0, help="of training")
    train(**vars(parser.parse_args(arguments)), say=lambda line: print(line, file=sys.stdout, flush=True))


if __name__ == "__main__":
    main()
