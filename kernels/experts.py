"""The experts' MLPs, each applied to the tokens that chose it.

    y_t = sum_k w_tk * down_e( gelu_tanh(g) * u ),   [g; u] = gate_up_e x_t,   e = e_tk

`_group` sorts assignments (a token's top_k choices) by expert, after `_count` if there are several blocks of them, and cuts row
tiles. `_grouped` multiplies a tile. `_combine` sums a token's weighted rows, in fp32 in the order of k. y follows the dense
branch's output.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.activation import geglu, gelu
from kernels.four_bits import load_words, pair_tile, run_columns
from kernels.launch import PendingTensor, cdiv, check_contiguous, enabled, launch, next_power_of_2, shared_memory, trigger, wait
from kernels.linear import GEGLU, linear
from kernels.lora import add_lora
from kernels.numerics import add_product, cast
from kernels.packed import Load, Matrix, PackedMatrix, operands, packed_matrix, scaled_tile
from kernels.tiles import Tile, fit

_GROUP_BLOCK = 4096


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Matrix, down: Matrix, dense: PendingTensor) -> Tensor:
    """x [T, n]; weights fp32 and chosen int32 [T, top_k]; gate_up [experts, 2 m, n]; down [experts, n, m] -> [T, 2 n]: dense's,
    y. dense: from `kernels.launch.on_second_stream`.
    """
    pair = packed_matrix(gate_up)
    last = packed_matrix(down)
    if not enabled(x):
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            tokens, ranks = torch.where(chosen == expert)
            part = linear(linear(x[tokens], pair.of_expert(expert), GEGLU), last.of_expert(expert))
            total.index_add_(0, tokens, part.float() * weights[tokens, ranks, None])
        return torch.cat([dense(), total.to(x.dtype)], -1)
    check_contiguous(x, weights, chosen, *pair.tensors, *last.tensors)
    (rows, n), m, (count, *_), top_k = x.shape, last.columns, last.values.shape, chosen.shape[1]
    up_tile, down_tile = choose(rows * top_k, count, shared_memory(x), last.load)
    tiles, order, position = (chosen[0], None, None) if rows == 1 else _sorted(chosen, count, up_tile.rows)
    inner = x.new_empty(rows * top_k, m)
    parts = x.new_empty(rows * top_k, n)
    _launch_grouped(up_tile, x, pair, order, tiles, inner, top_k)
    _launch_grouped(down_tile, inner, last, None, tiles, parts, 1)
    return _combined(parts, position, weights, dense)


def _combined(parts: Tensor, position: Tensor | None, weights: Tensor, dense: PendingTensor) -> Tensor:
    (rows, top_k), n = weights.shape, parts.shape[1]
    out = parts.new_empty(rows, 2 * n)
    block = min(1024, next_power_of_2(n))
    other = dense()
    check_contiguous(other)
    launch(_combine, (rows, cdiv(n, block)), parts, position, weights, other, out, N=n, TOP=top_k, BLOCK=block)
    return out


class ExpertAdapters(NamedTuple):
    """`kernels.lora`'s a, b and ends; a pair's index: expert * adapters + adapter."""

    a: Tensor
    b: Tensor
    ends: tuple[int, ...]
    adapters: int


class AdaptedRows(NamedTuple):
    """rows: each row's adapter, int32 [T], -1: none."""

    rows: Tensor
    gate_up: ExpertAdapters | None
    down: ExpertAdapters | None

    @property
    def adapters(self) -> int:
        return next(each.adapters for each in (self.gate_up, self.down) if each is not None)


