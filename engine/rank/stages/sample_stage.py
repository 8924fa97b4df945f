"""Samples a step: final hidden rows to tokens, in the slots' token table, and to logprobs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.memory import PIECE_LOGITS
from engine.plan import STEP
from engine.rank.batch import ForwardBatch
from engine.rank.models.architecture import Model
from engine.rank.parallel import Inboxes, inboxes_of
from engine.rank.prompt_logprobs import ScoredRows
from engine.rank.sampler import ResultRows, Sampler
from engine.rank.slots import SlotState
from engine.rank.upload import uploaded

SAMPLERS = ("argmax", "small_top_k", "adjusted_argmax", "adjusted_small_top_k")  # of captured steps
LARGEST_SAMPLERS = SAMPLERS[1::2]  # they launch every kernel of the other samplers


@dataclass(frozen=True)
class StepTokens:
    chosen: Tensor  # int32 [>= R, 2]: token (0: not sampled) and flags (`kernels.choose`)
    logprobs: Tensor | None = None  # int32 [n, 2 + 2 alternatives], of the rows that report them
    accepted: Tensor | None = None  # int32 [>= sequences]: tokens accepted of each sequence, for rows of several
    drafts: Tensor | None = None  # int32 [sequences, n], if the core needs them


def captured_sampler(rows: ResultRows) -> str | None:
    if rows.filtered or rows.reported:
        return None
    name = "small_top_k" if rows.small_top_k else "argmax"
    if rows.adjusted:
        return f"adjusted_{name}"
    return name


@dataclass
class SampleStage:
    model: Model
    sampler: Sampler
    slots: SlotState
    inboxes: Inboxes | None

    def sample(self, plan: Tensor, batch: ForwardBatch, hidden: Tensor, asked: ResultRows) -> StepTokens:
        rows = self.sampler.batch(batch.slots, batch.positions, self.slots.parameters, self.slots.tokens)
        if asked.adjusted:
            tables = self.slots.adjustments.tables
            rows = replace(rows, adjustments=tables, plan=plan, step=STEP, width=batch.width)
        _, inbox = inboxes_of(self.inboxes, len(hidden))
        logits = self.model.head.logits(hidden, exact=asked.adjusted)  # a grammar may leave none of the best ids
        return StepTokens(*self.sampler.sample(logits, rows, inbox, asked))

    def prompt_logprobs(self, scored: Sequence[ScoredRows], batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """`Sampler.token_logprobs` of prompt tokens. hidden: final rows of the whole batch."""
        tokens = self.slots.tokens
        rows = np.concatenate([part.chunk.offset + np.arange(part.count) for part in scored])
        index = uploaded(torch.from_numpy(rows), tokens.device)
        ids = tokens[batch.slots[index].long(), batch.positions[index].long() + 1].long()
        most = max(part.scoring.alternatives for part in scored)
        reports = []
        size = max(1, PIECE_LOGITS // len(self.slots.adjustments.ids))
        for piece, of_piece in zip(index.split(size), ids.split(size), strict=True):
            logits = self.model.head.logits(hidden[piece], exact=True)
            reports.append(self.sampler.token_logprobs(logits, of_piece, most))
        return torch.cat(reports)
