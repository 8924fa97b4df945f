"""A step's inputs at fixed addresses, made on the device from the plan's bytes.

    host    plan's header and fixed sections --one copy--> plan [n]        from pinned memory of a step in flight
    device  plan --apply--> page tables, lengths --decode rows--> ids, positions, slots --gather--> page ids, cos, sin

Rows are padded and kernels read no host values, so steps can be captured.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.channel import MAX_RECORD
from engine.plan import COUNTS, HEADER, SECTIONS, PlanView
from engine.rank.batch import Chunk, ForwardBatch, RopeTensors, SoftTokens, chunk_rows, last_seen_of
from engine.rank.slots import SlotState
from engine.rank.upload import staging
from engine.step_shapes import StepShapes, StepSizes
from kernels.chunks import ResultInputs, StepRows, chunk_inputs
from kernels.slots import PlanLayout, apply_plan, decode_inputs, rotary_table

LAYOUT = PlanLayout(HEADER, COUNTS, *(SECTIONS[name] for name in ("rows", "chunks", "appends", "releases")))


class StepBuffers:
    """Inputs of steps of the sizes that `shapes` allows. frequencies: fp32 [pairs] of each rotary embedding."""

    def __init__(self, slots: SlotState, frequencies: RopeTensors, shapes: StepShapes, soft: SoftTokens | None = None) -> None:
        self.shapes = shapes
        self.soft = soft  # media of `shapes.padded_prompts` rows of padded steps, rows -1; None without encoders
        self._slots = slots
        self._frequencies = frequencies
        rows = shapes.prefill + shapes.results
        self._rows = torch.zeros((3, rows), dtype=torch.int32, device=slots.device)  # ids, positions and slots
        self._pages = slots.cache.page_rows(shapes.sequences[-1])
        self._rope = {key: frequency.new_zeros((rows, 2 * len(frequency))) for key, frequency in frequencies.items()}
        results = self._rows.new_zeros((2, shapes.results))
        self._results = ResultInputs(results[0].long(), *results)
        self._chunks = results.new_zeros((shapes.sequences[-1] + 1, 4))
        self._last_seen = results.new_full((shapes.padded_prompts,), -1)
        self.plan = results.new_zeros(MAX_RECORD // 4)  # what a plan has at most
        self._staging = staging(slots.device, len(self.plan))

    def upload(self, plan: PlanView) -> None:
        size = len(plan.fixed)
        staging = next(self._staging)[:size]
        staging.numpy()[:] = _unique_appends(plan) if plan.admissions else plan.fixed
        self.plan[:size].copy_(staging, non_blocking=True)

    def apply(self) -> None:
        apply_plan(self.plan, LAYOUT, [cache.table for cache in self._slots.cache], self._slots.lengths)

    def drafting(self, slots: Tensor, positions: Tensor, rope_positions: Tensor) -> ForwardBatch:
        """A drafter's rows: they read what positions int32 [n] of `slots` see, roped as at
        `rope_positions`. Capturable."""
        pages = self._slots.cache.gather(slots, positions, tuple(page_ids[: len(slots)] for page_ids in self._pages))
        unread = slots  # a drafter begins with tokens of its own, not with ids
        return ForwardBatch(unread, positions, slots, self._rotary(rope_positions), pages)

    def set_media(self, soft: SoftTokens | None, chunks: Sequence[Chunk]) -> None:
        assert self.soft is not None, "the rank has no encoders"
        self.soft.rows.fill_(-1)
        if soft is not None:
            self.soft.rows[: len(soft.rows)] = soft.rows
            self.soft.values[: len(soft.rows)] = soft.values
        self._last_seen.fill_(-1)
        seen = last_seen_of(chunks, self._last_seen.device)
        if seen is not None:
            self._last_seen[: len(seen)] = seen

    def with_media(self, batch: ForwardBatch) -> ForwardBatch:
        count = batch.prompts
        if self.soft is None or not count:
            return batch
        soft = SoftTokens(self.soft.rows[:count], self.soft.values[:count])
        return replace(batch, soft=soft, last_seen=self._last_seen[:count])

    def with_adapters(self, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, adapters=self._slots.adapters.index_select(0, batch.slots))

    def batch(self, sizes: StepSizes) -> tuple[ForwardBatch, ForwardBatch]:
        """The uploaded plan's rows, padded to `sizes`; and the result rows, `sizes.width` a sequence, which are the same batch
        without chunks. Decoding sequences' lengths advance by one. Capturable."""
        first = sizes.prompts
        width = sizes.width
        rows = StepRows(*self._rows[:, : first + sizes.decodes * width])
        pages = tuple(page_ids[: sizes.decodes] for page_ids in self._pages)
        if sizes.decodes:
            ids, positions, slots = (column[first:] for column in rows)
            tokens = self._slots.tokens
            lengths = self._slots.lengths
            decode_inputs(self.plan, LAYOUT, tokens, lengths, self._slots.padding, ids, positions, slots, width)
            self._slots.cache.gather(slots, positions, pages)
        if not first:
            batch = ForwardBatch(*rows, self._rotary(rows.positions), pages, width=width)
            return batch, batch
        chunks = self._chunks[: sizes.chunks + 1]
        results = ResultInputs(*(x[: sizes.results * width] for x in self._results))
        chunk_inputs(self.plan, LAYOUT, self._slots.tokens, self._slots.padding, rows, first, chunks, results, width)
        batch = ForwardBatch(
            *rows, self._rotary(rows.positions), pages, results.rows, width=width, prompts=first, chunk_list=chunks
        )
        ends = replace(batch, slots=results.slots, positions=results.positions)
        return batch, replace(ends, ids=rows.ids[results.rows]) if width > 1 else ends

    def _rotary(self, positions: Tensor) -> RopeTensors:
        rope = {key: table[: len(positions)] for key, table in self._rope.items()}
        for key, table in rope.items():
            rotary_table(positions, self._frequencies[key], table)
        return rope


def chunks_of(plan: PlanView) -> tuple[Chunk, ...]:
    chunks: list[Chunk] = []
    for slot, start, end, _, first, count in plan.chunks.tolist():
        spans = tuple(map(tuple, plan.spans[first : first + count].tolist()))
        chunks.append(Chunk(slot, start, end, chunk_rows(chunks), spans))
    return tuple(chunks)


def _unique_appends(plan: PlanView) -> np.ndarray:
    """Each table entry is appended once: earlier appends to it, from a slot that changes its sequence within the plan, get group
    -1.
    """
    fixed = plan.fixed.copy()
    first = HEADER + plan.rows.size + plan.chunks.size
    appends = fixed[first : first + plan.appends.size].reshape(plan.appends.shape)
    last = {tuple(entry): index for index, entry in enumerate(appends[:, :3].tolist())}
    appends[np.setdiff1d(np.arange(len(appends)), list(last.values())), 0] = -1
    return fixed
