"""Pools and tables of the KV groups."""

import pytest
import torch

from engine.geometry import KVGroup, Layer, Rope
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache, KVCache

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
GROUP = KVGroup(1, "full", (2, 5), kv_heads=2, head_dim=8, window=None)


@pytest.mark.parametrize(("page", "max_len", "width"), [(32, 1, 8), (32, 256, 8), (32, 257, 16), (16, 257, 32), (64, 1000, 16)])
def test_shapes(page: int, max_len: int, width: int) -> None:
    """A pool has an entry per owned layer; a table row covers max_len, in multiples of 256 positions; both start as zeros."""
    cache = GroupCache(KVGroup(0, "full", (2, 5), 2, 8, None, page), 7, 3, max_len, torch.bfloat16, CPU)
    assert cache.pool.shape == (2, 7, 2, 2, page, 8)
    assert cache.table.shape == (3, width)
    assert width * page >= max_len
    assert (cache.pool.dtype, cache.table.dtype) == (torch.bfloat16, torch.int32)
    assert cache.table.is_contiguous()
    assert not cache.pool.any()
    assert not cache.table.any()


def test_write_lands_where_the_table_says() -> None:
    """K and V of each token are found at its page and offset, in its layer, and nowhere else."""
    cache = GroupCache(GROUP, 6, 2, 100, torch.float32, CPU)
    cache.table[0, :3] = torch.tensor([4, 1, 3])
    cache.table[1, :2] = torch.tensor([5, 2])
    slots, positions = torch.tensor([0, 0, 1, 1]), torch.tensor([31, 64, 0, 33])
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    empty = torch.empty(0, dtype=torch.int64)
    cache.write(5, ForwardBatch(slots, positions, slots, empty, (), ()), k, v)
    for row, (page, offset) in enumerate([(4, 31), (3, 0), (5, 0), (2, 1)]):
        assert torch.equal(cache.layer(5)[page, 0, :, offset], k[row])
        assert torch.equal(cache.layer(5)[page, 1, :, offset], v[row])
    assert cache.pool.count_nonzero() == 2 * k.numel()
    assert not cache.layer(2).any()


def test_a_shared_layer_finds_its_producer() -> None:
    """`of` gives a layer the group that owns the K and V it reads."""
    sliding = GroupCache(KVGroup(0, "sliding", (0, 1), 1, 8, 64), 2, 1, 32, torch.float32, CPU)
    full = GroupCache(GROUP, 2, 1, 32, torch.float32, CPU)
    caches = KVCache([sliding, full])
    for source, expected in ((1, sliding), (5, full)):
        layer = Layer(9, "full", 8, 2, Rope(1e4, 4), 16, k_eq_v=False, kv_source=source)
        assert caches.of(layer) is expected
