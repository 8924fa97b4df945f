"""Weight products of few rows, and the gate of Gemma's MLP in the same kernel.

    linear(x; W)       = cast( x W^T )
    linear_geglu(x; W) = cast( gelu_tanh(x G^T) * x U^T )        W = [G; U]
    linear_gelu_mul(x; W, u) = cast( gelu_tanh(x W^T) * u )

x [T, n], W [m, n], contiguous. A decode step reads every weight once, so of few rows these are streams of weights, and the
kernels exist to keep memory busy: weights are constant, so they are asked for before the kernel waits for its predecessors
(kernels.launch), x after. One row or two: products by lanes in fp32, weight tiles in registers (`_gemv`). Up to 64, and more
with few outputs: `tl.dot` on tiles in shared memory (`_gemm`), rows padded. Else, and for dtypes other than bf16: cuBLAS. All sums
are fp32. A row's result depends on that row alone, and on the kernel and tile that `kernels.tiles` names for the number of rows.
"""


import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.activation import geglu, gelu
from kernels.fused_allreduce_norm import AllReduceInbox, InboxPart, inboxes_of, send
from kernels.launch import INTERPRET, cdiv, check_contiguous, enabled, launch, shared_memory, trigger, wait
from kernels.numerics import add_product, cast, prefetch
from kernels.tiles import GemmShape, Tile, choose


