"""Lookup in a vocabulary-parallel table.

    embed(ids) = table[id - first] where this rank holds the row, else zero

Exact under a sum over ranks: at most one term is not zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, enabled, launch, next_power_of_2, trigger, wait


def embed(ids: Tensor, table: Tensor, first: int, placeholders: Tensor, pad: int) -> Tensor:
    """ids int [T]; table [rows, n] of ids from `first` on -> [T, n].

    placeholders int32 [m]: ids of media, which embed as `pad`.
    """
    if not enabled(ids):
        local = torch.where(torch.isin(ids, placeholders), pad, ids) - first
        mine = (local >= 0) & (local < table.shape[0])
        return table[local.clamp(0, table.shape[0] - 1)].masked_fill(~mine[:, None], 0.0)
    out = table.new_empty(ids.shape[0], table.shape[1])
    count = len(placeholders)
    block = min(2048, next_power_of_2(table.shape[1]))
    launch(
        _embed, (ids.shape[0], cdiv(table.shape[1], block)),
        ids, table, placeholders, out, first, pad,
        ROWS=table.shape[0], N=table.shape[1], COUNT=count, WIDTH=next_power_of_2(count), BLOCK=block,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first", "pad"])
def _embed(
    ids, table, placeholders, out, first, pad,
    ROWS: constexpr, N: constexpr, COUNT: constexpr, WIDTH: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    token = tl.load(ids + row)
    if COUNT > 0:
        lane = tl.arange(0, WIDTH)
        equal = tl.load(placeholders + lane, lane < COUNT, -1) == token
        token = tl.where(tl.max(equal.to(tl.int32), 0) > 0, pad, token)
    local = (token - first).to(tl.int64)
    mine = (local >= 0) & (local < ROWS) & (column < N)
    tl.store(out + row * N + column, tl.load(table + local * N + column, mine, 0.0), column < N)
