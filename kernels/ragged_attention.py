"""Attention both ways within pictures of any sizes, without padding: one launch whatever their sizes.

    out_i = sum_j softmax_j( q_i . k_j ) v_j        over the rows j of the picture of row i; scores are not scaled

Rows of all pictures lie one after the other; `starts` has where each begins. Scores, softmax and sums are fp32; weights are rounded
to v's dtype before their product. A head size that is no power of two is cut into one and a rest: 72 is 64 and 8.
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
    """q, k and v [T, heads, d], contiguous, starts int32 [pictures + 1], rows of the longest one -> [T, heads, d]."""
    out = torch.empty_like(q)
    if not len(q) or not enabled(q):
        for first, last in pairwise(starts.tolist()):
            queries, keys, values = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
            out[first:last] = functional.scaled_dot_product_attention(queries, keys, values, scale=1.0)[0].transpose(0, 1)
        return out
    check_contiguous(q, k, v, starts)
    heads, d = q.shape[1:]
    whole = 1 << d.bit_length() - 1
    rest = max(16, d - whole) if d > whole else 0
    assert rest & (rest - 1) == 0, f"head dim {d}: a power of two, or the sum of one and a smaller one from 16 on, is needed"
    tile = 64 if q.element_size() == 2 else 16
    grid = cdiv(longest, tile), heads, len(starts) - 1
    launch(_attend, grid, q, k, v, starts, out, HEADS=heads, D=d, WHOLE=whole, REST=rest, TILE=tile)
    return out


@triton.jit
def _attend(
    q, k, v, starts, out,
    HEADS: constexpr, D: constexpr, WHOLE: constexpr, REST: constexpr, TILE: constexpr, PDL: constexpr,
):  # fmt: skip
    """A program: TILE queries of a picture, one head."""
    trigger(PDL)
    picture, head = tl.program_id(2), tl.program_id(1)
    wait(PDL)
    begin, end = tl.load(starts + picture), tl.load(starts + picture + 1)
    first = begin + tl.program_id(0) * TILE
    if first >= end:
        return
    dims, rest = tl.arange(0, WHOLE), WHOLE + tl.arange(0, REST or 16)
    row = first + tl.arange(0, TILE)
    offset = (row * HEADS + head)[:, None] * D
    live = (row < end)[:, None]
    queries = tl.load(q + offset + dims[None, :], live, 0.0)
    if REST:
        rest_queries = tl.load(q + offset + rest[None, :], live & (rest < D)[None, :], 0.0)
    row_max = tl.full([TILE], -1e30, tl.float32)
    row_sum = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, WHOLE], tl.float32)
    rest_acc = tl.zeros([TILE, REST or 16], tl.float32)
    last = begin + (end - begin) // TILE * TILE
    for edge in tl.static_range(2):  # turns without a mask, then one with it: in an `if` Triton 3.6 gets heads of 72 wrong
        for key in tl.range(last if edge else begin, end if edge else last, TILE):
            seen = (key + tl.arange(0, TILE) < end) | (edge == 0)  # a mask that holds everywhere is compiled away
            rest_seen = seen[:, None] & (rest < D)[None, :]
            start, at = (key * HEADS + head) * D, tl.arange(0, TILE)[:, None] * (HEADS * D)  # one address a turn, fixed offsets
            scores = dot(queries, tl.trans(tl.load(k + start + (at + dims[None, :]), seen[:, None], 0.0)))
            if REST:
                scores += dot(rest_queries, tl.trans(tl.load(k + start + (at + rest[None, :]), rest_seen, 0.0)))
            if edge:
                scores = tl.where(seen[None, :], scores, -float("inf"))
            row_max, weights, rescale, row_sum = softmax_step(scores, row_max, row_sum)
            values = tl.load(v + start + (at + dims[None, :]), seen[:, None], 0.0)
            weights = cast(weights, values.dtype)
            acc = acc * rescale[:, None] + dot(weights, values)
            if REST:
                rest_acc = rest_acc * rescale[:, None] + dot(weights, tl.load(v + start + (at + rest[None, :]), rest_seen, 0.0))
    tl.store(out + offset + dims[None, :], cast(acc / row_sum[:, None], out.dtype.element_ty), live)
    if REST:
        tl.store(out + offset + rest[None, :], cast(rest_acc / row_sum[:, None], out.dtype.element_ty), live & (rest < D)[None, :])
