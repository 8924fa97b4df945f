"""The router: every expert's score for each token, and the choice of the best.

    logits = rms_norm(h) (proj * scale * n^(-1/2))^T       no weight in the norm; fp32
    x      = rms_norm(h; norm)                             the experts' input, in h's dtype
    p = softmax(logits);  (e_k, w_k) = top_k(p);  w_k = w_k / sum(w) * per_expert_scale[e_k]

Ties: the lower expert first. A row with a NaN has NaN weights and valid experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.norm import rms_norm
from kernels.numerics import add_product, cast

_ROWS = 8  # rows of one CTA at most: it reads its experts' weights once for them
_MANY = 128  # rows above which the scores are products of tiles
_TILES = ((32, 64, 128, 4, 3), (64, 64, 64, 4, 3))  # to 4096 rows, above: rows, experts, inner dimension of a turn, warps, stages


def router_parts(proj: Tensor, scale: Tensor) -> Tensor:
    """proj fp32 [experts, n], scale fp32 [n] -> bf16 [3, experts, n]: parts that sum to every bit of fp32; bf16 x bf16 is exact
    in fp32.
    """
    left = proj * scale * proj.shape[1] ** -0.5
    parts = []
    for _ in range(3):
        parts.append(left.bfloat16())
        left = left - parts[-1]
    return torch.stack(parts)


def router_logits(h: Tensor, parts: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h [T, n], `router_parts`, norm [n] -> (logits fp32 [T, experts], x [T, n])."""
    if not enabled(h):
        return rms_norm(h, None, eps, torch.float32) @ parts.float().sum(0).t(), rms_norm(h, norm, eps)
    (rows, n), experts = h.shape, parts.shape[1]
    check_contiguous(h, parts)
    logits = h.new_empty((rows, experts), dtype=torch.float32)
    x = torch.empty_like(h)
    args = (h, parts, norm, logits, x, rows, eps)
    sizes = {"N": n, "EXPERTS": experts, "BLOCK": next_power_of_2(n)}
    if rows > _MANY:
        held, width, turn, warps, stages = _TILES[rows > 4096]
        groups = cdiv(rows, held)
        shares = cdiv(experts, width)
        launch(
            _many_logits, (groups * shares + rows,), *args,
            **sizes, SHARES=shares, ROWS=held, WIDTH=width, TURN=turn, warps=warps, stages=stages,
        )  # fmt: skip
        return logits, x
    width = 2 if rows <= _ROWS else 4  # experts of a CTA
    shares = cdiv(experts, width)
    group_rows = min(_ROWS, next_power_of_2(rows))
    launch(
        _logits, (shares + group_rows, cdiv(rows, group_rows)), *args,
        **sizes, SHARES=shares, ROWS=group_rows, WIDTH=width, warps=8,
    )  # fmt: skip
    return logits, x


