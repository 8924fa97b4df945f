"""Drafts behind what a step sampled: which tokens stand, then a drafter's passes, into the token table for the next step to verify.

    tokens  ... input  d_1 .. d_W  |                    sampled: s_0 .. s_W, s_i behind d_i
                s_0 .. s_a                              s_i stands while d_i = s_(i-1); lengths advance by a
                       s_a  e_1 .. e_n                  new drafts behind the last one that stands
"""

import torch
from torch import Tensor

from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import ForwardBatch
from engine.rank.kv import KVCache
from engine.rank.models.architecture import Model
from engine.rank.models.assistant import Assistant
from engine.rank.slots import SlotState
from engine.rank.step import StepBuffers
from kernels.accept import accept
from kernels.adjust import count_accepted


class DraftStage:
    """A rank's drafter. count: drafts behind each sequence; attention: of the drafter's shape, over the target's cache."""

    def __init__(
        self, drafter: Assistant, count: int, target: Model, cache: KVCache, attention: AttentionBackend, inputs: StepBuffers
    ) -> None:
        self._drafter, self._count, self._target = drafter, count, target
        self._cache, self._attention, self._inputs = cache, attention, inputs

    def draft(self, slots: SlotState, batch: ForwardBatch, hidden: Tensor, accepted: Tensor) -> None:
        """Draft behind the last accepted token of each sequence of `batch`, of whose rows `hidden` has the final ones."""
        width = batch.width
        sequences, live = batch.slots[::width].contiguous(), accepted > 0
        rows = sequences.long()
        ends = slots.lengths[rows]  # of the last accepted tokens, whose K and V are not there yet
        last = torch.arange(0, len(batch.slots), width, device=rows.device) + (accepted.long() - 1).clamp(min=0)
        ids = slots.tokens[rows, ends.long()]
        inputs = self._inputs.drafting(sequences, torch.where(live, ends - 1, -1))
        embed = self._target.embed
        drafts = self._drafter.drafts(self._count, ids, hidden[last], embed, inputs, self._cache, self._attention)
        columns = ends.long()[:, None] + 1 + torch.arange(self._count, device=rows.device)
        slots.tokens[rows[:, None], columns] = drafts


def accepted_tokens(slots: SlotState, batch: ForwardBatch, chosen: Tensor, first_id: int, *, adjusted: bool) -> Tensor:
    """int32 [sequences]: how many of each sequence's sampled tokens, chosen int32 [rows, 2], stand; lengths advance by the drafts
    among them. first_id: of this rank's logits."""
    sequences = batch.slots[:: batch.width].contiguous()
    if batch.width == 1:
        return (batch.positions >= 0).int()
    ids, positions = batch.ids.view(-1, batch.width), batch.positions.view(-1, batch.width)
    sampled, failed = chosen[:, 0].view(ids.shape).contiguous(), chosen[:, 1].view(ids.shape) != 0
    drafts = torch.where(positions[:, 1:] >= 0, ids[:, 1:], -1).contiguous()
    first, stop = positions[:, 0].contiguous(), slots.parameters.stop
    whole = (~failed).int().cumprod(1).sum(1, dtype=torch.int32).clamp(min=1)  # in front of the first row without a token
    accepted = torch.minimum(accept(sampled, drafts, sequences, first, stop), whole)
    slots.lengths[sequences.long()] += (accepted - 1).clamp(min=0)
    if adjusted:
        count_accepted(slots.adjustments.tables, sequences, first, ids.contiguous(), accepted, first_id)
    return accepted