def adapted_experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Matrix, down: Matrix, dense: PendingTensor, adapted: AdaptedRows
) -> Tensor:
    pair = packed_matrix(gate_up)
    last = packed_matrix(down)
    if not enabled(x):
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            tokens, ranks = torch.where(chosen == expert)
            index = adapted.rows[tokens]
            pairs = torch.where(index < 0, index, expert * adapted.adapters + index)
            both = linear(x[tokens], pair.of_expert(expert))
            _add(both, x[tokens], pairs, adapted.gate_up)
            inner = geglu(both)
            part = linear(inner, last.of_expert(expert))
            _add(part, inner, pairs, adapted.down)
            total.index_add_(0, tokens, part.float() * weights[tokens, ranks, None])
        return torch.cat([dense(), total.to(x.dtype)], -1)
    check_contiguous(x, weights, chosen, *pair.tensors, *last.tensors)
    (rows, n), m, (count, *_), top_k = x.shape, last.columns, last.values.shape, chosen.shape[1]
    up_tile, down_tile = choose(rows * top_k, count, shared_memory(x), last.load)
    tiles, order, position = (chosen[0], None, None) if rows == 1 else _sorted(chosen, count, up_tile.rows)
    pairs, tokens = _pairs(chosen, order, adapted)
    both = x.new_empty(rows * top_k, 2 * m)
    _launch_grouped(up_tile, x, pair, order, tiles, both, top_k)
    _add(both, x, pairs, adapted.gate_up, tokens)
    inner = geglu(both)
    parts = x.new_empty(rows * top_k, n)
    _launch_grouped(down_tile, inner, last, None, tiles, parts, 1)
    _add(parts, inner, pairs, adapted.down)
    return _combined(parts, position, weights, dense)


def _add(out: Tensor, x: Tensor, pairs: Tensor, adapters: ExpertAdapters | None, source: Tensor | None = None) -> None:
    if adapters is not None:
        add_lora(out, x, pairs, adapters.a, adapters.b, adapters.ends, source)


def _pairs(chosen: Tensor, order: Tensor | None, adapted: AdaptedRows) -> tuple[Tensor, Tensor]:
    """int32 of each assignment, in order: its index in a and b, or -1; its token."""
    assignments = chosen.numel()
    pairs, tokens = chosen.new_empty((2, assignments))
    block = min(1024, next_power_of_2(assignments))
    launch(
        _pair, (cdiv(assignments, block),), chosen, order, adapted.rows, pairs, tokens, assignments,
        ADAPTERS=adapted.adapters, TOP=chosen.shape[1], BLOCK=block,
    )  # fmt: skip
    return pairs, tokens


def _tile(rows: int, bn: int, bk: int, stages: int, *, swap: bool = True, warps: int = 4) -> Tile:
    return Tile("gemm", rows, bn, bk, warps=warps, stages=stages, swap=swap)


# Tiles of the gated product and of down, by the assignments that an expert has at most on average; from `python -m
# tests.bench.layer_products --model 26b-a4b`.
TABLE = (
    (8, _tile(16, 64, 128, 4), _tile(16, 64, 128, 4)),
    (16, _tile(32, 64, 128, 3), _tile(32, 64, 128, 3)),
    (64, _tile(64, 64, 128, 3), _tile(64, 128, 64, 3, swap=False)),
    (math.inf, _tile(128, 64, 64, 3), _tile(128, 256, 64, 4, swap=False, warps=8)),
)


@cache
def choose(assignments: int, count: int, shared: int, load: Load = "plain") -> tuple[Tile, Tile]:
    up, down = next(tiles for mean, *tiles in TABLE if assignments <= mean * count)
    return fit(up, True, shared, load), fit(down, False, shared, load)