def route(logits: Tensor, per_expert_scale: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """logits fp32 [T, experts], per_expert_scale fp32 [experts] -> weights fp32 and experts int32 [T, top_k]."""
    if not enabled(logits):
        weights, chosen = logits.softmax(-1).topk(top_k)
        return weights / weights.sum(-1, keepdim=True) * per_expert_scale[chosen], chosen.int()
    rows, experts = logits.shape
    weights = logits.new_empty((rows, top_k), dtype=torch.float32)
    chosen = logits.new_empty((rows, top_k), dtype=torch.int32)
    launch(
        _route, (rows,), logits, per_expert_scale, weights, chosen,
        EXPERTS=experts, WIDTH=next_power_of_2(experts), TOP=top_k, SLOTS=next_power_of_2(top_k), warps=1,
    )  # fmt: skip
    return weights, chosen


@triton.jit
def _variance_scale(values, eps, N: constexpr):
    return tl.rsqrt(tl.sum(values * values, 0) / N + eps)


@triton.jit
def _norm_row(h, factor, x, row, T, eps, N: constexpr):
    lane = tl.arange(0, factor.shape[0])
    live = (lane < N) & (row < T)
    offset = row.to(tl.int64) * N + lane
    before = tl.load(h + offset, live, 0.0).to(tl.float32)
    tl.store(x + offset, cast(before * _variance_scale(before, eps, N) * factor, x.dtype.element_ty), live)


@triton.jit(do_not_specialize=["T"])
def _logits(
    h, parts, norm, logits, x, T, eps,
    N: constexpr, EXPERTS: constexpr, SHARES: constexpr, ROWS: constexpr, WIDTH: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    share = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    lane = tl.arange(0, BLOCK)
    live = lane < N
    if share < SHARES:
        expert = share * WIDTH + tl.arange(0, WIDTH)
        weight = tl.zeros([WIDTH, BLOCK], tl.float32)
        for part in tl.static_range(3):
            row = part * EXPERTS + tl.minimum(expert, EXPERTS - 1)
            weight += tl.load(parts + row[:, None] * N + lane[None, :], live[None, :], 0.0).to(tl.float32)
        wait(PDL)
        for i in tl.static_range(ROWS):
            row = (first + i).to(tl.int64)
            values = tl.load(h + row * N + lane, live & (row < T), 0.0).to(tl.float32)
            products = tl.sum(weight * values[None, :], 1) * _variance_scale(values, eps, N)
            tl.store(logits + row * EXPERTS + expert, products, (expert < EXPERTS) & (row < T))
    else:
        factor = tl.load(norm + lane, live, 0.0).to(tl.float32)
        wait(PDL)
        _norm_row(h, factor, x, first + share - SHARES, T, eps, N)


@triton.jit(do_not_specialize=["T"])
def _many_logits(
    h, parts, norm, logits, x, T, eps,
    N: constexpr, EXPERTS: constexpr, SHARES: constexpr, ROWS: constexpr, WIDTH: constexpr, TURN: constexpr, BLOCK: constexpr,
    PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    tiles = (T + ROWS - 1) // ROWS * SHARES
    program = tl.program_id(0)
    if program >= tiles:
        lane = tl.arange(0, BLOCK)
        factor = tl.load(norm + lane, lane < N, 0.0).to(tl.float32)
        wait(PDL)
        _norm_row(h, factor, x, program - tiles, T, eps, N)
        return
    row = program // SHARES * ROWS + tl.arange(0, ROWS)
    expert = program % SHARES * WIDTH + tl.arange(0, WIDTH)
    lane = tl.arange(0, TURN)
    live = (row < T)[:, None]
    rows = h + row.to(tl.int64)[:, None] * N + lane[None, :]
    weights = parts + tl.minimum(expert, EXPERTS - 1)[:, None] * N + lane[None, :]
    total = tl.zeros([WIDTH, ROWS], tl.float32)
    squares = tl.zeros([ROWS, TURN], tl.float32)
    wait(PDL)
    for k in range(0, N, TURN):
        inside = k + lane < N
        values = tl.load(rows + k, live & inside[None, :], 0.0)
        squares += values.to(tl.float32) * values.to(tl.float32)
        turn = tl.zeros([WIDTH, ROWS], tl.float32)  # apart: an MMA cuts what it adds to a large sum off
        for part in tl.static_range(3):
            weight = tl.load(weights + part * EXPERTS * N + k, inside[None, :], 0.0)
            turn = add_product(values, weight.to(values.dtype), turn, True)
        total += turn
    factor = tl.rsqrt(tl.sum(squares, 1) / N + eps)
    out = logits + row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    tl.store(out, total.T * factor[:, None], live & (expert < EXPERTS)[None, :])


@triton.jit
def _route(
    logits, per_expert_scale, weights, chosen,
    EXPERTS: constexpr, WIDTH: constexpr, TOP: constexpr, SLOTS: constexpr, PDL: constexpr,
):  # fmt: skip
    """Softmax over all, renormalised, is softmax over the best."""
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    slot = tl.arange(0, SLOTS)
    wait(PDL)
    x = tl.load(logits + row * EXPERTS + lane, lane < EXPERTS, float("-inf"))
    spoilt = tl.max((x != x).to(tl.int32), 0) > 0
    left = tl.where(x != x, float("-inf"), x)
    highest = tl.maximum(tl.max(left, 0), -3e38)
    share = tl.zeros([SLOTS], tl.float32)
    expert = tl.zeros([SLOTS], tl.int32)
    for k in tl.static_range(TOP):
        high, best = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        share = tl.where(slot == k, tl.exp(high - highest), share)
        expert = tl.where(slot == k, best, expert)
        left = tl.where(lane == best, float("-inf"), left)
    total = tl.where(spoilt, float("nan"), tl.sum(share, 0))
    kept = slot < TOP
    tl.store(weights + row * TOP + slot, share / total * tl.load(per_expert_scale + expert, kept, 0.0), kept)
    tl.store(chosen + row * TOP + slot, expert, kept)
