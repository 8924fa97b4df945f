"""Low-rank products of rows that have adapters, added to the product of the model's own matrix.

    out_t += B_s,p A_s,p x_t       s = index_t, the adapter of row t; of -1 nothing is added; p: part of the outputs

Part p has the outputs [ends[p - 1], ends[p]) and an A of its own: q, k and v are one product of the model, and three of an adapter.
A's product is fp32; it is rounded to the matrices' dtype for B's, which is summed in fp32 and rounded with what it is added to.

Of many rows, and of experts, two kernels after the product:

    `_shrink` (rows, adapter among theirs, columns of A's product, share of n)     fp32 sums of each share
    `_expand` (rows, adapter among theirs, outputs)                                adds the shares, multiplies by B, adds to `out`

Of few rows the product's own kernel does both (`kernels.linear`). Its first CTAs are units of `shrink`; the others multiply by the
model's matrix meanwhile, wait until all units have ended, and add B's product to their sums. A GPU starts CTAs in their order, so
units that others wait for run or have run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import INTERPRET, cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.numerics import add_product, cast
from kernels.tiles import Tile

_ROWS = 16  # of a block
_SHARE = 768  # of the inner dimension, of a CTA of `_shrink`
_MOST_SHARES = 16
_TURN = 128  # of a share, at once
_OUTPUTS = 64  # of a CTA of `_expand`
_WIDTH = 16  # columns of A's product of a unit
_MOST_RANK = 128  # that the product's own kernel takes
_LAST = constexpr(0x7FFFFFFF)  # no adapter has this index


class LowRank(NamedTuple):
    """What adapters add to the product of x.

    x       [T, n], plain
    of_row  int32 [T], the adapter of each row
    a       [adapters, parts * r, n]
    b       [adapters, m, r]; its memory is [m, adapters, r], or of experts' adapters contiguous
    ends    of the parts' outputs, one to three
    done    int32 [1], 0: a word of this product alone
    """

    x: Tensor
    of_row: Tensor
    a: Tensor
    b: Tensor
    ends: tuple[int, ...]
    done: Tensor

    def fits(self, tile: Tile, *, gated: bool) -> bool:
        """Whether the product's own kernel, with this tile, adds it."""
        rank = self.b.shape[2]
        parts = len(self.ends) == 1 or gated or all(end % tile.bn == 0 for end in self.ends)
        return parts and rank <= _MOST_RANK and rank & (rank - 1) == 0 and self.b.transpose(0, 1).is_contiguous()

    def add(self, out: Tensor) -> None:
        """Add it to `out` [T, m] by kernels of its own."""
        add_lora(out, self.x, self.of_row, self.a, self.b, self.ends)

    @property
    def together(self) -> int:
        """How many adapters the kernel for several rows takes at once."""
        adapters, _, rank = self.b.shape
        return min(next_power_of_2(adapters), _MOST_RANK // rank)

    def launch(self, tile: Tile) -> "LowRankLaunch":
        """What the product's own kernel takes, with this tile."""
        check_contiguous(self.x, self.of_row, self.a)
        (rows, n), (adapters, m, r), parts = self.x.shape, self.b.shape, len(self.ends)
        assert self.ends[-1] == m, (self.ends, self.b.shape)
        assert self.a.shape == (adapters, parts * r, n), (self.a.shape, self.b.shape, n)
        shares, share = _shares(n)
        groups = min(tile.rows, rows, adapters) if tile.kind == "gemm" else 1
        units = cdiv(rows, tile.rows if tile.kind == "gemm" else 1) * groups * (parts * r // _WIDTH) * shares
        inner = torch.empty((shares, rows, parts * r), dtype=torch.float32, device=self.x.device)
        first, second = [*self.ends, m, m][:2]
        numbers = r, parts, adapters, share, shares, first, second
        return LowRankLaunch(units, (self.x, self.of_row, self.a, self.b, inner, self.done, groups, units), _constexprs(numbers))


class LowRankLaunch(NamedTuple):
    """units: CTAs before the product's; arguments and constexprs of the product's kernel."""

    units: int
    arguments: tuple[Any, ...]
    constexprs: dict[str, int]


def _constexprs(numbers: tuple[int, ...]) -> dict[str, int]:
    names = "RANK", "PARTS", "ADAPTERS", "SHARE", "SHARES", "FIRST", "SECOND"
    return dict(zip(names, numbers, strict=True))


NO_ADAPTERS = LowRankLaunch(0, (None,) * 6 + (0, 0), _constexprs((0,) * 7))


def add_lora(out: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor, ends: tuple[int, ...]) -> None:
    """out [T, m], x [T, n], index int32 [T], all contiguous; a, b and ends as in `LowRank`; r a multiple of 16."""
    check_contiguous(out, x, index, a)
    assert b.stride(2) == 1, b.stride()
    (rows, m), n, r = out.shape, x.shape[1], b.shape[2]
    parts = len(ends)
    assert ends[-1] == m == b.shape[1], (ends, out.shape, b.shape)
    assert a.shape[1:] == (parts * r, n), (a.shape, parts, r, n)
    assert x.shape[0] == index.shape[0] == rows, (x.shape, index.shape, rows)
    if rows == 0:
        return
    if not enabled(x):
        _reference(out, x, index, a, b, ends)
        return
    shares, share = _shares(n)
    blocks = cdiv(rows, _ROWS)
    groups = min(rows, _ROWS, a.shape[0])
    inner = torch.empty((shares, rows, parts * r), dtype=torch.float32, device=x.device)
    width = r & -r  # the largest power of 2 that divides it
    width = min(width, 64)
    launch(
        _shrink, (blocks * groups, parts * r // width, shares), x, a, index, inner, rows, groups,
        N=n, INNER=parts * r, WIDTH=width, SHARE=share, ROWS=_ROWS, TURN=_TURN,
    )  # fmt: skip
    bounds = [*ends, *[m] * (3 - parts)]
    widths = [end - start for start, end in zip([0, *bounds], bounds, strict=False)]
    grid = blocks * groups, sum(cdiv(width, _OUTPUTS) for width in widths)
    launch(
        _expand, grid, inner, b, index, out, rows, groups,
        M=m, RANK=r, OF_ADAPTER=b.stride(0), OF_OUTPUT=b.stride(1), INNER=parts * r, SHARES=shares, TURN=width,
        FIRST=bounds[0], SECOND=bounds[1], ROWS=_ROWS, OUTPUTS=_OUTPUTS,
    )  # fmt: skip


def _shares(n: int) -> tuple[int, int]:
    """How many shares the inner dimension has, and columns of one."""
    share = cdiv(cdiv(n, min(_MOST_SHARES, cdiv(n, _SHARE))), _TURN) * _TURN
    return cdiv(n, share), share


def _reference(out: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor, ends: Sequence[int]) -> None:
    r = b.shape[2]
    for adapter in index.unique().tolist():
        if adapter < 0:
            continue
        rows = torch.where(index == adapter)[0]
        inner = (x[rows].float() @ a[adapter].float().t()).to(b.dtype).float()
        for part, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            added = inner[:, part * r : (part + 1) * r] @ b[adapter, start:end].float().t()
            out[rows, start:end] = (out[rows, start:end].float() + added).to(out.dtype)


@triton.jit
def _adapter(index, number, LAST: constexpr):
    """The adapter of this `number` among those of the rows, in ascending order; LAST: they have fewer."""
    adapter = tl.min(tl.where(index >= 0, index, LAST), 0)
    for _ in range(number):
        adapter = tl.min(tl.where(index > adapter, index, LAST), 0)
    return adapter


@triton.jit
def _shrink_rows(
    x, a, inner, row, own, adapter, first, share, T,
    N: constexpr, INNER: constexpr, WIDTH: constexpr, SHARE: constexpr, TURN: constexpr,
):  # fmt: skip
    """The rows of `row` [ROWS] whose own adapter this is, times WIDTH rows of its A from `first` on, over a share of n."""
    mine = (own == adapter)[:, None]
    column = first + tl.arange(0, WIDTH)
    lane = tl.arange(0, TURN)
    rows = x + row.to(tl.int64)[:, None] * N
    base = a + (adapter.to(tl.int64) * INNER + column[:, None]) * N
    total = tl.zeros([row.shape[0], WIDTH], tl.float32)
    for k in range(0, SHARE, TURN):
        offset = share * SHARE + k + lane
        inside = (offset < N)[None, :]
        tile = tl.load(base + offset[None, :], inside, 0.0)
        values = tl.load(rows + offset[None, :], mine & inside, 0.0)
        total = add_product(values.to(tile.dtype), tile, total, False)
    tl.store(inner + (share.to(tl.int64) * T + row[:, None]) * INNER + column[None, :], total, mine)


@triton.jit
def _shrink_row(
    x, a, inner, row, adapter, first, share, T,
    N: constexpr, INNER: constexpr, WIDTH: constexpr, SHARE: constexpr, TURN: constexpr,
):  # fmt: skip
    """`_shrink_rows` of one row."""
    column = first + tl.arange(0, WIDTH)
    lane = tl.arange(0, TURN)
    base = a + (adapter.to(tl.int64) * INNER + column[:, None]) * N
    total = tl.zeros([WIDTH, TURN], tl.float32)
    for k in range(0, SHARE, TURN):
        offset = share * SHARE + k + lane
        inside = offset < N
        tile = tl.load(base + offset[None, :], inside[None, :], 0.0).to(tl.float32)
        total += tile * tl.load(x + row * N + offset, inside, 0.0).to(tl.float32)[None, :]
    tl.store(inner + (share * T + row) * INNER + column, tl.sum(total, 1))


@triton.jit
def shrink(
    unit, x, index, a, inner, done, groups, T,
    ROWS: constexpr, N: constexpr, RANK: constexpr, PARTS: constexpr, SHARE: constexpr, SHARES: constexpr,
):  # fmt: skip
    """A unit of A's product. ROWS: in a block of the product's kernel, each row alone where that is 0."""
    INNER: constexpr = PARTS * RANK
    CHUNKS: constexpr = INNER // 16
    share = unit % SHARES
    first = unit // SHARES % CHUNKS * 16
    of_rows = unit // (SHARES * CHUNKS)
    if ROWS == 0:
        adapter = tl.load(index + of_rows)
        if adapter >= 0:
            _shrink_row(x, a, inner, of_rows, adapter, first, share, T, N, INNER, 16, SHARE, 128)
    else:
        row = of_rows // groups * ROWS + tl.arange(0, ROWS)
        own = tl.load(index + row, row < T, -1)
        adapter = _adapter(own, of_rows % groups, _LAST)
        if adapter < _LAST:
            _shrink_rows(x, a, inner, row, own, adapter, first, share, T, N, INNER, 16, SHARE, 128)
    tl.debug_barrier()
    tl.atomic_add(done, 1, sem="release")


@triton.jit
def _ended(done):
    """How many units have ended; what they wrote is visible."""
    if INTERPRET:
        return tl.load(done)
    return tl.inline_asm_elementwise("ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [done], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for(done, units):
    """Until all units have ended."""
    ended = _ended(done)
    while ended < units:
        ended = _ended(done)


@triton.jit
def part_of(column, FIRST: constexpr, SECOND: constexpr):
    """The part of an output."""
    return (column >= FIRST).to(tl.int32) + (column >= SECOND).to(tl.int32)


@triton.jit
def expand_row(
    index, b, inner, row, column, part, T,
    M: constexpr, RANK: constexpr, PARTS: constexpr, ADAPTERS: constexpr, SHARES: constexpr,
):  # fmt: skip
    """B's product of a row: what is added to its outputs `column` [BN]."""
    adapter = tl.load(index + row)
    lane = tl.arange(0, RANK)
    values = tl.zeros([RANK], tl.float32)
    for share in tl.static_range(SHARES):
        values += tl.load(inner + (share * T + row) * (PARTS * RANK) + part * RANK + lane, adapter >= 0, 0.0, cache_modifier=".cg")
    inside = (column < M)[:, None] & (adapter >= 0)
    tile = tl.load(b + (column.to(tl.int64)[:, None] * ADAPTERS + adapter) * RANK + lane[None, :], inside, 0.0)
    return tl.sum(tile.to(tl.float32) * cast(values, b.dtype.element_ty).to(tl.float32)[None, :], 1)


@triton.jit
def expand_rows(
    total, index, b, inner, row, column, part, T,
    M: constexpr, RANK: constexpr, PARTS: constexpr, ADAPTERS: constexpr, TOGETHER: constexpr, SHARES: constexpr,
    SWAP: constexpr,
):  # fmt: skip
    """`total` [ROWS, BN], or with SWAP [BN, ROWS], and B's product of the rows. TOGETHER adapters are one matrix: a row's values
    stand in its own adapter's columns, with zeros in the others'."""
    COLUMNS: constexpr = TOGETHER * RANK
    own = tl.load(index + row, row < T, -1)
    lane = tl.arange(0, RANK)
    of_row = inner + row[:, None] * (PARTS * RANK) + part * RANK + lane[None, :]
    values = tl.zeros([row.shape[0], RANK], tl.float32)
    for share in tl.static_range(SHARES):
        values += tl.load(of_row + share * T * (PARTS * RANK), (own >= 0)[:, None], 0.0, cache_modifier=".cg")
    at = tl.arange(0, TOGETHER)
    wide = tl.arange(0, COLUMNS)
    of_output = b + column.to(tl.int64)[:, None] * (ADAPTERS * RANK)
    for first in range(0, ADAPTERS, TOGETHER):
        if tl.max(((own >= first) & (own < first + TOGETHER)).to(tl.int32), 0) > 0:
            spread = tl.where(own[:, None, None] == first + at[None, :, None], values[:, None, :], 0.0)
            inside = (column < M)[:, None] & (first * RANK + wide < ADAPTERS * RANK)[None, :]
            tile = tl.load(of_output + first * RANK + wide[None, :], inside, 0.0)
            spread = cast(tl.reshape(spread, [row.shape[0], COLUMNS]), tile.dtype)
            total = add_product(spread, tile, total, SWAP)
    return total


@triton.jit(do_not_specialize=["T", "groups"])
def _shrink(
    x, a, index, inner, T, groups,
    N: constexpr, INNER: constexpr, WIDTH: constexpr, SHARE: constexpr, ROWS: constexpr, TURN: constexpr, PDL: constexpr,
):  # fmt: skip
    """Up to ROWS rows times WIDTH rows of A, over SHARE of the inner dimension."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    own = tl.load(index + row, row < T, -1)
    adapter = _adapter(own, tl.program_id(0) % groups, _LAST)
    if adapter < _LAST:
        first = tl.program_id(1) * WIDTH
        _shrink_rows(x, a, inner, row, own, adapter, first, tl.program_id(2), T, N, INNER, WIDTH, SHARE, TURN)


@triton.jit(do_not_specialize=["T", "groups"])
def _expand(
    inner, b, index, out, T, groups,
    M: constexpr, RANK: constexpr, OF_ADAPTER: constexpr, OF_OUTPUT: constexpr, INNER: constexpr, SHARES: constexpr,
    TURN: constexpr, FIRST: constexpr, SECOND: constexpr, ROWS: constexpr, OUTPUTS: constexpr, PDL: constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one part, of up to ROWS rows."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    own = tl.load(index + row, row < T, -1)
    adapter = _adapter(own, tl.program_id(0) % groups, _LAST)
    if adapter < _LAST:
        mine = (own == adapter)[:, None]
        block = tl.program_id(1)
        BLOCKS_OF_FIRST: constexpr = (FIRST + OUTPUTS - 1) // OUTPUTS
        BLOCKS_OF_SECOND: constexpr = (SECOND - FIRST + OUTPUTS - 1) // OUTPUTS
        second = block >= BLOCKS_OF_FIRST
        third = block >= BLOCKS_OF_FIRST + BLOCKS_OF_SECOND
        part = second.to(tl.int32) + third.to(tl.int32)
        start = tl.where(third, SECOND, tl.where(second, FIRST, 0))
        end = tl.where(third, M, tl.where(second, SECOND, FIRST))
        before = tl.where(third, BLOCKS_OF_FIRST + BLOCKS_OF_SECOND, tl.where(second, BLOCKS_OF_FIRST, 0))
        column = start + (block - before) * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = column < end
        lane = tl.arange(0, TURN)
        at = out + row.to(tl.int64)[:, None] * M + column[None, :]
        changed = mine & inside[None, :]
        total = tl.load(at, changed, 0.0).to(tl.float32)
        for k in range(0, RANK, TURN):
            of_output = b + adapter.to(tl.int64) * OF_ADAPTER + column.to(tl.int64)[:, None] * OF_OUTPUT
            tile = tl.load(of_output + k + lane[None, :], inside[:, None], 0.0)
            of_row = inner + row.to(tl.int64)[:, None] * INNER + part * RANK + k + lane[None, :]
            values = tl.zeros([ROWS, TURN], tl.float32)
            for share in tl.static_range(SHARES):
                values += tl.load(of_row + share * (T.to(tl.int64) * INNER), mine, 0.0)
            total = add_product(cast(values, tile.dtype), tile, total, False)
        tl.store(at, cast(total, out.dtype.element_ty), changed)
