"""Bidirectional attention within pictures of any sizes, without padding, in one launch.

    out_i = sum_j softmax_j( q_i . k_j ) v_j        over the rows j of row i's picture; scores are not scaled

fp32; weights are rounded to v's dtype. Heads of 72 are cut into 64 and 8 columns.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, trigger, wait
from kernels.numerics import cast, dot, softmax_step


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """q, k and v [T, heads, d]; starts int32 [pictures + 1]; longest: most rows of a picture -> [T, heads, d]."""
    out = torch.empty_like(q)
    if not len(q) or not enabled(q):
        for first, last in pairwise(starts.tolist()):
            queries, keys, values = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
            out[first:last] = functional.scaled_dot_product_attention(queries, keys, values, scale=1.0)[0].transpose(0, 1)
        return out
    check_contiguous(q, k, v, starts)
    heads, d = q.shape[1:]
    rest = d - (1 << d.bit_length() - 1)
    assert rest in (0, 8, 16), f"head dim {d}: a power of two, or 8 or 16 more than one, is needed"
    tile_rows, tile_keys, warps, registers = (128, 64, 8, 128) if q.element_size() == 2 else (16, 16, 4, None)
    launch(
        _attend, (cdiv(longest, tile_rows), heads, len(starts) - 1), q, k, v, starts, out,
        HEADS=heads, D=d, REST=rest, ROWS=tile_rows, KEYS=tile_keys, warps=warps, registers=registers,
    )  # fmt: skip
    return out


@triton.jit
def _columns(x, rows, columns, live):
    return tl.load(x + (rows + columns[None, :]), live, 0.0)


@triton.jit
def _attend(
    q, k, v, starts, out, HEADS: constexpr, D: constexpr, REST: constexpr, ROWS: constexpr, KEYS: constexpr, PDL: constexpr,
):  # fmt: skip
    """128 registers a thread let two programs fit an SM."""
    trigger(PDL)
    picture = tl.program_id(2)
    head = tl.program_id(1)
    wait(PDL)
    begin = tl.load(starts + picture)
    end = tl.load(starts + picture + 1)
    first = begin + tl.program_id(0) * ROWS
    if first >= end:
        return
    dims = tl.arange(0, D - REST)
    rest = D - REST + tl.arange(0, REST or 8)
    summed = D - REST + tl.arange(0, 16)  # a product sums 16 columns at least: after a rest of 8 are zeros
    inside = (summed < D)[None, :]
    origin = (first * HEADS + head) * D
    offset = tl.arange(0, ROWS)[:, None] * (HEADS * D)
    live = (tl.arange(0, ROWS) < end - first)[:, None]
    queries = _columns(q + origin, offset, dims, live)
    if REST:
        rest_queries = _columns(q + origin, offset, summed, live & inside)
    row_max = tl.full([ROWS], -1e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D - REST], tl.float32)
    rest_acc = tl.zeros([ROWS, REST or 8], tl.float32)
    last = begin + (end - begin) // KEYS * KEYS
    # Turns without a mask, then one with it. Triton 3.6 gets heads of 72 wrong where that one is in an `if`, and where it has no
    # pipeline while 16 columns of v are multiplied.
    for edge in tl.static_range(2):
        for key in tl.range(last if edge else begin, end if edge else last, KEYS):
            seen = ((tl.arange(0, KEYS) < end - key) | (edge == 0))[:, None]  # a mask that holds everywhere is compiled away
            start, at = (key * HEADS + head) * D, tl.arange(0, KEYS)[:, None] * (HEADS * D)  # one address a turn, fixed offsets
            scores = dot(queries, tl.trans(_columns(k + start, at, dims, seen)))
            if REST:
                scores += dot(rest_queries, tl.trans(_columns(k + start, at, summed, seen & inside)))
            if edge:
                scores = tl.where(tl.trans(seen), scores, -float("inf"))
            row_max, weights, rescale, row_sum = softmax_step(scores, row_max, row_sum)
            weights = cast(weights, v.dtype.element_ty)
            acc = acc * rescale[:, None] + dot(weights, _columns(v + start, at, dims, seen))
            if REST:
                rest_acc = rest_acc * rescale[:, None] + dot(weights, _columns(v + start, at, rest, seen))
    tl.store(out + origin + (offset + dims[None, :]), cast(acc / row_sum[:, None], out.dtype.element_ty), live)
    if REST:
        tl.store(out + origin + (offset + rest[None, :]), cast(rest_acc / row_sum[:, None], out.dtype.element_ty), live)
