"""Weight products with their epilogue in the same kernel.

    linear(x; W)                 = cast( x W^T )
    linear(x; W, GEGLU)          = cast( gelu_tanh(x G^T) * x U^T )        W = [G; U]
    linear(x; W, gelu_times(u))  = cast( gelu_tanh(x W^T) * u )

One row or two: `_gemv`. Up to 64, more with few outputs: `_gemm`. Otherwise, and for dtypes other than bf16: the library. A row's
result depends only on that row and on the row count's tile (`kernels.tiles`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.activation import geglu, geglu_rows, gelu
from kernels.four_bits import add_words, load_pairs, load_scaled_words, load_words, pair_tile, run_columns, word_pairs
from kernels.fused_allreduce_norm import AllReduceInbox, InboxPart, inboxes_of, send
from kernels.launch import INTERPRET, cdiv, check_contiguous, enabled, launch, shared_memory, trigger, wait
from kernels.lora import NO_ADAPTERS, LowRank, expand_rows, part_of, wait_for_x
from kernels.numerics import add_product, cast, prefetch
from kernels.packed import (
    Activations,
    Matrix,
    PackedMatrix,
    operands,
    pack_rows,
    packed_matrix,
    scaled_product,
    scaled_tile,
    unpacked,
)
from kernels.tiles import GemmShape, Tile, choose


class Epilogue(NamedTuple):
    gated: bool = False  # W is [G; U]
    up: Tensor | None = None  # [T, m], factor of the product's GELU; rows may be strided
    dtype: torch.dtype | None = None  # of the result; None: x's


NONE = Epilogue()
GEGLU = Epilogue(gated=True)
FP32 = Epilogue(dtype=torch.float32)  # the product is not rounded to x's dtype: bf16 logits would tie in one row of fourteen


def gelu_times(up: Tensor) -> Epilogue:
    return Epilogue(up=up)


def linear(
    x: Activations, weight: Matrix, epilogue: Epilogue = NONE, out: Tensor | None = None, added: LowRank | None = None
) -> Tensor:
    """x [T, n], weight [m, n], gated [2 m, n] -> [T, m] in the epilogue's dtype, or in `out`. `added` comes before the epilogue.

    Few gated rows on a GPU stay fp32 until the one cast; others are rounded before the gate.
    """
    packed = packed_matrix(weight)
    tile = _tile(x, packed, gated=epilogue.gated, adapted=added is not None)
    if tile is not None and (added is None or added.fits(tile, gated=epilogue.gated)):
        return _run(tile, x, packed, _out(x, packed, epilogue) if out is None else out, epilogue, added=added)
    if epilogue.gated or epilogue.up is not None:
        return geglu(linear(x, weight, added=added), epilogue.up)
    if out is None:
        out = _out(x, packed, epilogue)
    if tile is None:
        _library(x, packed, out)
    else:
        _run(tile, x, packed, out, epilogue)
    if added is not None:
        added.add(out)
    return out


def linear_gated(x: Activations, weight: Matrix) -> Activations:
    """`linear` with GEGLU; many rows of a packed product give `PackedRows`."""
    if enabled(x) and _tile(x, packed_matrix(weight), gated=True) is None:
        return geglu_rows(linear(x, weight))
    return linear(x, weight, GEGLU)


def linear_send(x: Activations, weight: Matrix, peers: AllReduceInbox, added: LowRank | None = None) -> InboxPart | None:
    """This rank's part of a sum, `added` included, written to every inbox by the product's kernel. None: that kernel cannot do it
    all, and nothing was sent.
    """
    packed = packed_matrix(weight)
    tile = _tile(x, packed, adapted=added is not None) if len(x) <= peers.sent_rows else None
    if tile is None or not (added is None or added.fits(tile, gated=False)):
        return None
    assert packed.rows <= peers.width, (packed.rows, peers.width)
    sent = InboxPart(peers, peers.next_buffer())
    _run(tile, x, packed, peers.inbox, sent=sent, added=added)
    return sent


def linear_parts(x: Activations, weight: Matrix, added: LowRank | None = None) -> Tensor:
    """`linear`; where few outputs leave processors idle, fp32 [parts, T, m] for `kernels.fused_allreduce_norm`."""
    packed = packed_matrix(weight)
    tile = _tile(x, packed, parts=True, adapted=added is not None)
    if tile is None or tile.splits == 1 or not (added is None or added.fits(tile, gated=False)):
        return linear(x, weight, added=added)
    return _run(tile, x, packed, x.new_empty(tile.splits, len(x), packed.rows, dtype=torch.float32), added=added)


def _out(x: Activations, weight: PackedMatrix, epilogue: Epilogue) -> Tensor:
    return x.new_empty(len(x), weight.rows // (1 + epilogue.gated), dtype=epilogue.dtype)


def _library(x: Activations, weight: PackedMatrix, out: Tensor) -> Tensor:
    if weight.load == "fp8":
        return scaled_product(pack_rows(x), weight, out)
    assert isinstance(x, Tensor)
    values = weight.values if weight.load == "plain" else unpacked(weight)
    if x.is_cuda and out.dtype != x.dtype:
        return torch.mm(x, values.t(), out_dtype=out.dtype, out=out)
    return torch.mm(x.to(out.dtype), values.to(out.dtype).t(), out=out)


def _tile(x: Activations, weight: PackedMatrix, *, gated: bool = False, parts: bool = False, adapted: bool = False) -> Tile | None:
    rows, n = x.shape
    assert n == weight.columns, (x.shape, weight.values.shape)
    assert weight.dtype in (None, x.dtype), (x.dtype, weight.dtype)
    check_contiguous(x if isinstance(x, Tensor) else x.values, *weight.tensors)
    if rows == 0 or not enabled(x) or not (x.dtype == torch.bfloat16 or INTERPRET):
        return None
    if adapted:
        rows = max(rows, 3)  # a `_gemv` adds nothing of adapters, and two rows take no longer than three
    return choose(rows, GemmShape(weight.rows // (1 + gated), n, gated), shared_memory(x), parts=parts, load=weight.load)


def _run(
    tile: Tile,
    x: Activations,
    weight: PackedMatrix,
    out: Tensor,
    epilogue: Epilogue = NONE,
    sent: InboxPart | None = None,
    added: LowRank | None = None,
) -> Tensor:
    up = epilogue.up
    k = x.shape[1]
    assert up is None or up.stride(1) == 1, up.stride()
    m = weight.rows // (1 + epilogue.gated)
    pointers = None
    rank = 0
    buffer = 0
    inboxes = {"SIZE": 0, "INBOX_ROWS": 0, "WIDTH": m, "EMPTY": 0}
    if sent is not None:
        peers = sent.peers
        buffer = sent.buffer
        pointers = peers.pointers
        rank = peers.rank
        inboxes = {"SIZE": peers.size, "INBOX_ROWS": peers.rows, "WIDTH": peers.width, "EMPTY": peers.nothing}
    blocks = cdiv(len(x), tile.rows)
    columns = cdiv(m, tile.bn)
    values, x_scale = operands(x, weight)
    constexprs = {
        "M": m, "K": k, "ROWS": tile.rows, "BN": tile.bn, "BK": tile.bk, "warps": tile.warps, "stages": tile.stages,
        "GATED": epilogue.gated, "UP": up.stride(0) if up is not None else 0, **inboxes,
    }  # fmt: skip
    ends = up, out, pointers, rank, buffer
    if tile.kind == "gemv" and weight.group:
        matrix = weight.values, weight.scale, weight.zero
        launch(_gemv_words, (columns, blocks), values, *matrix, *ends, GROUP=weight.group, **constexprs)
    elif tile.kind == "gemv":
        launch(_gemv, (columns, blocks), values, x_scale, weight.values, weight.scale, *ends, EARLY=tile.early, **constexprs)
    else:
        low = NO_ADAPTERS if added is None else added.shrink(tile)
        matrix = weight.values, weight.scale, weight.zero, *low.arguments
        own = {"SWAP": tile.swap, "SPLITS": tile.splits, "BLOCKS": blocks > 1, "GROUP": weight.group, "TOGETHER": low.together}
        grid = columns, tile.splits, blocks
        launch(_gemm, grid, values, x_scale, *matrix, *ends, len(x), **own, **low.constexprs, **constexprs)
    return out


@triton.jit
def _store(
    total, out, row, column, live, inboxes, rank, buffer,
    SIZE: constexpr, INBOX_ROWS: constexpr, WIDTH: constexpr, EMPTY: constexpr,
):  # fmt: skip
    if SIZE == 0:
        tl.store(out + row.to(tl.int64) * WIDTH + column, cast(total, out.dtype.element_ty), live)
    else:
        dtype: constexpr = tl.bfloat16 if out.dtype.element_ty == tl.int16 else tl.float32
        bits = cast(total, dtype).to(out.dtype.element_ty, bitcast=True)
        offset = (row + buffer * ((SIZE + 1) * INBOX_ROWS) + rank * INBOX_ROWS) * WIDTH
        send(bits, inboxes, offset, column, live, SIZE, EMPTY)


@triton.jit
def _load(base, TURN: constexpr, K: constexpr, BK: constexpr, POLICY: constexpr):
    offset = TURN * BK + tl.arange(0, BK)[None, :]
    inside = (offset < K) | ((TURN + 1) * BK <= K)
    return tl.load(base + offset, inside, 0.0, eviction_policy=POLICY)


@triton.jit
def _add_products(sums, tile, values, LANE: constexpr):
    products = tl.reshape(tile.to(tl.float32) * values, [sums.shape[0], sums.shape[1], LANE])
    return sums + tl.sum(products, 2)


@triton.jit
def _scaled_sum(sums, scales, x_scales, MATRIX: constexpr, ROW: constexpr):
    total = tl.sum(sums, 1)
    if len(scales) > 0:
        total *= scales[MATRIX] * x_scales[ROW]
    return total


@triton.jit(do_not_specialize=["rank", "buffer"])
def _gemv(
    x, x_scale, weight, scale, up, out, pointers, rank, buffer,
    M: constexpr, K: constexpr, ROWS: constexpr, BN: constexpr, BK: constexpr, EARLY: constexpr, GATED: constexpr, UP: constexpr,
    SIZE: constexpr, INBOX_ROWS: constexpr, WIDTH: constexpr, EMPTY: constexpr, PDL: constexpr,
):  # fmt: skip
    """BN outputs of ROWS rows. A thread sums 16 bytes of neighbouring columns. EARLY weight tiles stay
    in flight.
    """
    trigger(PDL)
    TILES: constexpr = (K + BK - 1) // BK
    LANE: constexpr = 8 if scale is None else 16
    MATRICES: constexpr = 2 if GATED else 1
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    base = weight + tl.minimum(column, M - 1).to(tl.int64)[:, None] * K
    inboxes = inboxes_of(pointers, out.dtype.element_ty, SIZE)
    scales: tl.tuple = ()
    if x_scale is not None:  # at the end they would have to come from HBM
        for matrix in tl.static_range(MATRICES):
            scales += (tl.load(scale + matrix * M + tl.minimum(column, M - 1)),)
    tiles: tl.tuple = ()
    for i in tl.static_range(min(EARLY, TILES)):
        for matrix in tl.static_range(MATRICES):
            tiles += (_load(base + matrix * M * K, i, K, BK, "evict_first"),)
    wait(PDL)
    first = tl.program_id(1) * ROWS
    x += first * K
    x_scales: tl.tuple = ()
    if x_scale is not None:
        for row in tl.static_range(ROWS):
            x_scales += (tl.load(x_scale + first + row),)
    sums: tl.tuple = ()
    for _ in tl.static_range(ROWS * MATRICES):
        sums += (tl.zeros([BN, BK // LANE], tl.float32),)
    for i in tl.static_range(TILES):
        if i + EARLY < TILES:
            for matrix in tl.static_range(MATRICES):
                tiles += (_load(base + matrix * M * K, i + EARLY, K, BK, "evict_first"),)
        added: tl.tuple = ()
        for row in tl.static_range(ROWS):
            values = _load(x + tl.full([1, 1], row * K, tl.int32), i, K, BK, "").to(tl.float32)
            for matrix in tl.static_range(MATRICES):
                added += (_add_products(sums[row * MATRICES + matrix], tiles[i * MATRICES + matrix], values, LANE),)
        sums = added
    live = column < M
    for row in tl.static_range(ROWS):
        at = tl.full([BN], row, tl.int32) + first
        total = _scaled_sum(sums[row * MATRICES], scales, x_scales, 0, row)
        if GATED:
            total = gelu(total) * _scaled_sum(sums[row * MATRICES + 1], scales, x_scales, 1, row)
        if UP > 0:
            total = gelu(total) * tl.load(up + at * UP + column, live, 0.0).to(tl.float32)
        _store(total, out, at, column, live, inboxes, rank, buffer, SIZE, INBOX_ROWS, WIDTH, EMPTY)


@triton.jit(do_not_specialize=["rank", "buffer"])
def _gemv_words(
    x, weight, scale, zero, up, out, pointers, rank, buffer,
    M: constexpr, K: constexpr, GROUP: constexpr, ROWS: constexpr, BN: constexpr, BK: constexpr, GATED: constexpr, UP: constexpr,
    SIZE: constexpr, INBOX_ROWS: constexpr, WIDTH: constexpr, EMPTY: constexpr, PDL: constexpr,
):  # fmt: skip
    """`_gemv` of `kernels.four_bits`. The next turn's words are in flight."""
    trigger(PDL)
    MATRICES: constexpr = 2 if GATED else 1
    EXACT: constexpr = x.dtype.element_ty == tl.float32
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    at_row = tl.minimum(column, M - 1).to(tl.int64)[:, None]
    inboxes = inboxes_of(pointers, out.dtype.element_ty, SIZE)
    loaded: tl.tuple = ()
    for matrix in tl.static_range(MATRICES):
        loaded += (load_scaled_words(weight, scale, zero, at_row + matrix * M, 0, K, GROUP, BK),)
    wait(PDL)
    first = tl.program_id(1) * ROWS
    x += first * K
    sums: tl.tuple = ()
    for _ in tl.static_range(ROWS * MATRICES):
        sums += (tl.zeros([BN, BK // 32], tl.float32),)
    for k in range(0, K, BK):
        following: tl.tuple = ()
        for matrix in tl.static_range(MATRICES):
            following += (load_scaled_words(weight, scale, zero, at_row + matrix * M, k + BK, K, GROUP, BK),)
        added: tl.tuple = ()
        for row in tl.static_range(ROWS):
            pair = k // 2 + word_pairs(BK // 8)
            values: tl.tuple = ()
            for i in tl.static_range(4):
                values += load_pairs(x + row * K, pair + 8 * i, pair < K // 2)
            for matrix in tl.static_range(MATRICES):
                total = sums[row * MATRICES + matrix]
                added += (add_words(total, loaded[matrix], at_row + matrix * M, values, GROUP, EXACT),)
        sums = added
        loaded = following
    live = column < M
    for row in tl.static_range(ROWS):
        at = tl.full([BN], row, tl.int32) + first
        total = tl.sum(sums[row * MATRICES], 1)
        if GATED:
            total = gelu(total) * tl.sum(sums[row * MATRICES + 1], 1)
        if UP > 0:
            total = gelu(total) * tl.load(up + at * UP + column, live, 0.0).to(tl.float32)
        _store(total, out, at, column, live, inboxes, rank, buffer, SIZE, INBOX_ROWS, WIDTH, EMPTY)


@triton.jit(do_not_specialize=["rank", "buffer", "T"])
def _gemm(
    x, x_scale, weight, scale, zero, index, b, inner, begun, up, out, pointers, rank, buffer, T,
    M: constexpr, K: constexpr, ROWS: constexpr, BN: constexpr, BK: constexpr, SWAP: constexpr, SPLITS: constexpr,
    BLOCKS: constexpr, GROUP: constexpr, GATED: constexpr, UP: constexpr, SIZE: constexpr, INBOX_ROWS: constexpr,
    WIDTH: constexpr, EMPTY: constexpr, RANK: constexpr, PARTS: constexpr, ADAPTERS: constexpr, TOGETHER: constexpr,
    SHARES: constexpr, FIRST: constexpr, SECOND: constexpr, PDL: constexpr,
):  # fmt: skip
    """BN outputs of ROWS rows. Rows after T are zero: repeating one makes all CTAs wait
    for its cache lines. No trigger: the next kernel's CTAs would displace its own.
    """
    start = tl.program_id(0) * BN
    column = start + tl.arange(0, BN)
    at_row = tl.minimum(column, M - 1).to(tl.int64)[:, None]
    WORD: constexpr = 8 if GROUP > 0 else 1  # columns in an element of the weight
    inboxes = inboxes_of(pointers, out.dtype.element_ty, SIZE)
    PART: constexpr = K // SPLITS
    first = tl.program_id(1) * PART if SPLITS > 1 else 0
    base = weight + at_row * (K // WORD) + first // WORD
    LINE: constexpr = 32 if GROUP > 0 else 64  # elements in 128 bytes of a word's or bf16's size
    lines = tl.minimum(LINE * tl.arange(0, (BK // WORD + LINE - 1) // LINE), PART // WORD - 1)[None, :]  # in the first columns
    prefetch(base + lines)
    if GATED:
        prefetch(base + M * (K // WORD) + lines)
    if x_scale is not None:  # at the end they would have to come from HBM
        scales = tl.load(scale + tl.minimum(column, M - 1))
        if GATED:
            second_scales = tl.load(scale + M + tl.minimum(column, M - 1))
    row = tl.arange(0, ROWS)
    if RANK > 0:
        of_all = tl.arange(0, ROWS) + tl.program_id(2) * ROWS
        b_lines = LINE * tl.arange(0, (TOGETHER * RANK + LINE - 1) // LINE)[None, :]
        of_b = b + at_row * (ADAPTERS * RANK) + b_lines
        prefetch(of_b)
        if GATED:
            prefetch(of_b + M * ADAPTERS * RANK)
        if PDL:
            wait_for_x(begun)
        of_row = tl.load(index + of_all, of_all < T, -1)
        rows_of_all = T
    else:
        wait(PDL)
    if BLOCKS:
        block = tl.program_id(2) * ROWS
        T -= block
        x += block.to(tl.int64) * K
    if x_scale is not None:
        rows = tl.minimum(row, T - 1)
        if BLOCKS:
            rows += block
        x_scales = tl.load(x_scale + rows)
    xs = x + first + row[:, None] * K
    live = row[:, None] < T
    offset = tl.arange(0, BK)[None, :]
    total = tl.zeros([BN, ROWS] if SWAP else [ROWS, BN], tl.float32)
    second = total
    for k in range(0, PART, BK):
        if GROUP > 0:
            loaded = load_words(weight, scale, zero, at_row, first + k, K, GROUP, BK)
            if GATED:
                others = load_words(weight, scale, zero, at_row + M, first + k, K, GROUP, BK)
            for i in tl.static_range(4):
                at = k + run_columns(BK // 8) + 16 * i
                values = tl.load(xs + at, live & ((at < K) | (PART % BK == 0)), 0.0)
                total = add_product(values, pair_tile(loaded, i, x.dtype.element_ty), total, SWAP)
                if GATED:
                    second = add_product(values, pair_tile(others, i, x.dtype.element_ty), second, SWAP)
        else:
            inside = (k + offset < K) | (PART % BK == 0)  # a mask that holds everywhere is compiled away
            values = tl.load(xs + k + offset, live & inside, 0.0)
            tile = tl.load(base + k + offset, inside, 0.0, eviction_policy="evict_first")
            total = add_product(values, tile, total, SWAP)
            if GATED:
                tile = tl.load(base + M * K + k + offset, inside, 0.0, eviction_policy="evict_first")
                second = add_product(values, tile, second, SWAP)
    if x_scale is not None:
        total = scaled_tile(total, x_scales, scales, SWAP)
        if GATED:
            second = scaled_tile(second, x_scales, second_scales, SWAP)
    if RANK > 0:
        wait(PDL)
        if SPLITS == 1 or tl.program_id(1) == 0:
            part = 0 if GATED else part_of(start, FIRST, SECOND)
            OUTPUTS: constexpr = 2 * M if GATED else M
            total = expand_rows(
                total, of_row, b, inner, of_all, column, part, rows_of_all,
                OUTPUTS, RANK, PARTS, ADAPTERS, TOGETHER, SHARES, SWAP,
            )  # fmt: skip
            if GATED:
                second = expand_rows(
                    second, of_row, b, inner, of_all, column + M, 1, rows_of_all,
                    OUTPUTS, RANK, PARTS, ADAPTERS, TOGETHER, SHARES, SWAP,
                )  # fmt: skip
    if GATED:
        total = gelu(total) * second
    if SWAP:
        total = total.T
    live = (row[:, None] < T) & (column[None, :] < M)
    if BLOCKS:
        row += block
        T += block
    if UP > 0:
        total = gelu(total) * tl.load(up + row[:, None] * UP + column[None, :], live, 0.0).to(tl.float32)
    if SPLITS > 1:
        out += tl.program_id(1).to(tl.int64) * T * M
    _store(total, out, row[:, None], column[None, :], live, inboxes, rank, buffer, SIZE, INBOX_ROWS, WIDTH, EMPTY)
