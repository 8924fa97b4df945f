"""Reduce-scatter, norms of own rows and all-gather of a step with many prompt tokens, by copy engines beside the products.

    row-parallel product      part [T, n] of every rank      each rank's share of the rows is copied to that rank
    norm of own rows          sum, norm, residual, next norm                                      x is copied to all other ranks
    column-parallel product   x [T, n]

The rows are cut into two pieces: one is copied while the other is computed. Copies to other GPUs need no multiprocessors, of which
a product leaves none to a kernel beside it. Behind the copies a number goes to a flag at the receiver, where a kernel waits for it.

One buffer each for parts and for x is enough: a rank sends a piece's next part when it has x of all ranks, who sent theirs once
they had read the parts; and its next x when it has the next parts, whose senders have read x.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.fused_allreduce_norm import Norms, hidden, normed, polled, row_warps
from kernels.launch import cdiv, configured, enabled, launch, next_power_of_2, trigger, wait
from kernels.norm import norm_add, rms_norm

FIRST = 11 / 16  # of the rows are in the first piece: products of it and of the rest have no more waves than of all rows
BLOCK = 128  # rows of a product's tile
NORM_ROWS = 1280  # rows: their copies begin when they are normed, beside the norms of the next
_NUMBERS = 1 << 10
_PARTS, _X = 0, 1


@dataclass(frozen=True)
class ScatteredPart:
    """A row-parallel product [T, n] whose rows are on their way to the ranks that add and norm them."""

    rows: Tensor


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

    def whole(self) -> Tensor:
        """All rows, once the device has them; they hold until the next forward."""
        list(self.pieces())
        return self.rows


class _Copy(NamedTuple):
    """To one other rank: this rank's part of those `rows` that it owns, and this rank's own rows of x; a flag behind each."""

    rows: slice
    part: Tensor
    x: Tensor
    part_flag: Tensor
    x_flag: Tensor


class SequenceParallel:
    """One rank's end, for forwards of so many `rows` of `width` elements.

    memories  uint8 [`bytes(...)`] of each rank, which all can write;  errors  int32 [2], as `AllReduceInbox` has it
    """

    def __init__(self, memories: Sequence[Tensor], rank: int, rows: range, width: int, dtype: torch.dtype, errors: Tensor) -> None:
        self.rank, self.size, self.rows, self._errors = rank, len(memories), rows, errors
        x, flags = rows[-1] * width * dtype.itemsize, 16 * (self.size - 1)
        self._x = [memory[:x].view(dtype).view(-1, width) for memory in memories]
        self._parts = [memory[x:-flags].view(dtype).view(-1, width) for memory in memories]
        self._flags = [memory[-flags:].view(torch.int32).view(2, 2, self.size - 1) for memory in memories]
        self.width, self.device = width, memories[rank].device
        self._flags[rank].fill_(-1)
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int32, device=self.device).split(1)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._number = 0
        self.pieces: tuple[slice, ...] = ()
        self._copies: list[list[_Copy]] = []  # of each piece

    @staticmethod
    def bytes(size: int, rows: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of one rank's memory, for up to so many rows: x, their parts of every other rank, flags."""
        return (rows + (size - 1) * (rows // size + 2)) * width * dtype.itemsize + 16 * (size - 1)

    def begin(self, rows: int) -> "SequenceParallel":
        """A forward of so many rows begins."""
        first = max(self.size, int(rows * FIRST) // BLOCK * BLOCK)
        self.pieces = slice(0, first), slice(first, rows)
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]  # no two ranks copy to the same one first
        self._copies = [[self._copy(piece, peer) for peer in peers] for piece in range(len(self.pieces))]
        return self

    def _copy(self, piece: int, peer: int) -> _Copy:
        slot = self.rank - (self.rank > peer)  # of this rank, among the others of `peer`
        parts, flags = self._parts_of(peer, piece)[slot], self._flags[peer][:, piece, slot : slot + 1].unbind()
        return _Copy(self.own(piece, peer), parts, self._x[peer], *flags)

    def own(self, piece: int, rank: int) -> slice:
        """Rows of a piece, as rows of all, that `rank` adds and norms."""
        first, count = self.pieces[piece].start, self.pieces[piece].stop - self.pieces[piece].start
        return slice(first + count * rank // self.size, first + count * (rank + 1) // self.size)

    def _parts_of(self, owner: int, piece: int) -> Tensor:
        """[size - 1, own rows, n]: every other rank's part of the owner's rows."""
        own, others = self.own(piece, owner), self.size - 1
        count, first = own.stop - own.start, piece * others * cdiv(self.pieces[0].stop, self.size)
        return self._parts[owner][first : first + others * count].view(others, count, -1)

    def scatter(self, part: Tensor, piece: int) -> None:
        """Begin to copy this rank's part [T, n], computed up to the end of a piece, to the piece's other owners."""
        with self._beside():
            for copy in self._copies[piece]:
                copy.part.copy_(part[copy.rows], non_blocking=True)
                copy.part_flag.copy_(self._numbers[self._number], non_blocking=True)
        if self._stream is not None:
            part.record_stream(self._stream)

    def norm(
        self, part: ScatteredPart, residual: Tensor, norms: Norms, eps: float, scalar: Tensor | None
    ) -> tuple[Tensor, GatheredRows]:
        """Adds the parts of own rows in rank order, as `fused_allreduce_norm` does, once they have come -> (h [T, n], of which own
        rows are written, x). residual [T, n], of which own rows are read."""
        h, x, number = torch.empty_like(residual), self._x[self.rank], self._numbers[self._number]
        for piece, copies in enumerate(self._copies):
            own, parts = self.own(piece, self.rank), self._parts_of(self.rank, piece)
            self.wait_for(_PARTS, piece, self._number)
            for first in range(own.start, own.stop, NORM_ROWS):
                rows = slice(first, min(first + NORM_ROWS, own.stop))
                others = parts[:, rows.start - own.start : rows.stop - own.start]
                sum_norm(part.rows[rows], others, self.rank, residual[rows], norms, eps, scalar, h[rows], x[rows])
                with self._beside():
                    for copy in copies:
                        copy.x[rows].copy_(x[rows], non_blocking=True)
                        if rows.stop == own.stop:
                            copy.x_flag.copy_(number, non_blocking=True)
        gathered = GatheredRows(x[: len(h)], self, self._number)
        self._number = (self._number + 1) % _NUMBERS
        return h, gathered

    def wait_for(self, what: int, piece: int, number: int) -> None:
        """Let what follows on the current stream wait for every other rank's copy of that number."""
        others = self.size - 1
        wait_kernel = configured(_wait_for, warps=1, SIZE=others, BLOCK=next_power_of_2(others))
        launch(wait_kernel, (1,), self._flags[self.rank][what, piece], self._errors, number)

    def _beside(self) -> torch.cuda.StreamContext | nullcontext[None]:
        """The stream of copies, behind what the current one holds by now."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


def sum_norm(
    own: Tensor, others: Tensor, rank: int, residual: Tensor, norms: Norms, eps: float, scalar: Tensor | None, h: Tensor, x: Tensor
) -> None:
    """own [T, n] and others [size - 1, T, n], parts in rank order but for `rank`'s own -> h, x [T, n]."""
    assert norms.post is not None
    assert norms.next_norm is not None
    if not enabled(own):
        total = torch.cat([others[:rank], own[None], others[rank:]]).float().sum(0).to(own.dtype)
        h.copy_(norm_add(residual, total, norms.post, eps, scalar))
        x.copy_(rms_norm(h, norms.next_norm, eps))
        return
    n = own.shape[1]
    kernel = configured(_norm_own, warps=row_warps(n, own.dtype), N=n, SIZE=len(others) + 1, BLOCK=next_power_of_2(n))
    args = own, others, residual, norms.post, norms.next_norm, scalar, h, x, rank, others.stride(0), eps
    launch(kernel, (len(own),), *args)


@triton.jit(do_not_specialize=["rank", "stride"])
def _norm_own(
    own, others, residual, post, next_norm, scalar, h_out, x_out, rank, stride, eps,
    N: constexpr, SIZE: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    dtype: constexpr = h_out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * N
    lane = tl.arange(0, BLOCK)
    live = lane < N
    post_weight, next_weight = tl.load(post + lane, live, 0.0), tl.load(next_norm + lane, live, 0.0)
    factor = None if scalar is None else tl.load(scalar).to(tl.float32)
    wait(PDL)
    trigger(PDL)
    before = tl.load(residual + row + lane, live, 0.0)
    mine = tl.load(own + row + lane, live, 0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SIZE):
        slot = i - (i > rank).to(tl.int64)
        total += tl.where(i == rank, mine, tl.load(others + slot * stride + row + lane, live & (i != rank), 0.0).to(tl.float32))
    h = hidden(total.to(dtype).to(tl.float32), post_weight, before, factor, 1.0, N, eps, dtype)
    tl.store(h_out + row + lane, h.to(dtype), live)
    tl.store(x_out + row + lane, normed(h, next_weight, N, eps, dtype).to(dtype), live)


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