def _sorted(chosen: Tensor, count: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32: tiles [n, 3] of at most `rows` assignments (expert, first, end); the order; its inverse."""
    assignments = chosen.numel()
    order, position = chosen.new_empty((2, assignments), dtype=torch.int32)
    tiles = chosen.new_empty((min(assignments, assignments // rows + count), 3), dtype=torch.int32)
    width = next_power_of_2(count)
    block = min(_GROUP_BLOCK, max(1024, next_power_of_2(assignments)))
    blocks = cdiv(assignments, block)
    counts = None
    if blocks > 1:
        counts = chosen.new_empty((blocks, width), dtype=torch.int32)
        launch(_count, (blocks,), chosen, counts, assignments, EXPERTS=width, BLOCK=block, warps=8)
    launch(
        _group, (count, blocks), chosen, counts, order, position, tiles, assignments, tiles.shape[0],
        ROWS=rows, EXPERTS=width, BLOCK=block, warps=8,
    )  # fmt: skip
    return tiles, order, position


def _launch_grouped(
    tile: Tile, x: Tensor, weight: PackedMatrix, order: Tensor | None, tiles: Tensor, out: Tensor, top_k: int
) -> None:  # fmt: skip
    """out [assignments, m], sorted by expert. top_k > 1: x are tokens' rows, else sorted rows. tiles: as `_sorted`, or one
    token's experts int32 [top_k]."""
    m = out.shape[1]
    values, x_scale = operands(x, weight)
    launch(
        _grouped, (cdiv(m, tile.bn), len(tiles)), values, x_scale, weight.values, weight.scale, weight.zero, order, tiles,
        out, M=m, K=x.shape[1], TOP=top_k, GROUP=weight.group, GATED=weight.rows > m, SINGLE=tiles.ndim == 1, SWAP=tile.swap,
        BM=tile.rows, BN=tile.bn, BK=tile.bk, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["assignments"])
def _pair(
    chosen, order, rows, pairs, tokens, assignments, ADAPTERS: constexpr, TOP: constexpr, BLOCK: constexpr, PDL: constexpr
):  # fmt: skip
    trigger(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = index < assignments
    wait(PDL)
    if order is None:
        assignment = index
    else:
        assignment = tl.load(order + index, live, 0)
    token = assignment // TOP
    adapter = tl.load(rows + token, live, -1)
    expert = tl.load(chosen + assignment, live, 0)
    tl.store(tokens + index, token, live)
    tl.store(pairs + index, tl.where(adapter < 0, -1, expert * ADAPTERS + adapter), live)


@triton.jit(do_not_specialize=["assignments"])
def _count(chosen, counts, assignments, EXPERTS: constexpr, BLOCK: constexpr, PDL: constexpr):
    trigger(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    theirs = tl.histogram(tl.load(chosen + index, index < assignments, 0), EXPERTS, mask=index < assignments)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), theirs)


@triton.jit(do_not_specialize=["assignments", "slots"])
def _group(
    chosen, counts, order, position, tiles, assignments, slots,
    ROWS: constexpr, EXPERTS: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    """An expert's assignments of a block, ascending, after those of earlier experts and blocks. The first block also fills the
    expert's tiles; the last expert empties other `slots`.
    """
    trigger(PDL)
    expert = tl.program_id(0)
    block = tl.program_id(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    other = tl.arange(0, EXPERTS)
    wait(PDL)
    theirs = tl.load(chosen + index, index < assignments, -1)
    before = tl.zeros([EXPERTS], tl.int32)
    if counts is None:
        totals = tl.histogram(tl.maximum(theirs, 0), EXPERTS, mask=index < assignments)
    else:
        totals = tl.zeros([EXPERTS], tl.int32)
        for i in range(tl.num_programs(1)):
            of_block = tl.load(counts + i * EXPERTS + other)
            totals += of_block
            before += tl.where(i < block, of_block, 0)
    first = tl.sum(tl.where(other < expert, totals, 0), 0)
    mine = (theirs == expert).to(tl.int32)
    to = first + tl.sum(tl.where(other == expert, before, 0), 0) + tl.cumsum(mine, 0) - 1
    tl.store(order + to, index, mine > 0)
    tl.store(position + index, to, mine > 0)
    if block == 0:
        end = first + tl.sum(tl.where(other == expert, totals, 0), 0)
        tile = tl.sum(tl.where(other < expert, (totals + ROWS - 1) // ROWS, 0), 0)
        last_tile = tile + (end - first + ROWS - 1) // ROWS
        if expert == tl.num_programs(0) - 1:
            last_tile = slots
        for i in range(tile, last_tile):
            start = tl.minimum(first + (i - tile) * ROWS, end)
            tl.store(tiles + 3 * i, expert)
            tl.store(tiles + 3 * i + 1, start)
            tl.store(tiles + 3 * i + 2, tl.minimum(start + ROWS, end))


@triton.jit
def _grouped(
    x, x_scale, weight, scale, zero, order, tiles, out,
    M: constexpr, K: constexpr, TOP: constexpr, GROUP: constexpr, GATED: constexpr, SINGLE: constexpr, SWAP: constexpr,
    BM: constexpr, BN: constexpr, BK: constexpr, PDL: constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    at_tile = tl.program_id(1)
    lane = tl.arange(0, BK)[None, :]
    wait(PDL)
    if SINGLE:
        expert = tl.load(tiles + at_tile).to(tl.int64)
        first = at_tile
        end = at_tile + 1
    else:
        tile = tiles + 3 * at_tile
        expert = tl.load(tile).to(tl.int64)
        first = tl.load(tile + 1)
        end = tl.load(tile + 2)
    if first == end:
        return
    row = first + tl.arange(0, BM)
    live = (row < end)[:, None]
    if order is None:
        source = row // TOP
    else:
        source = tl.load(order + row, row < end, 0) // TOP
    source_rows = x + source.to(tl.int64)[:, None] * K
    ALL: constexpr = M * (2 if GATED else 1)
    at_output = expert * ALL + tl.minimum(column, M - 1)
    if x_scale is not None:  # after the sums they would have to come from HBM
        x_scales = tl.load(x_scale + tl.where(row < end, source, 0))  # rows past the tile's end have no scale
        scales = tl.load(scale + at_output)
        if GATED:
            up_scales = tl.load(scale + at_output + M)
    at_row = at_output[:, None]
    base = weight + at_row * K + lane
    total = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    up = total
    for k in range(0, K, BK):
        if GROUP > 0:
            loaded = load_words(weight, scale, zero, at_row, k, K, GROUP, BK)
            if GATED:
                others = load_words(weight, scale, zero, at_row + M, k, K, GROUP, BK)
            for i in tl.static_range(4):
                at = k + run_columns(BK // 8) + 16 * i
                values = tl.load(source_rows + at, live & ((at < K) | (K % BK == 0)), 0.0)
                total = add_product(values, pair_tile(loaded, i, x.dtype.element_ty), total, SWAP)
                if GATED:
                    up = add_product(values, pair_tile(others, i, x.dtype.element_ty), up, SWAP)
        else:
            inside = (k + lane < K) | (K % BK == 0)  # a mask that holds everywhere is compiled away
            values = tl.load(source_rows + k + lane, live & inside, 0.0)
            total = add_product(values, tl.load(base + k, inside, 0.0), total, SWAP)
            if GATED:
                up = add_product(values, tl.load(base + M * K + k, inside, 0.0), up, SWAP)
    if x_scale is not None:
        total = scaled_tile(total, x_scales, scales, SWAP)
        if GATED:
            up = scaled_tile(up, x_scales, up_scales, SWAP)
    if GATED:
        total = gelu(total) * up
    if SWAP:
        total = total.T
    offset = out + row.to(tl.int64)[:, None] * M + column[None, :]
    tl.store(offset, cast(total, out.dtype.element_ty), live & (column < M)[None, :])


@triton.jit
def _combine(parts, position, weights, dense, out, N: constexpr, TOP: constexpr, BLOCK: constexpr, PDL: constexpr):
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < N
    wait(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP):
        if position is None:
            offset = (row * TOP + k) * N
        else:
            offset = tl.load(position + row * TOP + k).to(tl.int64) * N
        total += tl.load(parts + offset + column, live, 0.0).to(tl.float32) * tl.load(weights + row * TOP + k)
    tl.store(out + row * (2 * N) + column, tl.load(dense + row * N + column, live), live)
    tl.store(out + row * (2 * N) + N + column, cast(total, out.dtype.element_ty), live)
