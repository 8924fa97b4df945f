"""Reduce-scatter, norms of own rows and all-gather of a step with many prompt tokens, by copy engines beside the products.

    row-parallel product      part [T, n] of every rank      each rank's share of the rows is copied to that rank
    fused norm of own rows    sum, norm, residual, next norm (kernels.fused_allreduce_norm)       x is copied to all ranks
    column-parallel product   x [T, n]

The rows are cut into two pieces: one is copied while the other is computed. Copies need no multiprocessors, of which a product
leaves none to a kernel beside it. Behind each copy its number goes to a flag at the receiver, where a kernel waits for it.

One buffer each for parts and for x is enough: a rank sends a piece's next part when it has x of all ranks, who sent theirs once
they had read the parts; and its next x when it has the next parts, whose senders have read x.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.fused_allreduce_norm import Norms, fused_allreduce_norm, polled
from kernels.launch import launch, next_power_of_2, wait

FIRST = 11 / 16  # of the rows are in the first piece: products of it and of the rest have no more waves than of all rows
BLOCK = 128  # rows of a product's tile
_NUMBERS = 1 << 16
_PARTS, _X = 0, 1


@dataclass(frozen=True)
class ScatteredPart:
    """A row-parallel product [T, n] whose rows are on their way to the ranks that add and norm them."""


@dataclass(frozen=True)
class GatheredRows:
    """x [T, n] whose pieces are on their way from the ranks that normed them."""

    rows: Tensor
    group: "SequenceParallel"
    number: int

    def pieces(self) -> Iterator[slice]:
        """Yields each piece once the device has it."""
        for piece, rows in enumerate(self.group.pieces):
            self.group.wait_for(_X, piece, self.number)
            yield rows


class SequenceParallel:
    """One rank's end, for forwards of up to `rows` rows of `width` elements.

    memories  uint8 [`bytes(...)`] of each rank, which all can write;  errors  int32 [2], as `AllReduceInbox` has it
    """

    def __init__(self, memories: Sequence[Tensor], rank: int, rows: int, width: int, dtype: torch.dtype, errors: Tensor) -> None:
        self.rank, self.size, self.rows, self._errors = rank, len(memories), rows, errors
        parts, x = (rows + 2 * self.size) * width * dtype.itemsize, rows * width * dtype.itemsize
        self._parts = [memory[:parts].view(dtype).view(-1, width) for memory in memories]
        self._x = [memory[parts : parts + x].view(dtype).view(rows, width) for memory in memories]
        self._flags = [memory[parts + x :].view(torch.int32).view(2, 2, self.size) for memory in memories]
        device = memories[rank].device
        self._flags[rank].fill_(-1)
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._number = 0
        self.pieces: tuple[slice, ...] = ()

    @staticmethod
    def bytes(size: int, rows: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of one rank's memory: its rows' parts of every rank, x, flags."""
        return 2 * (rows + size) * width * dtype.itemsize + 16 * size

    def begin(self, rows: int) -> "SequenceParallel":
        """A forward of so many rows begins."""
        first = max(self.size, int(rows * FIRST) // BLOCK * BLOCK)
        self.pieces = slice(0, first), slice(first, rows)
        return self

    def own(self, piece: int, rank: int) -> slice:
        """Rows of a piece, as rows of all, that `rank` adds and norms."""
        first, count = self.pieces[piece].start, self.pieces[piece].stop - self.pieces[piece].start
        return slice(first + count * rank // self.size, first + count * (rank + 1) // self.size)

    def scatter(self, part: Tensor, piece: int) -> None:
        """Begin to copy this rank's part [T, n], computed up to the end of a piece, to the piece's owners."""
        with self._beside(part):
            for owner in self._from_next():
                self._parts_of(owner, piece)[self.rank].copy_(part[self.own(piece, owner)], non_blocking=True)
                self._raise_flag(owner, _PARTS, piece)

    def norm(self, residual: Tensor, norms: Norms, eps: float, scalar: Tensor | None) -> tuple[Tensor, GatheredRows]:
        """Adds the parts of own rows, as `fused_allreduce_norm` does, once they have come -> (h [T, n], of which own rows are
        written, x). residual [T, n], of which own rows are read."""
        h = torch.empty_like(residual)
        for piece in range(len(self.pieces)):
            own = self.own(piece, self.rank)
            self.wait_for(_PARTS, piece, self._number)
            _, x = fused_allreduce_norm(self._parts_of(self.rank, piece), residual[own], norms, eps, scalar, h=h[own])
            assert x is not None, "rows that are gathered are normed"
            with self._beside(x):
                for peer in self._from_next():
                    self._x[peer][own].copy_(x, non_blocking=True)
                    self._raise_flag(peer, _X, piece)
        gathered = GatheredRows(self._x[self.rank][: len(h)], self, self._number)
        self._number = (self._number + 1) % _NUMBERS
        return h, gathered

    def wait_for(self, what: int, piece: int, number: int) -> None:
        """Let what follows on the current stream wait for every rank's copy of that number."""
        launch(_wait_for, (1,), self._flags[self.rank][what, piece], self._errors, number, SIZE=self.size,
               BLOCK=next_power_of_2(self.size), warps=1)  # fmt: skip

    def _from_next(self) -> Iterator[int]:
        """All ranks, beginning with the next one: no two ranks copy to the same one first."""
        return ((self.rank + 1 + i) % self.size for i in range(self.size))

    def _parts_of(self, owner: int, piece: int) -> Tensor:
        """[size, own rows, n]: every rank's part of the owner's rows."""
        own = self.own(piece, owner)
        count, first = own.stop - own.start, self.pieces[piece].start + piece * self.size
        return self._parts[owner][first : first + self.size * count].view(self.size, count, -1)

    def _raise_flag(self, peer: int, what: int, piece: int) -> None:
        flag = self._flags[peer][what, piece, self.rank : self.rank + 1]
        flag.copy_(self._numbers[self._number : self._number + 1], non_blocking=True)

    def _beside(self, copied: Tensor) -> torch.cuda.StreamContext | nullcontext[None]:
        """The stream of copies, behind what the current one holds by now; `copied` is read there."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        copied.record_stream(self._stream)
        return torch.cuda.stream(self._stream)


@triton.jit(do_not_specialize=["number"])
def _wait_for(flags, errors, number, SIZE: constexpr, BLOCK: constexpr, PDL: constexpr):
    wait(PDL)
    lane = tl.arange(0, BLOCK)
    missing, polls, deadline = 1, 0, tl.full((), 0, tl.int64)
    while (missing > 0) & (deadline >= 0):
        come = tl.load(flags + lane, lane < SIZE, number, volatile=True)
        missing = tl.max((come != number).to(tl.int32), 0)
        polls, deadline = polled(polls, deadline, errors)
    if missing > 0:
        tl.store(errors, 1)
