"""The experts' MLPs, each applied to the tokens that chose it.

    y_t = sum_k w_tk * down_e( gelu_tanh(g) * u ),   [g; u] = gate_up_e x_t,   e = e_tk      gate is the first half of gate_up

Products are summed in fp32, the gated activations rounded to x's dtype; the weighted sum over experts is fp32, in the order of k,
with one cast. Where experts are cut along their width, y is a rank's part. It stands behind another branch's part, which is copied,
so that one joint takes both.

An *assignment* is one of a token's top_k choices. Nothing asks the host which experts were chosen:

    up to 8 tokens   `_up`    (assignment, block of m)      a stream of the chosen expert's gate and up rows
                     `_down`  (token, block of n)           walks the token's experts
    more             `_group` (expert)                      its assignments, in order, and where they stand among all
                     `_grouped` (expert, block, share)      `tl.dot` on BM assignments of the expert at once; a CTA that has none
                                                            ends; gate and up first, then down, each assignment's y apart
                     `_combine` (token, block of n)         adds them up
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.activation import geglu, gelu
from kernels.grid import cdiv, next_power_of_2
from kernels.launch import INTERPRET, launch, trigger, usable, wait
from kernels.numerics import cast

FEW = 8  # tokens up to which an assignment is a CTA's own: more would read too many weights twice
_UP_COLUMNS, _UP_TURN = 4, 1024
_DOWN_COLUMNS, _DOWN_TURN = 8, 64
_GROUPED_COLUMNS, _GROUPED_TURN = 64, 64
_GROUP_BLOCK = 2048


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, beside: Tensor) -> Tensor:
    """x [T, n]; weights fp32 and chosen int32 [T, top_k]; gate_up [experts, 2 m, n]; down [experts, n, m]; beside [T, n] ->
    [T, 2 n]: beside, y."""
    assert weights.shape == chosen.shape, (weights.shape, chosen.shape)
    assert weights.shape[0] == x.shape[0], (weights.shape, x.shape)
    assert beside.shape == x.shape, (beside.shape, x.shape)
    assert gate_up.shape[0] == down.shape[0], (gate_up.shape, down.shape)
    assert gate_up.shape[1:] == (2 * down.shape[2], x.shape[1]), (gate_up.shape, down.shape, x.shape)
    assert down.shape[1] == x.shape[1], (down.shape, x.shape)
    if not usable(x, __name__):
        return torch.cat([beside, _experts_reference(x, weights, chosen, gate_up, down)], dim=-1)
    assert chosen.dtype == torch.int32, chosen.dtype
    for tensor in (x, weights, chosen, gate_up, down, beside):
        assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    out = x.new_empty(x.shape[0], 2 * x.shape[1])
    run = _few if x.shape[0] <= FEW else _many
    run(x, weights, chosen, gate_up, down, beside, out)
    return out


def _experts_reference(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        tokens, places = torch.where(chosen == expert)
        part = functional.linear(geglu(functional.linear(x[tokens], gate_up[expert])), down[expert])
        total.index_add_(0, tokens, part.float() * weights[tokens, places, None])
    return total.to(x.dtype)


def _few(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, beside: Tensor, out: Tensor) -> None:
    (rows, n), m, top_k = x.shape, down.shape[2], chosen.shape[1]
    gated = x.new_empty(rows * top_k, m)
    launch(
        _up, (rows * top_k, cdiv(m, _UP_COLUMNS)), x, chosen, gate_up, gated,
        M=m, K=n, TOP=top_k, BN=_UP_COLUMNS, BK=_UP_TURN, warps=4,
    )  # fmt: skip
    launch(
        _down, (rows, cdiv(n, _DOWN_COLUMNS)), gated, weights, chosen, down, beside, out,
        N=n, K=m, TOP=top_k, BN=_DOWN_COLUMNS, BK=_DOWN_TURN, warps=2,
    )  # fmt: skip


def _many(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, beside: Tensor, out: Tensor) -> None:
    (rows, n), count, m, top_k = x.shape, gate_up.shape[0], down.shape[2], chosen.shape[1]
    order = torch.empty(rows * top_k, dtype=torch.int32, device=x.device)
    bounds = torch.empty((count, 2), dtype=torch.int32, device=x.device)
    launch(_group, (count,), chosen, order, bounds, rows * top_k, BLOCK=_GROUP_BLOCK, warps=8)
    gated, parts = x.new_empty(rows * top_k, m), x.new_empty(rows * top_k, n)
    _launch_grouped(x, gate_up, order, bounds, gated, sharing=top_k, gate=True)
    _launch_grouped(gated, down, order, bounds, parts, sharing=1, gate=False)
    block = min(1024, next_power_of_2(n))
    launch(_combine, (rows, cdiv(n, block)), parts, weights, beside, out, N=n, TOP=top_k, BLOCK=block, warps=4)


def _launch_grouped(x: Tensor, weight: Tensor, order: Tensor, bounds: Tensor, out: Tensor, *, sharing: int, gate: bool) -> None:
    """`sharing` assignments in a row read one row of x: all of a token's its input, each its own gated activations."""
    experts_, assignments, m = weight.shape[0], len(order), out.shape[1]
    rows = 16 if assignments <= 16 * experts_ else 64
    shares = min(8, max(1, assignments // (rows * experts_)))
    launch(
        _grouped, (experts_, cdiv(m, _GROUPED_COLUMNS), shares), x, weight, order, bounds, out,
        M=m, K=x.shape[1], SHARING=sharing, GATED=gate, BM=rows, BN=_GROUPED_COLUMNS, BK=_GROUPED_TURN,
        warps=4, stages=4 if rows == 16 else 3,
    )  # fmt: skip


@triton.jit
def _tiles(base: tl.tensor, live: tl.tensor, K: tl.constexpr, BK: tl.constexpr) -> tl.tuple:
    """The whole rows at `base` [rows, 1], BK columns a tile; zeros behind K, and where not `live`."""
    tiles: tl.tuple = ()
    for turn in tl.static_range((K + BK - 1) // BK):
        at = turn * BK + tl.arange(0, BK)[None, :]
        tiles += (tl.load(base + at, mask=live & (at < K), other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _add_product(total: tl.tensor, tile: tl.tensor, row: tl.tensor, TURN: tl.constexpr, K: tl.constexpr) -> tl.tensor:
    """total [BN, BK / 8], and the products of `tile` [BN, BK] with columns [TURN BK, (TURN + 1) BK) of a row of inputs."""
    BN: tl.constexpr = tile.shape[0]
    BK: tl.constexpr = tile.shape[1]
    at = TURN * BK + tl.arange(0, BK)[None, :]
    products = tile.to(tl.float32) * tl.load(row + at, at < K, 0.0).to(tl.float32)
    return total + tl.sum(tl.reshape(products, [BN, BK // 8, 8]), 2)


@triton.jit
def _up(
    x: tl.tensor, chosen: tl.tensor, gate_up: tl.tensor, gated: tl.tensor,
    M: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BN outputs of one assignment; all of its weights are asked for at once."""
    trigger(PDL)
    assignment = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    wait(PDL)
    expert = tl.load(chosen + assignment).to(tl.int64)
    base = gate_up + expert * (2 * M * K) + tl.minimum(column, M - 1)[:, None] * K
    gates, ups = _tiles(base, assignment >= 0, K, BK), _tiles(base + M * K, assignment >= 0, K, BK)
    gate = tl.zeros([BN, BK // 8], tl.float32)
    up = tl.zeros([BN, BK // 8], tl.float32)
    for turn in tl.static_range((K + BK - 1) // BK):
        gate = _add_product(gate, gates[turn], x + assignment // TOP * K, turn, K)
        up = _add_product(up, ups[turn], x + assignment // TOP * K, turn, K)
    value = gelu(tl.sum(gate, 1)) * tl.sum(up, 1)
    tl.store(gated + assignment * M + column, cast(value, gated.dtype.element_ty), column < M)


@triton.jit
def _down(
    gated: tl.tensor, weights: tl.tensor, chosen: tl.tensor, down: tl.tensor, beside: tl.tensor, out: tl.tensor,
    N: tl.constexpr, K: tl.constexpr, TOP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BN outputs of one token. The next expert's weights are on their way while one's are multiplied."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    base = down + tl.minimum(column, N - 1)[:, None] * K
    wait(PDL)
    tiles = _tiles(base + tl.load(chosen + row * TOP).to(tl.int64) * (N * K), row >= 0, K, BK)
    total = tl.zeros([BN, BK // 8], tl.float32)
    for k in range(TOP):
        more = k + 1 < TOP
        later = _tiles(base + tl.load(chosen + row * TOP + k + 1, more, 0).to(tl.int64) * (N * K), more, K, BK)
        product = tl.zeros([BN, BK // 8], tl.float32)
        for turn in tl.static_range((K + BK - 1) // BK):
            product = _add_product(product, tiles[turn], gated + (row * TOP + k) * K, turn, K)
        total += product * tl.load(weights + row * TOP + k)
        tiles = later
    y = cast(tl.sum(total, 1), out.dtype.element_ty)
    tl.store(out + row * (2 * N) + column, tl.load(beside + row * N + column, column < N), column < N)
    tl.store(out + row * (2 * N) + N + column, y, column < N)


@triton.jit(do_not_specialize=["assignments"])
def _group(
    chosen: tl.tensor, order: tl.tensor, bounds: tl.tensor, assignments: tl.tensor, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    """One expert: order[bounds[e, 0] : bounds[e, 1]] are its assignments, ascending."""
    trigger(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    wait(PDL)
    first = 0
    for start in range(0, assignments, BLOCK):
        theirs = tl.load(chosen + start + lane, start + lane < assignments, expert)
        first += tl.sum((theirs < expert).to(tl.int32), 0)
    last = first
    for start in range(0, assignments, BLOCK):
        mine = (tl.load(chosen + start + lane, start + lane < assignments, -1) == expert).to(tl.int32)
        tl.store(order + last + tl.cumsum(mine, 0) - 1, start + lane, mine > 0)
        last += tl.sum(mine, 0)
    tl.store(bounds + 2 * expert, first)
    tl.store(bounds + 2 * expert + 1, last)


@triton.jit
def _dot(weight: tl.tensor, x: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + weight x^T. The interpreter multiplies bf16 as integers: fp32 there."""
    if INTERPRET:
        weight, x = weight.to(tl.float32), x.to(tl.float32)
    return tl.dot(weight, x.T, total, input_precision="ieee")


@triton.jit
def _grouped(
    x: tl.tensor, weight: tl.tensor, order: tl.tensor, bounds: tl.tensor, out: tl.tensor,
    M: tl.constexpr, K: tl.constexpr, SHARING: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BN outputs of one expert for its assignments, BM at a time. Rows behind the last are zero."""
    if GATED:
        trigger(PDL)
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    base = weight + (expert * (M * (2 if GATED else 1)) + tl.minimum(column, M - 1))[:, None] * K
    lane = tl.arange(0, BK)[None, :]
    wait(PDL)
    last = tl.load(bounds + 2 * expert + 1)
    for start in range(tl.load(bounds + 2 * expert) + tl.program_id(2) * BM, last, BM * tl.num_programs(2)):
        place = start + tl.arange(0, BM)
        live = place < last
        assignment = tl.load(order + place, live, 0).to(tl.int64)
        rows = x + (assignment // SHARING)[:, None] * K
        total = tl.zeros([BN, BM], tl.float32)
        up = total
        for k in range(0, K, BK):
            at = k + lane
            inside = at < K
            values = tl.load(rows + at, live[:, None] & inside, 0.0)
            total = _dot(tl.load(base + at, inside, 0.0), values, total)
            if GATED:
                up = _dot(tl.load(base + M * K + at, inside, 0.0), values, up)
        if GATED:
            total = gelu(total) * up
        y = cast(total, out.dtype.element_ty)
        tl.store(out + assignment[None, :] * M + column[:, None], y, live[None, :] & (column < M)[:, None])


@triton.jit
def _combine(
    parts: tl.tensor, weights: tl.tensor, beside: tl.tensor, out: tl.tensor,
    N: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One token's weighted sum over its experts, and the other branch's part before it."""
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < N
    wait(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP):
        part = tl.load(parts + (row * TOP + k) * N + column, live, 0.0).to(tl.float32)
        total += part * tl.load(weights + row * TOP + k)
    tl.store(out + row * (2 * N) + column, tl.load(beside + row * N + column, live), live)
    tl.store(out + row * (2 * N) + N + column, cast(total, out.dtype.element_ty), live)
