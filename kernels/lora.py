"""Low-rank products of rows that have adapters, added to the product of the model's own matrix.

    out_t += B_s,p A_s,p x_t       s = index_t, the adapter of row t; of -1 nothing is added; p: part of the outputs

a [adapters, parts * r, n], b [adapters, m, r]. Part p has the outputs [ends[p - 1], ends[p]) and an A of its own: q, k and v are
one product of the model, and three of an adapter. A's product is fp32; it is rounded to the matrices' dtype for B's, which is
summed in fp32, added to `out` in fp32, and rounded once.

    `_shrink` (rows, adapter among theirs, columns of A's product, share of n)     fp32 sums of each share
    `_expand` (rows, adapter among theirs, outputs)                                adds the shares, multiplies by B, adds to `out`

A CTA has the rows of one adapter in a block of rows: those of several adapters run at once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, trigger, wait
from kernels.numerics import add_product, cast

_ROWS = 16  # of a block
_SHARE = 768  # of the inner dimension, of a CTA of `_shrink`
_MOST_SHARES = 16
_TURN = 128  # of a share, at once
_OUTPUTS = 64  # of a CTA of `_expand`
_LAST = constexpr(0x7FFFFFFF)  # no adapter has this index


def add_lora(out: Tensor, x: Tensor, index: Tensor, a: Tensor, b: Tensor, ends: tuple[int, ...]) -> None:
    """out [T, m], x [T, n], index int32 [T], all contiguous; a and b of one dtype, r a multiple of 16; `ends`: one to three."""
    check_contiguous(out, x, index, a, b)
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
    shares = min(_MOST_SHARES, cdiv(n, _SHARE))
    share = cdiv(cdiv(n, shares), _TURN) * _TURN
    shares = cdiv(n, share)
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
        M=m, RANK=r, INNER=parts * r, SHARES=shares, TURN=width, FIRST=bounds[0], SECOND=bounds[1],
        ROWS=_ROWS, OUTPUTS=_OUTPUTS,
    )  # fmt: skip


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
        mine = (own == adapter)[:, None]
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        first = tl.program_id(2) * SHARE
        lane = tl.arange(0, TURN)
        rows = x + row.to(tl.int64)[:, None] * N
        base = a + (adapter.to(tl.int64) * INNER + column[:, None]) * N
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        for k in range(0, SHARE, TURN):
            offset = first + k + lane
            inside = (offset < N)[None, :]
            tile = tl.load(base + offset[None, :], inside, 0.0)
            values = tl.load(rows + offset[None, :], mine & inside, 0.0)
            total = add_product(values.to(tile.dtype), tile, total, False)
        at = (tl.program_id(2).to(tl.int64) * T + row[:, None]) * INNER + column[None, :]
        tl.store(inner + at, total, mine)


@triton.jit(do_not_specialize=["T", "groups"])
def _expand(
    inner, b, index, out, T, groups,
    M: constexpr, RANK: constexpr, INNER: constexpr, SHARES: constexpr, TURN: constexpr, FIRST: constexpr, SECOND: constexpr,
    ROWS: constexpr, OUTPUTS: constexpr, PDL: constexpr,
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
            tile = tl.load(b + (adapter.to(tl.int64) * M + column[:, None]) * RANK + k + lane[None, :], inside[:, None], 0.0)
            of_row = inner + row.to(tl.int64)[:, None] * INNER + part * RANK + k + lane[None, :]
            values = tl.zeros([ROWS, TURN], tl.float32)
            for share in tl.static_range(SHARES):
                values += tl.load(of_row + share * (T.to(tl.int64) * INNER), mine, 0.0)
            total = add_product(cast(values, tile.dtype), tile, total, False)
        tl.store(at, cast(total, out.dtype.element_ty), changed)
