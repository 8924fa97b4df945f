"""Reduce-scatter, norms of own rows and all-gather of a step with many prompt tokens, by copy engines during products.

Each piece of rows goes through all products up to the next sum before the next piece starts:

    products  | 0    | 1    | norm 0 | 2    | norm 1 | next 0 | norm 2 | next 1 | ...
    copies           | part 0 | part 1 | x 0 | part 2 | x 1    | x 2    | part 0 ...

After each copy a number goes to a flag at the receiver, where a kernel waits for it. One buffer each is enough: a rank sends the
next part of a piece after all x of the piece, and the next x after the next parts. Numbers count a forward's sums, at least two,
so a CUDA graph can hold them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.fused_allreduce_norm import Norms, hidden, normed, polled, row_warps
from kernels.launch import cdiv, enabled, launch, next_power_of_2, trigger, wait
from kernels.norm import norm_add, rms_norm

# Where pieces but the last end, among all rows: their products have hardly more waves than products of all. Two ranks copy half as
# much for as much work, which two pieces hide; the first one of so many rows at least.
ENDS_OF_TWO = {6144: 11 / 16, 3072: 5 / 8, 0: 1 / 2}
ENDS = (3 / 16, 9 / 16)
BLOCK = 128  # rows of a product's tile
_NUMBERS = 1 << 10  # sums of a forward, at most
_FLAG_BYTES = 1024  # for up to 43 ranks: kernels write 16 bytes at once to what follows, the other inboxes too
_PARTS = 0
_X = 1
Pieces = Iterator[Tensor]  # of rows, each computed when it is taken


@dataclass(frozen=True)
class GatheredRows:
    rows: Tensor
    group: "SequenceParallel"
    number: int
    norm_last: Callable[[], None]  # norms this rank's rows of the last piece
    sent: Sequence[Tensor]  # keeps copies alive until the others have sent x

    def pieces(self) -> Pieces:
        """Call it once."""
        for index, rows in enumerate(self.group.cut(self.rows)):
            if index == len(self.group.pieces) - 2:
                self.norm_last()
            self.group.wait_for(_X, index, self.number)
            yield rows

    def whole(self) -> Tensor:
        """All rows, once they and this rank's copies are done; valid until the next forward."""
        list(self.pieces())
        self.group.join()
        return self.rows


class _Copy(NamedTuple):
    rows: slice
    part: Tensor  # this rank's, of the other's `rows` of a piece
    x: Tensor  # this rank's rows
    part_flag: Tensor
    x_flag: Tensor


class _Piece(NamedTuple):
    rows: slice
    own: slice  # rows that this rank norms
    parts: Tensor  # [size - 1, own rows, n], of other ranks
    x: Tensor  # own rows
    copies: list[_Copy]  # one for each other rank


