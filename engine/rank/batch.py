"""What one step computes, as the model sees it: flat token rows, prefill chunks first, then decode rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """A prefill chunk: positions [start, end) of `slot`, at batch rows [offset, offset + end - start).

    spans: positions [first, last) of an image, whose tokens attend to each other both ways in sliding layers.
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
    """Returns the batch rows of `chunks`, which are in row order: the first row after them."""
    return chunks[-1].offset + chunks[-1].size if chunks else 0


def last_seen_of(chunks: Sequence[Chunk], device: torch.device) -> Tensor | None:
    """Returns `ForwardBatch.last_seen` of chunks; None where they have no spans: each row sees up to itself."""
    if not any(chunk.spans for chunk in chunks):
        return None
    seen = torch.full((chunk_rows(chunks),), -1, dtype=torch.int32)
    for chunk in chunks:
        row = chunk.offset - chunk.start  # of position 0
        for first, last in chunk.spans:
            seen[row + first : row + last] = last - 1
    return uploaded(seen, device)


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of a batch that attention takes at once, its prefill chunks or its decode rows: views of the batch.

    rows    of the batch
    width   of decode rows: queries of a sequence, in consecutive rows
    pages   of decode rows, as in the batch;   chunks, chunk_list, last_seen  of prefill chunks, as there
    """

    kind: RowKind
    rows: slice
    slots: Tensor
    positions: Tensor
    rope: RopeTensors
    width: int = 1
    pages: PageIds = ()
    chunks: tuple[Chunk, ...] = ()
    chunk_list: Tensor | None = None
    last_seen: Tensor | None = None


@dataclass(frozen=True)
class SoftTokens:
    """rows int64 [n] of a batch whose embeddings are not the table's but values [n, hidden], unscaled."""

    rows: Tensor
    values: Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """One step's inputs; complete when built, read-only after. T rows: chunk tokens, then decode rows, padding rows last.

    ids       int32 [T]  input token ids
    positions int32 [T]  0-based; -1: a padding row, which writes nothing
    slots     int32 [T]  the slot (row of every page table) each token belongs to
    rope      fp32 [T, 2 * pairs] of each rotary embedding of the model: cos, then sin, of every row's position
    pages     int32 [sequences, entries] of each KV group: the page ids that decode rows read (`kernels.slots.gather_pages`)
    logit_rows int64 [R] rows of [0, T) whose logits are wanted, ascending; None: all rows
    prompts              rows of prefill chunks, padded
    chunk_list int32 [n, 4] those chunks (`kernels.chunks`);   chunks  the same on the host, in row order; none in a graph
    last_seen int32 [prompts] the last position that a row of the chunks sees where tokens of an image see each other both ways; one
                         below its own: it sees up to itself. None: as `chunks` say
    width                decode rows of a sequence
    soft                 what encoders put into rows of the chunks; None: nothing
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rope: RopeTensors
    pages: PageIds
    logit_rows: Tensor | None = None
    chunks: tuple[Chunk, ...] = ()
    width: int = 1
    prompts: int = 0
    chunk_list: Tensor | None = None
    last_seen: Tensor | None = None
    soft: SoftTokens | None = None

    @property
    def rows(self) -> int:
        """How many rows there are, T."""
        return self.ids.shape[0]

    @cached_property
    def blocks(self) -> tuple[RowBlock, ...]:
        """The rows by kind, in order; sliced once a step, not in every layer."""
        blocks, first = [], self.prompts
        extend, decode = slice(0, first), slice(first, self.rows)
        if first:
            inputs, seen = self.row_inputs(extend), self.last_seen
            seen = last_seen_of(self.chunks, self.ids.device) if seen is None else seen
            blocks.append(RowBlock("extend", extend, *inputs, 1, (), self.chunks, self.chunk_list, seen))
        if first < self.rows:
            blocks.append(RowBlock("decode", decode, *self.row_inputs(decode), self.width, self.pages))
        return tuple(blocks)

    def row_inputs(self, rows: slice | Tensor) -> tuple[Tensor, Tensor, RopeTensors]:
        """Returns slots, positions and rotary embeddings of some rows."""
        return self.slots[rows], self.positions[rows], {key: table[rows] for key, table in self.rope.items()}


def frequencies_of(layers: Iterable[Layer], device: torch.device) -> RopeTensors:
    """Returns fp32 [pairs] of each rotary embedding of the layers."""
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
    """Make a batch in memory of its own, from ids, slots and positions int [T] on the cache's device; rows after the chunks
    decode."""
    ids, slots, positions = ids.int(), slots.int(), positions.int()
    first = chunk_rows(chunks)
    pages = cache.gather(slots[first:], positions[first:], cache.page_rows(len(ids) - first))
    rope = {}
    for key, frequency in frequencies.items():
        rope[key] = ids.new_empty((len(ids), 2 * len(frequency)), dtype=torch.float32)
        rotary_table(positions, frequency, rope[key])
    rows = [(chunk.slot, chunk.offset, chunk.start, chunk.size) for chunk in chunks]
    chunk_list = uploaded(torch.tensor(rows, dtype=torch.int32).view(-1, 4), ids.device)
    return ForwardBatch(ids, positions, slots, rope, pages, chunks=chunks, prompts=first, chunk_list=chunk_list)
