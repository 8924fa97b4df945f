"""Attention over pages in plain torch, for decode, verify and prefill.

    o_i = sum_j softmax_j( q_i . k_j ) v_j     over the keys j that query i sees:  j <= last_seen_i, and j > p_i - window

Scale 1.0, no cap; fp32. Unseen values may be NaN: they are replaced.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.launch import cdiv
from kernels.qkv import by_head
from kernels.slots import first_page

_GATHERED = 1 << 20  # elements of K gathered at once: what a cache holds


def attend_rows(
    q: Tensor, pool: Tensor, page_ids: Tensor, positions: Tensor, window: int | None, out: Tensor, scales: Tensor | None = None
) -> None:
    """`kernels.verify.verify_attention` in plain torch."""
    rows = len(page_ids)
    queries, attended = (x.unflatten(0, (rows, -1)) for x in (q, out))
    at = positions.view(rows, -1)
    first = first_page(at[:, 0], pool.shape[3], window)
    reach = None if window is None else window + at.shape[1] - 1  # keys from the first query's oldest to the last one's own
    for block, pages in _row_blocks((at.amax(1) + 1).tolist(), pool, reach):
        attended[block] = attention(queries[block], pool, page_ids[block, :pages], first[block], at[block], window, at[block])
    out.masked_fill_((positions < 0)[:, None, None], 0.0)
    if scales is not None:
        out.mul_(by_head(scales[1], out.shape[1]))


def attention(
    q: Tensor, pool: Tensor, page_ids: Tensor, first: Tensor, positions: Tensor, window: int | None, last_seen: Tensor
) -> Tensor:
    """q [rows, n, heads, d] at positions int [rows, n] -> its shape and dtype; undefined below position 0. pool as in
    `decode_attention`.

    page_ids   int [rows, pages]: from page `first` int [rows] on; entries after the last key seen are not read
    last_seen  int [rows, n], the last position that each query sees
    """
    rows, n, _, d = q.shape
    kv_heads, page = pool.shape[2:4]
    keys = (first[:, None] * page + torch.arange(page_ids.shape[1] * page, device=q.device))[:, None]
    page_ids = torch.where(keys[:, 0, ::page] <= last_seen.amax(1, keepdim=True), page_ids, 0)  # else the null page: masked
    seen = keys <= last_seen[..., None]  # [rows, n, keys]
    if window is not None:
        seen &= keys > positions[..., None] - window
    page_heads = page_ids[:, None] * 2 * kv_heads + torch.arange(2 * kv_heads, device=q.device).view(2, 1, -1, 1)
    held = torch.embedding(pool.view(-1, page * d).view(torch.uint8), page_heads).view(pool.dtype)  # of any dtype, as bytes
    k, v = held.float().view(2, rows, kv_heads, -1, d)  # [rows, kv_heads, keys, d]
    if not v.sum().isfinite():  # else weights of zero are enough
        v.masked_fill_(~seen.any(1)[:, None, :, None], 0.0)
    grouped = q.float().view(rows, n, kv_heads, -1, d).transpose(1, 2)  # [rows, kv_heads, n, group, d]
    scores = (grouped.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, (n, -1))
    weights = scores.masked_fill_(~seen[:, None, :, None], -torch.inf).softmax(-1)
    return (weights.flatten(2, 3) @ v).unflatten(2, (n, -1)).transpose(1, 2).reshape(q.shape).to(q.dtype)


def pages_of(bound: int, page: int, window: int | None) -> int:
    """Most pages that a query below position `bound` reads."""
    whole = cdiv(bound, page)
    return whole if window is None else min(whole, (window - 2) // page + 2)


def _row_blocks(bounds: Sequence[int], pool: Tensor, window: int | None) -> Iterator[tuple[slice, int]]:
    page = pool.shape[3]
    held = _GATHERED // pool[0, 0].numel()
    first = 0
    while first < len(bounds):
        last = first
        pages = 0
        while last < len(bounds):
            wider = max(pages, pages_of(bounds[last], page, window))
            if last > first and wider * (last + 1 - first) > held:
                break
            last = last + 1
            pages = wider
        yield slice(first, last), pages
        first = last
