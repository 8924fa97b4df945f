"""Accepts draft tokens after sampling, then drafts for the next step to verify.

    tokens  ... input  d_1 .. d_W  |                    sampled: s_0 .. s_W, s_i after d_i
                s_0 .. s_a                              s_i is accepted while d_i = s_(i-1); lengths advance by a
                       s_a  e_1 .. e_n                  new drafts after the last accepted token

Drafter inputs have fixed addresses, so a graph depends only on the number of rows.
"""

import torch
from torch import Tensor

from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import ForwardBatch
from engine.rank.models.assistant import Assistant
from engine.rank.models.gemma4 import LayerStep
from engine.rank.parallel import inboxes_of
from engine.rank.products import exchange_over
from engine.rank.stages.sample_stage import SampleStage
from engine.rank.step import StepBuffers
from kernels.accept import DraftInputs, Verified, accept
from kernels.adjust import count_accepted
from kernels.sampling_batch import SlotParameters


class DraftStage:
    def __init__(
        self, drafter: Assistant, count: int, attention: AttentionBackend, inputs: StepBuffers, sampling: SampleStage
    ) -> None:
        self._drafter = drafter
        self._attention = attention
        self._inputs = inputs
        self._target = sampling.model
        self._sampler = sampling.sampler
        self._slots = sampling.slots
        self._inboxes = sampling.inboxes
        rows = inputs.shapes.sequences[-1]
        device = self._slots.device
        ids, of_slots, *positions = torch.zeros((3 + count, rows), dtype=torch.int32, device=device)
        hidden = ids.new_zeros((rows, self._target.geometry.hidden), dtype=self._target.dtype)
        self._rows = DraftInputs(ids, of_slots, torch.stack(positions), hidden)
        parameters = self._slots.parameters
        self._greedy = SlotParameters._make([*map(torch.zeros_like, parameters[:2]), parameters.stop])

    def accept(self, batch: ForwardBatch, chosen: Tensor, hidden: Tensor, *, adjusted: bool) -> Tensor:
        """Accepted tokens of each sequence, int32 [sequences, padded]; lengths advance. chosen: int32 [rows, 2]; hidden: final
        rows."""
        width = batch.width
        slots = self._slots
        rows = self._first_rows(self._inputs.shapes.sequences_of(len(chosen) // width))
        verified = Verified(chosen, batch.ids, batch.slots, batch.positions, hidden, width)
        accepted = accept(verified, slots.parameters.stop, slots.lengths, slots.padding, rows)
        if adjusted and width > 1:
            first = batch.positions[::width].contiguous()
            counted = rows.slots[: len(first)], first, batch.ids.view(-1, width), accepted[: len(first)]
            count_accepted(slots.adjustments.tables, *counted, slots.adjustments.ids.start)
        return accepted

    def draft(self, sequences: int, count: int) -> None:
        """Draft `count` tokens after each sequence's last accepted one. Capturable."""
        rows = self._first_rows(sequences)
        drafter = self._drafter
        peers, inbox = inboxes_of(self._inboxes, sequences)
        batch = self._inputs.drafting(rows.slots, rows.positions[0], rows.positions[1])
        exchange = exchange_over(peers, drafter.parallel, drafter.geometry.eps)
        step = LayerStep(batch, self._attention, self._attention.prepare(batch), exchange, None)
        ids = rows.ids
        hidden = rows.hidden
        for index in range(count):
            final = drafter(self._target.embed(ids, exchange), hidden, step)
            drafts = self._sampler.batch(rows.slots, rows.positions[1 + index], self._greedy, self._slots.tokens)
            ids = drafter.head(final, self._sampler, drafts, inbox)[:, 0].contiguous()
            if index + 1 < count:
                hidden = drafter.post.product(final)

    def last_drafts(self, sequences: int, count: int) -> Tensor:
        slots = self._rows.slots[:sequences, None].long()
        positions = self._rows.positions[1 : 1 + count, :sequences].T.long()
        return self._slots.tokens[slots, positions + 1]

    def _first_rows(self, sequences: int) -> DraftInputs:
        ids, slots, positions, hidden = self._rows
        return DraftInputs(ids[:sequences], slots[:sequences], positions[:, :sequences], hidden[:sequences])
