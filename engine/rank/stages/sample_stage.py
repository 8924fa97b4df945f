"""The sampling of a step: final hidden rows to tokens, which go into the slots' token table, and to logprobs."""

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
from engine.rank.sampler import Sampler, SpecialRows
from engine.rank.slots import ResultRows, SlotState
from engine.rank.stages.forward_stage import ScoredBatch
from engine.rank.upload import uploaded

SAMPLERS = ("argmax", "small_top_k", "adjusted_argmax", "adjusted_small_top_k")  # of captured steps
LARGEST_SAMPLERS = SAMPLERS[1::2]  # which launch whatever the others do


@dataclass(frozen=True)
class StepTokens:
    """What a step's rows sampled.

    chosen    int32 [>= R, 2]: each row's token, 0 where there is none, and its flags (`kernels.choose`)
    logprobs  int32 [n, 2 + 2 alternatives], of the rows that report them;   prompts  likewise, of the prompt rows `scored`
    accepted  int32 [>= sequences]: of rows of several tokens, how many of each sequence's stand
    drafts    int32 [sequences, n]: made behind those, if the core has to know them
    """

    chosen: Tensor
    logprobs: Tensor | None = None
    accepted: Tensor | None = None
    scored: Sequence[ScoredRows] = ()
    prompts: Tensor | None = None
    drafts: Tensor | None = None


def captured_sampler(rows: ResultRows) -> str | None:
    """Returns the one of SAMPLERS that does what the rows ask for; None: none does."""
    special = rows.special
    if special.filtered or special.reported:
        return None
    name = "small_top_k" if special.small_top_k else "argmax"
    return f"adjusted_{name}" if rows.adjusted else name


@dataclass
class SampleStage:
    """Samples from this rank's slice of the logits. inboxes: the group's, if it has any."""

    model: Model
    sampler: Sampler
    slots: SlotState
    inboxes: Inboxes | None

    def sample(self, plan: Tensor | None, batch: ForwardBatch, hidden: Tensor, special: SpecialRows) -> StepTokens:
        """Sample the batch's rows from their final hidden rows; with the step's `plan`, logits are adjusted as their slots say."""
        rows = self.sampler.batch(batch.slots, batch.positions, self.slots.parameters, self.slots.tokens)
        if plan is not None:
            tables = self.slots.adjustments.tables
            rows = replace(rows, adjustments=tables, plan=plan, step=STEP, width=batch.width)
        _, inbox = inboxes_of(self.inboxes, len(hidden))
        return StepTokens(*self.sampler.sample(self.model.head.logits(hidden), rows, inbox, special))

    def prompt_logprobs(self, prompts: ScoredBatch) -> Tensor:
        """Returns the logprobs of the tokens behind the scored rows, as `Sampler.token_logprobs` gives them, with as many
        alternatives as any asks for. Rows go through the head in pieces of `PIECE_LOGITS`: 64 of 262 144 ids on one rank, 256 on
        four."""
        scored, batch, tokens = prompts.scored, prompts.batch, self.slots.tokens
        rows = np.concatenate([part.chunk.offset + np.arange(part.count) for part in scored])
        index = uploaded(torch.from_numpy(rows), tokens.device)
        ids = tokens[batch.slots[index].long(), batch.positions[index].long() + 1].long()
        most, reports = max(part.scoring.alternatives for part in scored), []
        size = max(1, PIECE_LOGITS // len(self.slots.adjustments.ids))
        for piece, of_piece in zip(index.split(size), ids.split(size), strict=True):
            reports.append(self.sampler.token_logprobs(self.model.head.logits(prompts.hidden[piece]), of_piece, most))
        return torch.cat(reports)
