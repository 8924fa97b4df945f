"""Paged attention of decode rows: one query a sequence, each at its own position, which only the device knows.

    o = sum_j softmax_j( q . k_j ) v_j     over the keys j that position p sees:  j <= p, and j > p - window if there is one

Scale 1.0, no cap; scores, softmax and sums fp32, as in `kernels.prefill`. The host knows an upper bound of each row's length, which
sizes the work: rows are gathered up to the largest bound (with a window: the window's pages only) and masked by position. Keys that
a row does not see may be anything, NaN included: their scores and their values are replaced, not multiplied by zero.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.prefill import gather

_GATHERED = {"cpu": 1 << 20, "cuda": 1 << 27}  # elements of K gathered at once: what a cache holds; what spares launches


def paged_decode(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    bounds: Sequence[int],
    window: int | None,
) -> Tensor:
    """q [B, heads, d] -> [B, heads, d].

    pool one layer's [pages, 2, kv_heads, page, d]; table int32 [slots, width]; slots and positions int64 [B] on the device;
    bounds: for each row a host number that is at least its position + 1.
    """
    assert q.shape[0] == slots.shape[0] == positions.shape[0] == len(bounds), (q.shape, slots.shape, len(bounds))
    assert q.shape[2] == pool.shape[4], (q.shape, pool.shape)
    assert max(bounds, default=0) <= table.shape[1] * pool.shape[3], (max(bounds), table.shape, pool.shape)
    out = torch.empty_like(q)
    held = _GATHERED[q.device.type] // pool[0, 0].numel()
    for rows, pages in _blocks(bounds, pool.shape[3], window, held):
        out[rows] = _decode_reference(q[rows], pool, table, slots[rows], positions[rows], pages, window)
    return out


def _blocks(bounds: Sequence[int], page: int, window: int | None, held: int) -> Iterator[tuple[slice, int]]:
    """Runs of rows, and how many pages each row of a run reads: enough for its longest bound, no more than `held` in all."""
    first = 0
    while first < len(bounds):
        last, pages = first, 0
        while last < len(bounds):
            wider = max(pages, _pages(bounds[last], page, window))
            if last > first and wider * (last + 1 - first) > held:
                break
            last, pages = last + 1, wider
        yield slice(first, last), pages
        first = last


def _pages(bound: int, page: int, window: int | None) -> int:
    whole = -(-bound // page)
    return whole if window is None else min(whole, (window - 2) // page + 2)


def _decode_reference(
    q: Tensor, pool: Tensor, table: Tensor, slots: Tensor, positions: Tensor, pages: int, window: int | None
) -> Tensor:
    rows, heads, d = q.shape
    kv_heads, page = pool.shape[2], pool.shape[3]
    here = positions[:, None]
    base = torch.zeros_like(here) if window is None else (here - window + 1).clamp(min=0) // page
    entries = base + torch.arange(pages, device=q.device)
    used = entries * page <= here  # entries past the row's own page are not read: the null page stands in, and is masked below
    found = torch.where(used, table[slots[:, None], entries.clamp(max=table.shape[1] - 1)], 0)
    keys = entries[..., None] * page + torch.arange(page, device=q.device)  # [rows, pages, page]
    seen = keys <= here[..., None]
    if window is not None:
        seen &= keys > here[..., None] - window
    k, v = (side.unflatten(0, (rows, pages)) for side in gather(pool, found.flatten()))
    v.masked_fill_(~seen[:, :, None, :, None], 0.0)
    grouped = q.float().view(rows, 1, kv_heads, -1, d)
    scores = (grouped @ k.transpose(-1, -2)).masked_fill(~seen[:, :, None, None], -torch.inf)
    weights = scores.transpose(1, 3).flatten(-2).softmax(-1).unflatten(-1, (pages, page)).transpose(1, 3)
    return (weights @ v).sum(1).reshape(rows, heads, d).to(q.dtype)
