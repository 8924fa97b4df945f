"""A layer's attention of decode rows: head norms, rope, append of K and V, attention over pages.

The formula is that of `kernels.paged_attention`, with a row's own position as last_seen.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kernels.launch import cdiv, check_contiguous, enabled, launch, shared_memory
from kernels.paged_attention import attend_rows, pages_of
from kernels.qkv import qkv_post
from kernels.slots import first_page
from kernels.splitkv import ROWS, decode_kernel, read_pairs


@dataclass(frozen=True)
class DecodeTile:
    """A CTA takes every `splits`-th run of `keys` keys, and d / `values` columns of V."""

    keys: int
    values: int
    warps: int
    stages: int
    early: bool  # load the first run before q is normed
    pairs: int = 0  # where K is V times a weight before rotation, only these pairs of K are read; 0: all

    def shared_bytes(self, d: int) -> int:
        return 2 * (self.stages - 1) * self.keys * ((2 * self.pairs or d) + d // self.values) + 4 * 16 * d


class DecodeScratch:
    """Tickets are zeroed once and left zero; consecutive launches share it."""

    def __init__(self, max_rows: int, heads: int, kv_heads: int, head_dim: int, max_parts: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.max_parts = max_parts
        self.tickets = torch.zeros(max_rows * kv_heads * _MOST_VALUES, dtype=torch.int32, device=device)  # splits that are done
        size = max_parts if enabled(self.tickets) else 0
        # Outputs of splits, and their base-2 log-sum-exp.
        self.parts = torch.empty((size, heads, head_dim), dtype=torch.float32, device=device)
        self.lse = torch.empty((size, _MOST_VALUES, heads), dtype=torch.float32, device=device)


_MOST_VALUES = 8


def decode_splits(rows: int, group: int, kv_heads: int, head_dim: int, pages: int, processors: int) -> int:
    """Splits along the keys, fitted to an H200 (tests/bench/attention.py). pages: most of a row."""
    most = min(pages, 33)
    heads = rows * kv_heads
    # A multiprocessor holds three CTAs: fill all, or two thirds where rows or heads are many.
    if head_dim <= 256:
        fewer = 4 * heads > processors or (group >= 4 and 2 * heads * pages > processors)
        splits = 3 if 4 * heads > 9 * processors else (3 - fewer) * processors // heads
        return cdiv(pages, cdiv(pages, min(max(1, splits), most, cdiv(pages, 1 + fewer))))

    def turns(splits: int, held: int) -> float:
        adding = 0.65 * splits if 2 * heads * splits > processors else 0.0
        ctas = heads * min(splits, held)
        run = cdiv(held, splits)
        return (1.5 * run + 9 if ctas <= processors else cdiv(ctas, 2 * processors) * (2 * run + 10)) + adding

    # At 512 it holds one or two; the splits are taken that are never far from the fewest turns.
    options = range(1, most + 1)
    lengths = [pages, *(1 << n for n in range(5, pages.bit_length()) if 1 << n < pages)]
    fewest = {held: min(turns(splits, held) for splits in options) for held in lengths}
    return min(options, key=lambda splits: max(turns(splits, held) / fewest[held] for held in lengths))


@cache
def decode_tile(d: int, page: int, ctas: int, turns: int, itemsize: int, shared: int, pairs: int = 0) -> DecodeTile:
    """The fastest measured cut (tests/bench/attention.py). turns: most pages of a split; itemsize: bytes of a number in pages."""
    if itemsize == 4:
        return DecodeTile(16, 1, 4, 2, early=False, pairs=pairs)
    keys = min(page, 32)
    if d <= 256 and ctas > 8 * 132:
        tile = DecodeTile(2 * keys, 1, 4, 2, early=False)  # waves of CTAs follow one another: fewer, longer turns
    elif d <= 256:
        tile = DecodeTile(keys, 2 if ctas <= 132 else 1, 4, 3, early=False) if turns > 1 else DecodeTile(keys, 1, 4, 2, early=True)
    elif ctas <= 66 and turns <= 2:
        tile = DecodeTile(keys, 4, 4, 2, early=True) if ctas <= 33 else DecodeTile(keys, 2, 8, 2, early=True)
    else:
        values = 4 if ctas <= 33 else 2 if ctas <= 66 and not pairs else 1
        tile = DecodeTile(keys, values, 4, 3, early=False, pairs=pairs if values == 1 else 0)
        if ctas > 132 and 2 * tile.shared_bytes(d) > shared:
            tile = replace(tile, stages=2)
    while tile.shared_bytes(d) > shared and tile.keys > 16:
        tile = replace(tile, stages=2) if tile.stages > 2 else replace(tile, keys=tile.keys // 2)
    if itemsize == 1 and not tile.early:
        tile = replace(tile, stages=2 * tile.stages - 1)
    return tile


def decode_attention(
    qkv: Tensor,
    pool: Tensor,
    page_ids: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor,
    k_norm: Tensor | None,
    eps: float,
    window: int | None,
    scratch: DecodeScratch,
    out: Tensor,
    splits: int,
    tile: DecodeTile | None = None,
    bucket: int = 0,
    scales: Tensor | None = None,
) -> None:
    """Writes `out`, and appends each row's K and V to its page.

    qkv       [rows, (heads + kv_projections * kv_heads) * d], q, k, v heads before their norms. kv_projections 2; 1: v is k's raw
              product, so unrotated dims of K are V times k_norm and may not be read; 0: another layer's K and V
    pool      one layer's [pages, 2, kv_heads, page, d], K at [:, 0], V at [:, 1]
    page_ids  int32 [rows, width], from `kernels.slots.gather_pages`
    positions int32 [rows]; -1: padding, whose output is zero and which appends nothing
    cos_sin   fp32 [rows, 2 * pairs], cos first: of pairs (i, i + d/2), i < pairs
    q_norm    [d], k_norm [d] or None; v is normed without weight
    out       [rows, heads * d] in qkv's dtype
    bucket    rows that the tile is for, if more
    scales    fp32 [2, kv_heads] of e4m3 pages: factors of stored K and V
    """
    rows = qkv.shape[0]
    d = pool.shape[4]
    assert len(out) == len(page_ids) == len(positions) == rows, (qkv.shape, out.shape)
    assert rows <= scratch.max_rows, (rows, scratch.max_rows)
    assert rows * splits <= scratch.max_parts, (rows, splits, scratch.max_parts)
    heads, (kv_heads, page) = out.shape[1] // d, pool.shape[2:4]
    inputs = (qkv, pool, page_ids, positions, cos_sin, q_norm, k_norm)
    if not enabled(qkv):
        q = qkv.new_empty(rows, heads, d)
        own_rows = torch.arange(rows, device=qkv.device)
        gathered = positions - first_page(positions, page, window) * page  # counted from the first page of `page_ids`
        qkv_post(qkv, pool, page_ids, own_rows, gathered, cos_sin, q_norm, k_norm, eps, q, scales=scales)
        attend_rows(q, pool, page_ids, positions, window, out.view(q.shape), scales)
        return
    kv_projections = (qkv.shape[1] // d - heads) // kv_heads
    pairs = cos_sin.shape[1] // 2
    if tile is None:
        turns = cdiv(pages_of(page_ids.shape[1] * page, page, window), splits)
        ctas = max(rows, bucket) * kv_heads * splits
        itemsize = pool.element_size()
        read = read_pairs(pairs, itemsize) if kv_projections == 1 else 0
        tile = decode_tile(d, page, ctas, turns, itemsize, shared_memory(qkv), read)
    assert scales is None or not tile.pairs, "with scales K is not V times a weight"
    check_contiguous(*inputs, out)
    assert heads // kv_heads <= ROWS.value, (heads, kv_heads)
    launch(
        decode_kernel, (qkv.shape[0], kv_heads * tile.values, splits),
        qkv, pool, page_ids, positions, cos_sin, q_norm, q_norm if k_norm is None else k_norm, scales, out,
        scratch.parts, scratch.lse, scratch.tickets, page_ids.shape[1], eps,
        HEADS=heads, KV_HEADS=kv_heads, D=d, PAIRS=pairs, KV_PROJECTIONS=kv_projections, WINDOW=window or 0, PAGE=page,
        SPLITS=splits, KEYS=tile.keys, VALUES=tile.values, EARLY=tile.early, V_AS_K=tile.pairs > 0,
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