class SequenceParallel:
    """One rank's end, for forwards of at most `rows` rows of `width` elements.

    memories  uint8 [`bytes(...)`] of each rank, writable by all;  errors  int32 [2], as in `AllReduceInbox`
    """

    def __init__(self, memories: Sequence[Tensor], rank: int, rows: range, width: int, dtype: torch.dtype, errors: Tensor) -> None:
        self.rank = rank
        self.size = len(memories)
        self.rows = rows
        self.width = width
        self.device = memories[rank].device
        self._errors = errors
        self._flags, self._x, self._parts = zip(*(self._cut(memory, dtype) for memory in memories), strict=True)
        self._flags[rank].fill_(-1)
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int32, device=self.device).split(1)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._number = 0
        self.pieces: list[_Piece] = []

    @staticmethod
    def bytes(size: int, rows: int, width: int, dtype: torch.dtype) -> int:
        return _FLAG_BYTES + (rows + (size - 1) * (rows // size + 3)) * width * dtype.itemsize

    def _cut(self, memory: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """A rank's flags, rows of x and parts."""
        others = self.size - 1
        parts = _FLAG_BYTES + self.rows[-1] * self.width * dtype.itemsize
        flags = memory[: 24 * others].view(torch.int32).view(2, 3, others)
        x = memory[_FLAG_BYTES:parts].view(dtype).view(-1, self.width)
        return flags, x, memory[parts:].view(dtype).view(-1, self.width)

    def begin(self, rows: int) -> "SequenceParallel":
        self._number = 0
        unit = max(1, min(BLOCK, rows // 16))
        shares = [next(end for least, end in ENDS_OF_TWO.items() if rows >= least)] if self.size == 2 else ENDS
        ends = (0, *(int(rows * share) // unit * unit for share in shares), rows)
        cuts = [slice(start, end) for start, end in pairwise(ends)]
        ranks = [(self.rank + i) % self.size for i in range(1, self.size)]  # no two ranks copy to the same one first
        firsts = list(accumulate((cdiv(cut.stop - cut.start, self.size) * (self.size - 1) for cut in cuts), initial=0))
        self.pieces = []
        for index, (cut, first) in enumerate(zip(cuts, firsts, strict=False)):
            inside = self._own(cut, self.rank)
            own = slice(cut.start + inside.start, cut.start + inside.stop)
            copies = [self._copy(index, cut, own, first, peer) for peer in ranks]
            self.pieces.append(_Piece(cut, own, self._parts_of(self.rank, cut, first), self._x[self.rank][own], copies))
        return self

    def _own(self, rows: slice, rank: int) -> slice:
        count = rows.stop - rows.start
        return slice(count * rank // self.size, count * (rank + 1) // self.size)

    def _parts_of(self, owner: int, rows: slice, first: int) -> Tensor:
        """[size - 1, own rows, n]: other ranks' parts of the owner's rows of a piece, from row `first` on."""
        own = self._own(rows, owner)
        count = own.stop - own.start
        others = self.size - 1
        return self._parts[owner][first : first + others * count].view(others, count, self.width)

    def _copy(self, index: int, rows: slice, own: slice, first: int, peer: int) -> _Copy:
        slot = self.rank - (self.rank > peer)  # this rank's index among the other ranks of `peer`
        flags = self._flags[peer][:, index, slot : slot + 1].unbind()
        return _Copy(self._own(rows, peer), self._parts_of(peer, rows, first)[slot], self._x[peer][own], *flags)

    def cut(self, x: Tensor | Pieces) -> Pieces:
        return (x[piece.rows] for piece in self.pieces) if isinstance(x, Tensor) else x

    def scatter(self, part: Tensor, piece: int, number: int) -> None:
        self._send([(copy.part, part[copy.rows], copy.part_flag) for copy in self.pieces[piece].copies], number)

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _send(self, copies: list[tuple[Tensor, Tensor, Tensor]], number: int) -> None:
        """Copies (to, from, flag), after all work queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # stream None: the current stream
            for to, rows, flag in copies:
                to.copy_(rows, non_blocking=True)
                flag.copy_(self._numbers[number], non_blocking=True)

    def norm(
        self, part: Pieces, residual: Tensor, norms: Norms, eps: float, scalar: Tensor | None
    ) -> tuple[Tensor, GatheredRows]:
        """Sum and norm own rows of the parts [T, n] once they have come, as `fused_allreduce_norm` -> (h [T, n], own rows
        written; x).

        residual [T, n], own rows read.
        """
        h = torch.empty_like(residual)
        number = self._number
        sent = list[Tensor]()
        self._number += 1

        def norm(index: int) -> None:
            rows, own, parts, x, copies = self.pieces[index]
            self.wait_for(_PARTS, index, number)
            sum_norm(sent[index][self._own(rows, self.rank)], parts, self.rank, residual[own], norms, eps, scalar, h[own], x)
            self._send([(copy.x, x, copy.x_flag) for copy in copies], number)

        for index, rows in enumerate(part):
            self.scatter(rows, index, number)
            sent.append(rows)
            if index:
                norm(index - 1)
        return h, GatheredRows(self._x[self.rank][: len(h)], self, number, partial(norm, index), sent)

    def wait_for(self, what: int, piece: int, number: int) -> None:
        """The current stream waits for every other rank's copy with this number."""
        others = self.size - 1
        flags = self._flags[self.rank][what, piece]
        launch(_wait_for, (1,), flags, self._errors, number, SIZE=others, BLOCK=next_power_of_2(others), warps=1)


def sum_norm(
    own: Tensor, others: Tensor, rank: int, residual: Tensor, norms: Norms, eps: float, scalar: Tensor | None, h: Tensor, x: Tensor
) -> None:
    """own [T, n]; others [size - 1, T, n] in rank order -> h, x [T, n]; x is h without a next norm."""
    assert norms.post is not None
    if not enabled(own):
        total = torch.cat([others[:rank], own[None], others[rank:]]).float().sum(0).to(own.dtype)
        h.copy_(norm_add(residual, total, norms.post, eps, scalar))
        x.copy_(h if norms.next_norm is None else rms_norm(h, norms.next_norm, eps))
        return
    n = own.shape[1]
    launch(
        _norm_own, (len(own),), own, others, residual, norms.post, norms.next_norm, scalar, h, x, rank, others.stride(0), eps,
        N=n, SIZE=len(others) + 1, BLOCK=next_power_of_2(n), warps=row_warps(n, own.dtype),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "stride"])
def _norm_own(
    own, others, residual, post, next_norm, scalar, h_out, x_out, rank, stride, eps,
    N: constexpr, SIZE: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    dtype: constexpr = h_out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * N
    lane = tl.arange(0, BLOCK)
    live = lane < N
    post_weight = tl.load(post + lane, live, 0.0)
    next_weight = None if next_norm is None else tl.load(next_norm + lane, live)
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
    x = h if next_norm is None else normed(h, next_weight, N, eps, dtype)
    tl.store(x_out + row + lane, x.to(dtype), live)


@triton.jit(do_not_specialize=["number"])
def _wait_for(flags, errors, number, SIZE: constexpr, BLOCK: constexpr, PDL: constexpr):
    wait(PDL)
    lane = tl.arange(0, BLOCK)
    missing = 1
    polls = 0
    deadline = tl.full((), 0, tl.int64)
    while (missing > 0) & (deadline >= 0):
        come = tl.load(flags + lane, lane < SIZE, number, volatile=True)
        missing = tl.max((come != number).to(tl.int32), 0)
        polls, deadline = polled(polls, deadline, errors)
    if missing > 0:
        tl.store(errors, 1)
