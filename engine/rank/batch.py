"""What one step computes, as the model sees it: flat token rows, prefill chunks first, then decode rows."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """A prefill chunk: positions [start, end) of `slot`, at batch rows [offset, offset + end - start)."""

    slot: int
    start: int
    end: int
    offset: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ForwardBatch:
    """One step's inputs; complete when built, read-only after. T tokens = chunk tokens, then one token per decode row.

    ids       int64 [T]  input token ids
    positions int64 [T]  0-based
    slots     int64 [T]  the slot (row of every page table) each token belongs to
    logit_rows int64 [R] rows of [0, T) whose logits are wanted, ascending
    chunks               host facts of the prefill chunks, in row order
    decode_bounds        host upper bound of each decode row's length, its own token included (position + 1)
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    chunks: tuple[Chunk, ...]
    decode_bounds: tuple[int, ...]

    @property
    def decode_start(self) -> int:
        """First decode row."""
        return self.ids.shape[0] - len(self.decode_bounds)
