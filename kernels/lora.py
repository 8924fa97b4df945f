"""Low-rank products of rows that have adapters, added to the product of the model's own matrix.

    out_t += B_s,p A_s,p x_t       s = index_t, the adapter of row t, -1: none

Part p, the outputs [ends[p - 1], ends[p]), has its own A: q, k and v are one product of the model. A's product is fp32, rounded
to the matrices' dtype for B's, which is summed in fp32 and rounded after the addition.

`_shrink` gives fp32 sums of A's product for shares of n. For many rows, or experts, `_expand` follows the product: it adds the
shares, multiplies by B and adds to `out`. Where experts' adapters outnumber rows, each row is a block. For few rows the product's
own kernel (`kernels.linear._gemm`) does so, and overlaps `_shrink`. The word `begun` tells it that the kernels before `_shrink`
have ended. All CTAs of `_shrink` run by then, so it never waits for one that cannot start.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.numerics import add_product, cast
from kernels.tiles import Tile

_ROWS = 16  # of a block
_SHARE = 768  # of the inner dimension, of a CTA of `_shrink`
_MOST_SHARES = 16
_TURN = 128  # of a share, at once
_OUTPUTS = 64  # of a CTA of `_expand`
_OUTPUTS_OF_ROW = 256  # of one for a single row
_WIDTH = 16  # columns of A's product of a CTA of `_shrink`, of few rows
_MOST_RANK = 128  # that the product's own kernel takes
_LAST = constexpr(0x7FFFFFFF)  # no adapter has this index


class LowRank(NamedTuple):
    """x       [T, n], plain
    of_row  int32 [T], each row's adapter
    a       [adapters, parts * r, n]
    b       [adapters, m, r]; in memory [m, adapters, r], or contiguous for experts
    ends    of the parts' outputs, one to three
    begun   int32 [1], 0: a word of this product alone
    """

    x: Tensor
    of_row: Tensor
    a: Tensor
    b: Tensor
    ends: tuple[int, ...]
    begun: Tensor

    def fits(self, tile: Tile, *, gated: bool) -> bool:
        rank = self.b.shape[2]
        parts = len(self.ends) == 1 or gated or all(end % tile.bn == 0 for end in self.ends)
        fits = parts and rank <= _MOST_RANK and rank & (rank - 1) == 0
        return tile.kind == "gemm" and fits and self.b.transpose(0, 1).is_contiguous()

    def add(self, out: Tensor) -> None:
        add_lora(out, self.x, self.of_row, self.a, self.b, self.ends)

    def shrink(self, tile: Tile) -> "Shrunk":
        check_contiguous(self.x, self.of_row, self.a)
        n = self.x.shape[1]
        adapters, m, r = self.b.shape
        parts = len(self.ends)
        assert self.ends[-1] == m, (self.ends, self.b.shape)
        assert self.a.shape == (adapters, parts * r, n), (self.a.shape, self.b.shape, n)
        inner = _shrink_all(self.x, self.of_row, self.a, parts * r, tile.rows, _WIDTH, self.begun)
        first, second = [*self.ends, m, m][:2]
        arguments = self.of_row, self.b, inner, self.begun
        together = min(next_power_of_2(adapters), _MOST_RANK // r)
        return Shrunk(arguments, _constexprs((r, parts, adapters, len(inner), first, second)), together)


class Shrunk(NamedTuple):
    """together: adapters that `expand_rows` multiplies at once."""

    arguments: tuple[Any, ...]
    constexprs: dict[str, int]
    together: int


def _constexprs(numbers: tuple[int, ...]) -> dict[str, int]:
    names = "RANK", "PARTS", "ADAPTERS", "SHARES", "FIRST", "SECOND"
    return dict(zip(names, numbers, strict=True))


NO_ADAPTERS = Shrunk((None, None, None, None), _constexprs((0,) * 6), 0)


def add_lora(
    out: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor, ends: tuple[int, ...], source: Tensor | None = None
) -> None:
    """out [T, m], x [T, n], index int32 [T], all contiguous; a, b and ends as in `LowRank`; r a multiple of 16. source: int32 [T],
    rows of x."""
    check_contiguous(out, x, index, a, source)
    assert b.stride(2) == 1, b.stride()
    (rows, m), n, r = out.shape, x.shape[1], b.shape[2]
    parts = len(ends)
    assert ends[-1] == m == b.shape[1], (ends, out.shape, b.shape)
    assert a.shape[1:] == (parts * r, n), (a.shape, parts, r, n)
    assert index.shape[0] == rows == len(x if source is None else source), (x.shape, index.shape, rows)
    if rows == 0:
        return
    if not enabled(x):
        _reference(out, x if source is None else x[source], index, a, b, ends)
        return
    width = min(r & -r, 64)  # at most the largest power of 2 that divides r
    if rows <= a.shape[0]:
        block = 1
        outputs = _OUTPUTS_OF_ROW
    else:
        block = _ROWS
        outputs = _OUTPUTS
    inner = _shrink_all(x, index, a, parts * r, block, width, source=source)
    groups = min(block, a.shape[0])
    bounds = [*ends, *[m] * (3 - parts)]
    widths = [end - start for start, end in zip([0, *bounds], bounds, strict=False)]
    grid = cdiv(rows, block) * groups, sum(cdiv(width, outputs) for width in widths)
    launch(
        _expand, grid, inner, b, index, out, rows, groups,
        M=m, RANK=r, OF_ADAPTER=b.stride(0), OF_OUTPUT=b.stride(1), INNER=parts * r, SHARES=len(inner), TURN=width,
        FIRST=bounds[0], SECOND=bounds[1], ROWS=block, OUTPUTS=outputs,
    )  # fmt: skip


def _shrink_all(
    x: Tensor, index: Tensor, a: Tensor, columns: int, block: int, width: int, begun: Tensor | None = None,
    source: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fp32 [shares, T, columns]."""
    rows = len(index)
    n = x.shape[1]
    share = cdiv(cdiv(n, min(_MOST_SHARES, cdiv(n, _SHARE))), _TURN) * _TURN
    inner = torch.empty((cdiv(n, share), rows, columns), dtype=torch.float32, device=x.device)
    groups = min(rows, block, a.shape[0])
    grid = cdiv(rows, block) * groups, columns // width, len(inner)
    launch(
        _shrink, grid, x, source, a, index, inner, begun, rows, groups,
        N=n, INNER=columns, WIDTH=width, SHARE=share, ROWS=block, TURN=_TURN,
    )  # fmt: skip
    return inner


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
    adapter = tl.min(tl.where(index >= 0, index, LAST), 0)
    for _ in range(number):
        adapter = tl.min(tl.where(index > adapter, index, LAST), 0)
    return adapter


