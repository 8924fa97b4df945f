"""What one step computes, as the model sees it: flat token rows, prefill chunks first, then decode rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.geometry import Rope
from engine.rank.kv import KVCache
from kernels.slots import rotary_table

RopeKey = tuple[Rope, int]  # a rotary embedding and its head size


@dataclass(frozen=True)
class Chunk:
    """A prefill chunk: positions [start, end) of `slot`, at batch rows [offset, offset + end - start).

    spans: positions [first, last) of an image, whose tokens attend to each other both ways in sliding layers; none are planned yet.
    """

    slot: int
    start: int
    end: int
    offset: int
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def size(self) -> int:
        return self.end - self.start


def chunk_rows(chunks: Sequence[Chunk]) -> int:
    """Batch rows of `chunks`, which are in row order: the first row after them."""
    return chunks[-1].offset + chunks[-1].size if chunks else 0


@dataclass(frozen=True)
class RowPlaces:
    """Views of `ForwardBatch.slots`, `positions` and `rope` of one kind of rows."""

    slots: Tensor
    positions: Tensor
    rope: Mapping[RopeKey, Tensor]


@dataclass(frozen=True)
class ForwardBatch:
    """One step's inputs; complete when built, read-only after. T rows: chunk tokens, then decode rows, padding rows last.

    ids       int32 [T]  input token ids
    positions int32 [T]  0-based; -1: a padding row, which writes nothing
    slots     int32 [T]  the slot (row of every page table) each token belongs to
    rope      fp32 [T, 2 * pairs] of each rotary embedding of the model: cos, then sin, of every row's position
    pages     int32 [decode rows, width] of each KV group: the page ids that a decode row reads (`kernels.slots.gather_pages`)
    logit_rows int64 [R] rows of [0, T) whose logits are wanted, ascending; None: all rows
    chunks               host facts of the prefill chunks, in row order
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rope: Mapping[RopeKey, Tensor]
    pages: tuple[Tensor, ...]
    logit_rows: Tensor | None = None
    chunks: tuple[Chunk, ...] = ()

    @property
    def rows(self) -> int:
        """T."""
        return self.ids.shape[0]

    @cached_property
    def decode_start(self) -> int:
        """First decode row."""
        return chunk_rows(self.chunks)

    @cached_property
    def chunk_places(self) -> RowPlaces:
        """Views of the chunk rows; sliced once a step, not in every layer."""
        return self._places(slice(0, self.decode_start))

    @cached_property
    def decode_places(self) -> RowPlaces:
        """Views of the decode rows, likewise."""
        return self._places(slice(self.decode_start, self.rows))

    def _places(self, rows: slice) -> RowPlaces:
        return RowPlaces(self.slots[rows], self.positions[rows], {key: table[rows] for key, table in self.rope.items()})


def eager_batch(
    cache: KVCache,
    frequencies: Mapping[RopeKey, Tensor],
    ids: Tensor,
    slots: Tensor,
    positions: Tensor,
    chunks: tuple[Chunk, ...],
    logit_rows: Tensor | None = None,
) -> ForwardBatch:
    """A batch in memory of its own, from ids, slots and positions int [T] on the cache's device; rows after the chunks decode."""
    ids, slots, positions = ids.int(), slots.int(), positions.int()
    first = chunk_rows(chunks)
    pages = []
    for group in cache:
        pages.append(torch.zeros((len(ids) - first, group.read_width), dtype=torch.int32, device=ids.device))
        group.gather(slots[first:], positions[first:], pages[-1])
    rope = {}
    for key, frequency in frequencies.items():
        rope[key] = torch.empty((len(ids), 2 * len(frequency)), dtype=torch.float32, device=ids.device)
        rotary_table(positions, frequency, rope[key])
    return ForwardBatch(ids, positions, slots, rope, tuple(pages), logit_rows, chunks)
