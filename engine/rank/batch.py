"""A step's inputs as the model sees them: flat token rows, prefill chunks first, then decode rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from engine.attention.backend_entry import RowKind
from engine.geometry import Layer, Rope
from engine.protocol import Spans
from engine.rank.kv import KVCache, PageIds
from engine.rank.upload import uploaded
from kernels.qkv import inverse_frequencies
from kernels.slots import rotary_table

RopeTensors = Mapping[tuple[Rope, int], Tensor]  # of each rotary embedding and head size


@dataclass(frozen=True)
class Chunk:
    """Positions [start, end) of `slot`, at batch rows from `offset` on. spans: positions [first, last) that sliding layers attend
    bidirectionally.
    """

    slot: int
    start: int
    end: int
    offset: int
    spans: Spans = ()

    @property
    def size(self) -> int:
        return self.end - self.start


def chunk_rows(chunks: Sequence[Chunk]) -> int:
    """`chunks` are in row order."""
    if chunks:
        return chunks[-1].offset + chunks[-1].size
    return 0


def last_seen_of(chunks: Sequence[Chunk], device: torch.device) -> Tensor | None:
    if not any(chunk.spans for chunk in chunks):
        return None
    seen = torch.full((chunk_rows(chunks),), -1, dtype=torch.int32)
    for chunk in chunks:
        row = chunk.offset - chunk.start  # of position 0
        for first, last in chunk.spans:
            seen[row + first : row + last] = last - 1
    return uploaded(seen, device)


@dataclass(frozen=True)
class SoftTokens:
    """rows int64 [n] whose embeddings are replaced by values [n, hidden], unscaled."""

    rows: Tensor
    values: Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """Read-only. T rows: chunk tokens, then decode rows, padding rows last."""

    ids: Tensor  # int32 [T]  input token ids
    positions: Tensor  # int32 [T]  0-based; -1: a padding row, which writes nothing
    slots: Tensor  # int32 [T]  row of every page table
    rope: RopeTensors  # fp32 [T, 2 * pairs] of each rotary embedding: cos, then sin
    pages: PageIds  # int32 [sequences, entries] of each KV group: page ids of decode rows (`kernels.slots.gather_pages`)
    logit_rows: Tensor | None = None  # int64 [R] rows whose logits are wanted, ascending; None: all rows
    chunks: tuple[Chunk, ...] = ()  # on the host, in row order; empty in a graph
    width: int = 1  # decode rows of a sequence
    prompts: int = 0  # rows of prefill chunks, padded
    chunk_list: Tensor | None = None  # int32 [n, 4] those chunks (`kernels.chunks`)
    # int32 [prompts] last position that a row sees in its span; below its own: up to itself. None:
    # as `chunks` say
    last_seen: Tensor | None = None
    soft: SoftTokens | None = None  # outputs of encoders, or None
    adapters: Tensor | None = None  # int32 [T]  adapter of each row, -1 for none; None: no row has one

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def kind(self) -> RowKind:
        if self.prompts:
            return "extend"
        return "decode"

    @cached_property
    def blocks(self) -> "tuple[ForwardBatch, ...]":
        """The rows of chunks, then decode rows. Cut once a step, not in every layer."""
        blocks = []
        first = self.prompts
        if first:
            if self.last_seen is None:
                seen = last_seen_of(self.chunks, self.ids.device)
            else:
                seen = self.last_seen
            extend = self.of_rows(slice(0, first))
            blocks.append(replace(extend, chunks=self.chunks, prompts=first, chunk_list=self.chunk_list, last_seen=seen))
        if first < self.rows:
            decode = self.of_rows(slice(first, self.rows))
            blocks.append(replace(decode, pages=self.pages, width=self.width))
        return tuple(blocks)

    def of_rows(self, rows: slice | Tensor) -> "ForwardBatch":
        rope = {key: table[rows] for key, table in self.rope.items()}
        return ForwardBatch(self.ids[rows], self.positions[rows], self.slots[rows], rope, ())


def frequencies_of(layers: Iterable[Layer], device: torch.device) -> RopeTensors:
    keys = dict.fromkeys((layer.rope, layer.head_dim) for layer in layers)
    return {(rope, d): inverse_frequencies(rope.theta, rope.pairs, d, rope.factor).to(device) for rope, d in keys}


def eager_batch(
    cache: KVCache,
    frequencies: RopeTensors,
    ids: Tensor,
    slots: Tensor,
    positions: Tensor,
    chunks: tuple[Chunk, ...],
) -> ForwardBatch:
    """A batch in memory of its own. ids, slots and positions int [T]; rows after the chunks decode."""
    ids = ids.int()
    slots = slots.int()
    positions = positions.int()
    first = chunk_rows(chunks)
    pages = cache.gather(slots[first:], positions[first:], cache.page_rows(len(ids) - first))
    rope = {}
    for key, frequency in frequencies.items():
        rope[key] = ids.new_empty((len(ids), 2 * len(frequency)), dtype=torch.float32)
        rotary_table(positions, frequency, rope[key])
    rows = [(chunk.slot, chunk.offset, chunk.start, chunk.size) for chunk in chunks]
    chunk_list = uploaded(torch.tensor(rows, dtype=torch.int32).view(-1, 4), ids.device)
    return ForwardBatch(ids, positions, slots, rope, pages, chunks=chunks, prompts=first, chunk_list=chunk_list)