@triton.jit
def _add_rows(x, weight, total):
    if total.shape[0] == 1:
        total += tl.sum(x.to(tl.float32) * weight.to(tl.float32), 1)[None, :]
    else:
        total = add_product(x, weight, total, False)
    return total


@triton.jit
def _shrink_rows(
    x, source, a, inner, row, own, adapter, first, share, T,
    N: constexpr, INNER: constexpr, WIDTH: constexpr, SHARE: constexpr, TURN: constexpr,
):  # fmt: skip
    mine = (own == adapter)[:, None]
    column = first + tl.arange(0, WIDTH)
    lane = tl.arange(0, TURN)
    if source is None:
        rows = x + row.to(tl.int64)[:, None] * N
    else:
        rows = x + tl.load(source + row, mine.reshape([row.shape[0]]), 0).to(tl.int64)[:, None] * N
    base = a + (adapter.to(tl.int64) * INNER + column[:, None]) * N
    total = tl.zeros([row.shape[0], WIDTH], tl.float32)
    for k in range(0, SHARE, TURN):
        offset = share * SHARE + k + lane
        inside = (offset < N)[None, :]
        tile = tl.load(base + offset[None, :], inside, 0.0)
        values = tl.load(rows + offset[None, :], mine & inside, 0.0)
        total = _add_rows(values.to(tile.dtype), tile, total)
    tl.store(inner + (share.to(tl.int64) * T + row[:, None]) * INNER + column[None, :], total, mine)


@triton.jit
def wait_for_x(begun):
    """Waits until the kernels before `_shrink` have ended; their writes are visible."""
    state = tl.atomic_add(begun, 0, sem="acquire")
    while state == 0:
        state = tl.atomic_add(begun, 0, sem="acquire")


@triton.jit
def part_of(column, FIRST: constexpr, SECOND: constexpr):
    return (column >= FIRST).to(tl.int32) + (column >= SECOND).to(tl.int32)


@triton.jit
def expand_rows(
    total, own, b, inner, row, column, part, T,
    M: constexpr, RANK: constexpr, PARTS: constexpr, ADAPTERS: constexpr, TOGETHER: constexpr, SHARES: constexpr,
    SWAP: constexpr,
):  # fmt: skip
    """Add B's product to `total` [ROWS, BN], with SWAP [BN, ROWS]. own: each row's adapter. TOGETHER adapters are one matrix: a
    row's values stand in its adapter's columns, zeros in the others'."""
    COLUMNS: constexpr = TOGETHER * RANK
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
    x, source, a, index, inner, begun, T, groups,
    N: constexpr, INNER: constexpr, WIDTH: constexpr, SHARE: constexpr, ROWS: constexpr, TURN: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    wait(PDL)
    if PDL and begun is not None:
        tl.atomic_add(begun, 1, sem="release")
    first = tl.program_id(1) * WIDTH
    share = tl.program_id(2)
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    own = tl.load(index + row, row < T, -1)
    adapter = _adapter(own, tl.program_id(0) % groups, _LAST)
    if adapter < _LAST:
        _shrink_rows(x, source, a, inner, row, own, adapter, first, share, T, N, INNER, WIDTH, SHARE, TURN)


@triton.jit(do_not_specialize=["T", "groups"])
def _expand(
    inner, b, index, out, T, groups,
    M: constexpr, RANK: constexpr, OF_ADAPTER: constexpr, OF_OUTPUT: constexpr, INNER: constexpr, SHARES: constexpr,
    TURN: constexpr, FIRST: constexpr, SECOND: constexpr, ROWS: constexpr, OUTPUTS: constexpr, PDL: constexpr,
):  # fmt: skip
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
            total = _add_rows(cast(values, tile.dtype), tile, total)
        tl.store(at, cast(total, out.dtype.element_ty), changed)
