"""Paged attention of prefill chunks: many queries of one sequence, keys read from its pages.

    extend_attention    all chunks of a step, cut into tiles of queries by `extend_tiles`
    paged_prefill       one chunk

    o_i = sum_j softmax_j( q_i . k_j ) v_j     over the keys j that position i sees:  j <= i, and j > i - window if there is one

Scale 1.0, no cap. Query head h reads KV head h // (heads / kv_heads). Scores, softmax and sums are fp32. Pages that no query of
the chunk sees are not touched: what lies there, NaN included, changes nothing.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_SCORES = 1 << 26  # scores held at once (256 MiB): long chunks run in blocks of queries


def tile_tokens(heads: int, kv_heads: int, head_dim: int) -> int:
    """Queries of one sequence that a tile holds: as many as fill the rows of a matrix product with the heads of a KV head."""
    return max(1, (128 if head_dim <= 256 else 64) // (heads // kv_heads))


def extend_tiles(chunks: Iterable[tuple[int, int, int, int]], tokens: int) -> list[tuple[int, int, int, int]]:
    """Chunks (slot, first row, first position, count) -> the same, cut into tiles of up to `tokens` queries, the longest first."""
    tiles = [
        (slot, row + done, position + done, min(tokens, count - done))
        for slot, row, position, count in chunks
        for done in range(0, count, tokens)
    ]
    return sorted(tiles, key=lambda tile: -tile[2])


def extend_attention(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    tiles: Tensor,
    window: int | None,
    out: Tensor,
) -> None:
    """q [T, heads, d], normed and roped -> out [T, heads, d]; rows that no tile names are left alone.

    pool   one layer's [pages, 2, kv_heads, page, d]; the chunks' own keys are already in it
    table  int32 [slots, width]
    tiles  int32 [n, 4], (slot, first row, first position, count): `count` queries of `slot` at consecutive positions, in rows
           that follow each other; count at most `tile_tokens(...)`. See `extend_tiles`
    window keys a position sees, its own included; None: all
    """
    assert q.shape == out.shape, (q.shape, out.shape)
    assert q.shape[2] == pool.shape[4], (q.shape, pool.shape)
    assert tiles.shape[1] == 4, tiles.shape
    for slot, row, position, count in _whole(tiles.tolist()):
        out[row : row + count] = paged_prefill(q[row : row + count], pool, table[slot], position, window)


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


def _whole(tiles: Iterable[Sequence[int]]) -> list[list[int]]:
    """Tiles that continue one another, put together again."""
    chunks: list[list[int]] = []
    for slot, row, position, count in sorted(tiles, key=lambda tile: tile[1]):
        last = chunks[-1] if chunks else [-1, 0, 0, 0]
        if (slot, row, position) == (last[0], last[1] + last[3], last[2] + last[3]):
            last[3] += count
        else:
            chunks.append([slot, row, position, count])
    return chunks
