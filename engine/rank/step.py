"""A step's inputs at fixed addresses, made on the device from the plan's bytes.

    host    plan's header and fixed sections --one copy--> plan [n]        from pinned memory that belongs to a step in flight
    device  plan --apply--> page tables, lengths --decode rows--> ids, positions, slots --gather--> each row's page ids, cos, sin

A decode step's rows are padded to a bucket (`engine.memory.buckets`), and the host decides none of its kernels' inputs: it can be
captured. Chunk rows lie before the decode rows in the same buffers; the host makes and uploads their inputs.
"""

import bisect
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.plan import DEPTH, PlanView
from engine.plan_layout import COUNTS, HEADER, SECTIONS, STEP
from engine.rank.batch import Chunk, ForwardBatch, RopeKey, chunk_rows
from engine.rank.slots import SlotState
from engine.rank.upload import uploaded
from kernels.slots import PlanLayout, apply_plan, decode_inputs, rotary_table

LAYOUT = PlanLayout(HEADER, STEP, COUNTS, *(SECTIONS[name] for name in ("rows", "chunks", "appends", "releases")))


class StepBuffers:
    """Inputs of a rank's steps: at most `prefill` chunk tokens, and sequences up to the largest of `sizes` that decode, each with
    at most `widest` tokens.

    frequencies  fp32 [pairs] of each rotary embedding of the model
    """

    def __init__(
        self, slots: SlotState, frequencies: Mapping[RopeKey, Tensor], prefill: int, sizes: tuple[int, ...], widest: int = 1
    ) -> None:
        device, self._most = slots.device, sizes[-1]
        self._slots, self._frequencies, self.sizes = slots, frequencies, sizes
        rows = prefill + self._most * widest
        self.ids, self.positions, self.slots = torch.zeros((3, rows), dtype=torch.int32, device=device).unbind()
        self._pages = tuple(
            torch.zeros((self._most, cache.read_width), dtype=torch.int32, device=device) for cache in slots.cache
        )
        self._rope = {
            key: torch.zeros((rows, 2 * len(frequency)), dtype=torch.float32, device=device)
            for key, frequency in frequencies.items()
        }
        capacity = HEADER + 64 * self._most + prefill + 1024  # of a usual step; a larger plan gets memory of its own
        self.plan = torch.zeros(capacity, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staging = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(DEPTH + 1)]
        self._turn = 0

    def bucket(self, decodes: int) -> int:
        """The rows that `decodes` decode rows are padded to."""
        return self.sizes[bisect.bisect_left(self.sizes, decodes)]

    def upload(self, plan: PlanView) -> Tensor:
        """The plan on the device: in `self.plan`, or in memory of its own if it is larger."""
        size = len(plan.fixed)
        if size > len(self.plan):
            return torch.from_numpy(_unique_appends(plan)).to(self.plan.device)
        self._turn = (self._turn + 1) % len(self._staging)
        staging = self._staging[self._turn][:size]
        staging.numpy()[:] = _unique_appends(plan) if plan.admissions else plan.fixed
        self.plan[:size].copy_(staging, non_blocking=True)
        return self.plan

    def apply(self, plan: Tensor) -> None:
        """Apply an uploaded plan to page tables and lengths."""
        apply_plan(plan, LAYOUT, [cache.table for cache in self._slots.cache], self._slots.lengths)

    def decodes(self, plan: Tensor, sequences: int, first: int = 0, width: int = 1) -> ForwardBatch:
        """The plan's decode rows, padded to so many sequences of `width` tokens, behind `first` chunk rows; lengths advance by one.
        Needs nothing from the host."""
        end = first + sequences * width
        ids, positions, slots = (x[first:end] for x in (self.ids, self.positions, self.slots))
        tokens, lengths = self._slots.tokens, self._slots.lengths
        decode_inputs(plan, LAYOUT, tokens, lengths, self._slots.padding, ids, positions, slots, width)
        pages = self._gathered(slots, positions, sequences)
        return ForwardBatch(ids, positions, slots, self._rotary_rows(first, end), pages, width=width)

    def drafting(self, slots: Tensor, positions: Tensor, turned: Tensor) -> ForwardBatch:
        """Rows at `positions` int32 [n] of `slots`, whose queries are turned as at positions `turned`: a drafter's."""
        pages = self._gathered(slots, positions, len(slots))
        rope = {key: table[: len(slots)] for key, table in self._rope.items()}
        for key, table in rope.items():
            rotary_table(turned, self._frequencies[key], table)
        return ForwardBatch(slots, positions, slots, rope, pages)

    def mixed(self, plan: PlanView, device_plan: Tensor, width: int = 1) -> ForwardBatch:
        """Chunk rows, then the decode rows without padding; `logit_rows` are the plan's result rows, `width` of each."""
        chunks = _chunks(plan)
        size, count = chunk_rows(chunks), len(plan.rows) * width
        pages: tuple[Tensor, ...] = ()
        if count:
            pages = self.decodes(device_plan, len(plan.rows), size, width).pages
        else:
            pages = tuple(page_ids[:0] for page_ids in self._pages)
        host = np.zeros((2, size), np.int64)
        for chunk in chunks:
            rows = slice(chunk.offset, chunk.offset + chunk.size)
            host[0, rows], host[1, rows] = chunk.slot, np.arange(chunk.start, chunk.end)
        sampling = (plan.chunks[:, 3] < plan.chunks[:, 2]).tolist()
        ends = np.repeat([chunk.offset + chunk.size - 1 for chunk, samples in zip(chunks, sampling, strict=True) if samples], width)
        packed = torch.from_numpy(np.concatenate([host.ravel(), ends, np.arange(size, size + count)]).astype(np.int64))
        packed = uploaded(packed, self.plan.device)
        slots, positions = packed[:size], packed[size : 2 * size]
        self.slots[:size], self.positions[:size] = slots, positions
        self.ids[:size] = self._slots.tokens[slots, positions]
        total = size + count
        return ForwardBatch(
            self.ids[:total], self.positions[:total], self.slots[:total],
            self._rotary_rows(0, total), pages, packed[2 * size :], tuple(chunks), width,
        )  # fmt: skip

    def _gathered(self, slots: Tensor, positions: Tensor, sequences: int) -> tuple[Tensor, ...]:
        """The page ids that each of the rows' sequences reads, of each KV group."""
        pages = tuple(page_ids[:sequences] for page_ids in self._pages)
        for cache, page_ids in zip(self._slots.cache, pages, strict=True):
            cache.gather(slots, positions, page_ids)
        return pages

    def _rotary_rows(self, first: int, last: int) -> dict[RopeKey, Tensor]:
        """Cos and sin of rows [first, last)."""
        rope = {key: table[first:last] for key, table in self._rope.items()}
        for key, table in rope.items():
            rotary_table(self.positions[first:last], self._frequencies[key], table)
        return rope


def _chunks(plan: PlanView) -> list[Chunk]:
    """The plan's chunks, with the offsets of their rows and their spans."""
    chunks: list[Chunk] = []
    for slot, start, end, _, first, count in plan.chunks.tolist():
        spans = tuple(map(tuple, plan.spans[first : first + count].tolist()))
        chunks.append(Chunk(slot, start, end, chunk_rows(chunks), spans))
    return chunks


def _unique_appends(plan: PlanView) -> np.ndarray:
    """The plan's fixed sections, in which each table entry is appended once: earlier appends to it get group -1.

    Only a slot that changes its sequence within a plan has such appends.
    """
    fixed = plan.fixed.copy()
    first = HEADER + plan.rows.size + plan.chunks.size
    appends = fixed[first : first + plan.appends.size].reshape(plan.appends.shape)
    assert fixed[COUNTS + 2] == len(appends), (fixed[:HEADER], len(appends))
    last = {tuple(entry): at for at, entry in enumerate(appends[:, :3].tolist())}
    appends[np.setdiff1d(np.arange(len(appends)), list(last.values())), 0] = -1
    return fixed
