"""Pools and tables of the KV groups."""

import pytest
import torch

from engine.geometry import KVGroup
from engine.rank.kv import GroupCache, KVCache

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
GROUP = KVGroup(1, "full", (2, 5), kv_heads=2, head_dim=8, window=None)


@pytest.mark.parametrize(("page", "max_len", "width"), [(32, 1, 8), (32, 256, 8), (32, 257, 16), (16, 257, 32), (64, 1000, 16)])
def test_shapes(page: int, max_len: int, width: int) -> None:
    """A pool has an entry per owned layer; a table row covers max_len, in multiples of 256 positions; both start as zeros."""
    cache = GroupCache(KVGroup(0, "full", (2, 5), 2, 8, None, page), 7, 3, max_len, CPU)
    assert cache.pool.shape == (2, 7, 2, 2, page, 8)
    assert cache.table.shape == (3, width)
    assert width * page >= max_len
    assert (cache.pool.dtype, cache.table.dtype) == (torch.bfloat16, torch.int32)
    assert cache.table.is_contiguous()
    assert not cache.pool.any()
    assert not cache.table.any()


@pytest.mark.parametrize(("window", "width"), [(None, 8), (64, 3), (65, 3), (66, 4)])
def test_a_row_reads_its_own_pages(window: int | None, width: int) -> None:
    """Gathered page ids are the slot's, from the window's first page to the row's own; what lies behind is left alone."""
    group = KVGroup(0, "full" if window is None else "sliding", (0,), 1, 8, window)
    cache = GroupCache(group, 100, 3, 256, CPU)
    assert cache.read_width == width
    cache.table.copy_(torch.arange(24).view(3, 8))
    slots, positions = torch.tensor([2, 0, 1, 2], dtype=torch.int32), torch.tensor([200, 5, -1, 95], dtype=torch.int32)
    out = torch.full((4, width), -7, dtype=torch.int32)
    KVCache([cache]).gather(slots, positions, (out,))
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        first = 0 if window is None else max(0, position - window + 1) // 32
        read = [8 * slot + entry for entry in range(first, position // 32 + 1)] if position >= 0 else []
        assert out[row].tolist() == read + [-7] * (width - len(read))
