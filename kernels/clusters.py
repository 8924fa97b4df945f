"""The best row of a table in each of a query's clusters: a drafter's head.

    best(x; c)  = max_j  x . table[c * size + j]           in fp32; ties: the lowest id
    id          = order[c * size + j]

`kernels.choose.choose_best` decides among clusters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.numerics import cast


def best_of_clusters(x: Tensor, table: Tensor, order: Tensor, clusters: Tensor, count: int) -> Tensor:
    """x [R, n]; table [rows, n] of `count` equal clusters; order int64 [rows]; clusters int64 [R, k] -> fp32 [R, k, 4]: value,
    id, 1 for a NaN, unused."""
    (rows, n), chosen, size = x.shape, clusters.shape[1], len(table) // count
    check_contiguous(x, table, order, clusters)
    if not enabled(x):
        blocks = table.view(-1, size, n)[clusters].float()
        ids = order.view(-1, size)[clusters].float()
        scores = (blocks @ x.float()[:, None, :, None]).squeeze(3)
        nan = scores.isnan().any(2).float()
        scores = scores.masked_fill(scores.isnan(), -torch.inf)
        top = scores.amax(2)
        lowest = ids.masked_fill(scores != top[:, :, None], torch.inf).amin(2)
        return torch.stack([top, lowest, nan, torch.zeros_like(top)], 2)
    best = x.new_empty((rows, chosen, 4), dtype=torch.float32)
    launch(
        _best_of_clusters, (rows, chosen),
        x, table, order, clusters, best,
        N=n, SIZE=size, LANES=next_power_of_2(size), COLUMNS=next_power_of_2(n),
    )  # fmt: skip
    return best


@triton.jit
def _best_of_clusters(
    x, table, order, clusters, best, N: constexpr, SIZE: constexpr, LANES: constexpr, COLUMNS: constexpr, PDL: constexpr
):
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, LANES)
    live = lane < SIZE
    wait(PDL)
    chosen = row * tl.num_programs(1) + part
    line = tl.load(clusters + chosen) * SIZE + lane
    column = tl.arange(0, COLUMNS)
    query = cast(tl.load(x + row * N + column, column < N, 0.0), tl.float32)
    keys = tl.load(table + line[:, None] * N + column[None, :], live[:, None] & (column[None, :] < N), 0.0)
    scores = tl.sum(cast(keys, tl.float32) * query[None, :], 1)
    bad = tl.max(((scores != scores) & live).to(tl.int32), 0)
    scores = tl.where(live & (scores == scores), scores, float("-inf"))
    top = tl.max(scores, 0)
    ids = cast(tl.load(order + line, live, 0), tl.float32)
    out = best + chosen * 4
    tl.store(out, top)
    tl.store(out + 1, tl.min(tl.where(live & (scores == top), ids, float("inf")), 0))
    tl.store(out + 2, cast(bad, tl.float32))
    tl.store(out + 3, 0.0)