def linear(x: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """x [T, n], weight [m, n] -> [T, m] in `dtype`, by default x's, or in `out`. fp32 keeps the products unrounded: bf16 logits
    would tie in one row of fourteen."""
    tile, out = _tile(x, weight), x.new_empty(len(x), len(weight), dtype=dtype) if out is None else out
    return _linear_reference(x, weight, out) if tile is None else _run(tile, x, weight, out)


def linear_send(x: Tensor, weight: Tensor, peers: AllReduceInbox) -> InboxPart | None:
    """x [T, n], weight [m, n]: this rank's part of a sum over ranks, written to every rank's inbox by the product's own kernel, for
    the next fused norm. None, and nothing done, for more rows than pay, or where the library computes the product."""
    tile = _tile(x, weight) if len(x) <= peers.sent_rows else None
    if tile is None:
        return None
    assert len(weight) <= peers.width, (weight.shape, peers.width)
    sent = InboxPart(peers, peers.next_buffer())
    _run(tile, x, weight, peers.inbox, sent=sent)
    return sent


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, n], weight [m, n] -> [T, m] in x's dtype; or, where so few outputs would leave processors idle, fp32 [parts, T, m],
    each part summed over its share of the inner dimension, for `kernels.fused_allreduce_norm` to add."""
    tile = _tile(x, weight, parts=True)
    if tile is None or tile.splits == 1:
        return linear(x, weight)
    return _run(tile, x, weight, x.new_empty(tile.splits, len(x), len(weight), dtype=torch.float32))


def linear_geglu(x: Tensor, gate_up: Tensor) -> Tensor:
    """x [T, n], gate_up [2 m, n], gate rows first -> [T, m] in x's dtype.

    Up to 64 rows on a GPU both products stay fp32 until the one cast; elsewhere they are rounded to x's dtype before the gate."""
    tile = _tile(x, gate_up, gated=True)
    if tile is None:
        return geglu(linear(x, gate_up))
    return _run(tile, x, gate_up, x.new_empty(len(x), len(gate_up) // 2), gated=True)


def linear_gelu_mul(x: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    """x [T, n], weight [m, n], up [T, m], whose rows may lie apart -> [T, m] in x's dtype, rounded as in `linear_geglu`."""
    tile = _tile(x, weight)
    if tile is None:
        return geglu(linear(x, weight), up)
    assert up.stride(1) == 1, up.stride()
    return _run(tile, x, weight, x.new_empty(len(x), len(weight)), up=up)


def _linear_reference(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    if x.is_cuda and out.dtype != x.dtype:
        return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    return torch.mm(x.to(out.dtype), weight.to(out.dtype).t(), out=out)


def _tile(x: Tensor, weight: Tensor, *, gated: bool = False, parts: bool = False) -> Tile | None:
    """The product's tile (`choose`); None: the library computes it. AssertionError unless shapes, dtypes and contiguity are as the
    kernels take them for granted."""
    (rows, n), (m, _) = x.shape, weight.shape
    assert n == weight.shape[1], (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    check_contiguous(x, weight)
    if rows == 0 or not enabled(x) or not (x.dtype == torch.bfloat16 or INTERPRET):
        return None
    return choose(rows, GemmShape(m // (1 + gated), n, gated), shared_memory(x), parts=parts)


def _run(
    tile: Tile, x: Tensor, weight: Tensor, out: Tensor, *,
    gated: bool = False, sent: InboxPart | None = None, up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Starts `tile`'s kernel. sent: it writes to that buffer of the inboxes, and `out` is this rank's own. up: what the product's
    GELU is multiplied by."""
    m, k = weight.shape
    m //= 1 + gated
    pointers, rank, buffer, inboxes = None, 0, 0, {"SIZE": 0, "INBOX_ROWS": 0, "WIDTH": m, "EMPTY": 0}
    if sent is not None:
        peers, buffer = sent.peers, sent.buffer
        pointers, rank = peers.pointers, peers.rank
        inboxes = {"SIZE": peers.size, "INBOX_ROWS": peers.rows, "WIDTH": peers.width, "EMPTY": peers.nothing}
    blocks, columns = cdiv(len(x), tile.rows), cdiv(m, tile.bn)
    args = x, weight, up, out, pointers, rank, buffer
    constexprs = {
        "M": m, "K": k, "ROWS": tile.rows, "BN": tile.bn, "BK": tile.bk, "warps": tile.warps, "stages": tile.stages,
        "GATED": gated, "UP": up.stride(0) if up is not None else 0, **inboxes,
    }  # fmt: skip
    if tile.kind == "gemv":
        launch(_gemv, (columns, blocks), *args, EARLY=tile.early, **constexprs)
    else:
        grid = columns, tile.splits, blocks
        launch(_gemm, grid, *args, len(x), SWAP=tile.swap, SPLITS=tile.splits, BLOCKS=blocks > 1, **constexprs)
    return out


@triton.jit
def _store(
    total, out, row, column, live,
    dtype: constexpr, inboxes, rank, buffer,
    SIZE: constexpr, INBOX_ROWS: constexpr, WIDTH: constexpr, EMPTY: constexpr,
):  # fmt: skip
    """`total` to its rows of `out`, or, rounded to `dtype`, to this rank's part in every rank's inbox."""
    if SIZE == 0:
        tl.store(out + row.to(tl.int64) * WIDTH + column, cast(total, out.dtype.element_ty), live)
    else:
        bits = cast(total, dtype).to(out.dtype.element_ty, bitcast=True)
        offset = (row + buffer * ((SIZE + 1) * INBOX_ROWS) + rank * INBOX_ROWS) * WIDTH
        send(bits, inboxes, offset, column, live, SIZE, EMPTY)


@triton.jit
def _load(base, TURN: constexpr, K: constexpr, BK: constexpr, POLICY: constexpr):
    """Columns [TURN BK, (TURN + 1) BK) of the rows at `base` [rows, 1]; zeros behind K."""
    offset = TURN * BK + tl.arange(0, BK)[None, :]
    inside = (offset < K) | ((TURN + 1) * BK <= K)
    return tl.load(base + offset, inside, 0.0, eviction_policy=POLICY)


@triton.jit
def _add_products(sums, tile, values):
    """`sums` [BN, BK / 8] and the products of a weight tile [BN, BK] with a row's values [1, BK], eight neighbours at once."""
    products = tl.reshape(tile.to(tl.float32) * values, [sums.shape[0], sums.shape[1], 8])
    return sums + tl.sum(products, 2)


@triton.jit(do_not_specialize=["rank", "buffer"])
def _gemv(
    x, weight, up, out, pointers, rank, buffer,
    M: constexpr, K: constexpr, ROWS: constexpr, BN: constexpr, BK: constexpr, EARLY: constexpr, GATED: constexpr, UP: constexpr,
    SIZE: constexpr, INBOX_ROWS: constexpr, WIDTH: constexpr, EMPTY: constexpr, PDL: constexpr,
):  # fmt: skip
    """BN outputs of ROWS of the rows. A thread adds up products of 8 neighbouring columns at once; the sum over threads comes last.
    The loop over K is unrolled, so that EARLY weight tiles are always on their way."""
    trigger(PDL)
    TILES: constexpr = (K + BK - 1) // BK
    MATRICES: constexpr = 2 if GATED else 1
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    base = weight + tl.minimum(column, M - 1).to(tl.int64)[:, None] * K
    inboxes = inboxes_of(pointers, out.dtype.element_ty, SIZE)
    tiles: tl.tuple = ()
    for i in tl.static_range(min(EARLY, TILES)):
        for matrix in tl.static_range(MATRICES):
            tiles += (_load(base + matrix * M * K, i, K, BK, "evict_first"),)
    wait(PDL)
    first = tl.program_id(1) * ROWS
    x += first * K
    sums: tl.tuple = ()
    for _ in tl.static_range(ROWS * MATRICES):
        sums += (tl.zeros([BN, BK // 8], tl.float32),)
    for i in tl.static_range(TILES):
        if i + EARLY < TILES:
            for matrix in tl.static_range(MATRICES):
                tiles += (_load(base + matrix * M * K, i + EARLY, K, BK, "evict_first"),)
        added: tl.tuple = ()
        for row in tl.static_range(ROWS):
            values = _load(x + tl.full([1, 1], row * K, tl.int32), i, K, BK, "").to(tl.float32)
            for matrix in tl.static_range(MATRICES):
                added += (_add_products(sums[row * MATRICES + matrix], tiles[i * MATRICES + matrix], values),)
        sums = added
    live = column < M
    for row in tl.static_range(ROWS):
        total, at = tl.sum(sums[row * MATRICES], 1), tl.full([BN], row, tl.int32) + first
        if GATED:
            total = gelu(total) * tl.sum(sums[row * MATRICES + 1], 1)
        if UP > 0:
            total = gelu(total) * tl.load(up + at * UP + column, live, 0.0).to(tl.float32)
        _store(total, out, at, column, live, x.dtype.element_ty, inboxes, rank, buffer, SIZE, INBOX_ROWS, WIDTH, EMPTY)


@triton.jit(do_not_specialize=["T", "rank", "buffer"])
def _gemm(
    x, weight, up, out, pointers, rank, buffer, T,
    M: constexpr, K: constexpr, ROWS: constexpr, BN: constexpr, BK: constexpr, SWAP: constexpr, SPLITS: constexpr,
    BLOCKS: constexpr, GATED: constexpr, UP: constexpr, SIZE: constexpr, INBOX_ROWS: constexpr, WIDTH: constexpr, EMPTY: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """BN outputs of up to ROWS rows, with BLOCKS of one block of them; rows behind T are zero: were they to repeat one, all CTAs
    would wait for its cache lines. Of SPLITS parts of the inner dimension a CTA has one. It has no trigger: the next kernel's CTAs
    would take the place of its own."""
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    base = weight + tl.minimum(column, M - 1).to(tl.int64)[:, None] * K
    inboxes = inboxes_of(pointers, out.dtype.element_ty, SIZE)
    PART: constexpr = K // SPLITS
    first = tl.program_id(1) * PART if SPLITS > 1 else 0
    base += first
    lines = tl.minimum(64 * tl.arange(0, (BK + 63) // 64), PART - 1)[None, :]  # of 128 bytes, in the first columns
    prefetch(base + lines)
    if GATED:
        prefetch(base + M * K + lines)
    wait(PDL)
    row = tl.arange(0, ROWS)
    if BLOCKS:
        block = tl.program_id(2) * ROWS
        T -= block
        x += block.to(tl.int64) * K
    xs, live = x + first + row[:, None] * K, row[:, None] < T
    offset = tl.arange(0, BK)[None, :]
    total = tl.zeros([BN, ROWS] if SWAP else [ROWS, BN], tl.float32)
    second = total
    for k in range(0, PART, BK):
        inside = (k + offset < K) | (PART % BK == 0)  # a mask that holds everywhere is compiled away
        values = tl.load(xs + k + offset, live & inside, 0.0)
        tile = tl.load(base + k + offset, inside, 0.0, eviction_policy="evict_first")
        total = add_product(values, tile, total, SWAP)
        if GATED:
            tile = tl.load(base + M * K + k + offset, inside, 0.0, eviction_policy="evict_first")
            second = add_product(values, tile, second, SWAP)
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
    _store(
        total, out, row[:, None], column[None, :], live, x.dtype.element_ty, inboxes, rank, buffer, SIZE, INBOX_ROWS, WIDTH, EMPTY
    )
