"""Paged attention of a prefill chunk: many queries of one sequence, keys read from its pages.

    o_i = sum_j softmax_j( q_i . k_j ) v_j     over the keys j that position i sees:  j <= i, and j > i - window if there is one

Scale 1.0, no cap. Query head h reads KV head h // (heads / kv_heads). Scores, softmax and sums are fp32. Pages that no query of
the chunk sees are not touched: what lies there, NaN included, changes nothing.
"""

import torch
from torch import Tensor

_SCORES = 1 << 26  # scores held at once (256 MiB): long chunks run in blocks of queries


def paged_prefill(q: Tensor, pool: Tensor, pages: Tensor, start: int, window: int | None) -> Tensor:
    """q [n, heads, d] at positions start .. start + n - 1 -> [n, heads, d].

    pool   one layer's [pages, 2, kv_heads, page, d]; the chunk's own keys are already in it
    pages  int32 [width], the sequence's row of the page table; entries of positions that are not seen are not read
    window keys a position sees, its own included; None: all
    """
    n, heads, d = q.shape
    assert d == pool.shape[4], (q.shape, pool.shape)
    assert heads % pool.shape[2] == 0, (q.shape, pool.shape)
    assert start + n <= pages.shape[0] * pool.shape[3], (start, n, pages.shape)
    out = torch.empty_like(q)
    block = max(1, _SCORES // (heads * (start + n)))
    for first in range(0, n, block):
        last = min(first + block, n)
        out[first:last] = _prefill_reference(q[first:last], pool, pages, start + first, window)
    return out


def gather(pool: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of `pages` int [m], fresh: fp32 [m, kv_heads, page, d] each."""
    k, v = (pool[:, side].index_select(0, pages).float() for side in (0, 1))
    return k, v


def _prefill_reference(q: Tensor, pool: Tensor, pages: Tensor, start: int, window: int | None) -> Tensor:
    n, heads, d = q.shape
    kv_heads, page = pool.shape[2], pool.shape[3]
    end = start + n
    oldest = 0 if window is None else max(0, start - window + 1)
    base = oldest // page
    found = (side.transpose(0, 1).flatten(1, 2) for side in gather(pool, pages[base : -(-end // page)]))
    k, v = (side[:, oldest - base * page : end - base * page] for side in found)  # [kv_heads, keys, d]
    queries = torch.arange(start, end, device=q.device)[:, None]
    keys = torch.arange(oldest, end, device=q.device)
    seen = keys <= queries if window is None else (keys <= queries) & (keys > queries - window)
    grouped = q.float().view(n, kv_heads, -1, d).permute(1, 2, 0, 3)  # [kv_heads, group, n, d]
    scores = (grouped @ k[:, None].transpose(-1, -2)).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v[:, None]).permute(2, 0, 1, 3).reshape(n, heads, d).to(q.dtype)
