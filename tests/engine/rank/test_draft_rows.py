"""Attention of decode rows with drafts behind them, through the parts that a rank runs."""

from dataclasses import replace

import pytest
import torch

from engine.rank.batch import ForwardBatch
from engine.rank.kv import KVCache
from kernels.launch import plain_torch
from tests.support import interpreter
from tests.support.engine.kv_scene import FULL, SLIDING, Kind, Scene, ours, relative, scene

pytestmark = pytest.mark.cpu

WIDTH = 3
STARTS = [0, 31, 62, 63, 64, 94, 200]  # of the rows' first queries: at page edges and window edges
KINDS = [Kind(4, 2, 32, 64), Kind(4, 1, 32, None, kv_projections=1), Kind(4, 2, 32, 64, kv_projections=0)]


def drafted(it: Scene, width: int = WIDTH) -> Scene:
    """The scene whose chunks are decode rows with their drafts."""
    batch, cache = it.batch, it.cache
    pages = torch.zeros((len(STARTS), cache.table.shape[1]), dtype=torch.int32)
    KVCache([cache]).gather(batch.slots, batch.positions, (pages,))
    rows = ForwardBatch(batch.ids, batch.positions, batch.slots, batch.rope, (pages,), width=width)
    return replace(it, batch=rows, settings=replace(it.settings, width=width))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_several_queries_are_chunks_of_as_many(kind: Kind) -> None:
    """A sequence's input and drafts attend as a chunk of a prompt does, and write the same K and V; rows shifted by one do not."""
    it = scene(kind, [], [(start, start + WIDTH) for start in STARTS])
    chunks, rows = it.copy(), drafted(it.copy())
    want = ours(chunks)
    assert relative(ours(rows), want) < 1e-5
    assert torch.equal(rows.cache.pool, chunks.cache.pool)
    shifted = drafted(it.copy())
    shifted = replace(shifted, batch=replace(shifted.batch, positions=(shifted.batch.positions - 1).clamp(min=0)))
    assert relative(ours(shifted), want) > 1e-2


def test_padding_writes_nothing() -> None:
    """A row with fewer drafts gives the same for those it has, zeros behind, and writes no K and V of them."""
    it = scene(KINDS[0], [], [(start, start + WIDTH) for start in STARTS])
    whole, fewer = drafted(it.copy()), drafted(it.copy())
    positions = fewer.batch.positions.clone()
    positions[2::WIDTH] = -1
    fewer = replace(fewer, batch=replace(fewer.batch, positions=positions))
    before = fewer.cache.pool.clone()
    want, found = ours(whole), ours(fewer)
    assert not found[2::WIDTH].any()
    assert relative(found, want.index_fill(0, torch.arange(2, len(want), WIDTH), 0)) < 1e-5
    written = (fewer.cache.pool != before).any(-1).sum()
    assert written == 2 * len(STARTS) * 2 * KINDS[0].kv_heads


def test_the_members_layers() -> None:
    """Heads of 256 and 512, a window and none."""
    for kind in (replace(SLIDING, window=64), FULL):
        it = scene(kind, [], [(start, start + WIDTH) for start in STARTS])
        assert relative(ours(drafted(it.copy())), ours(it.copy())) < 1e-5


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


def interpreted_keys_are_read_from_values() -> None:
    """Rows with drafts read K from V where rope does not turn it, whatever is there, and so do queries alone, whose K and V are
    stored; without K's weight these read all of K. Planted fault: K is another there."""
    it = drafted(scene(Kind(4, 1, 128, None, kv_projections=1), [], [(start, start + WIDTH) for start in STARTS]))
    with plain_torch():
        want = ours(it.copy())
    queries = it.qkv[:, : it.settings.heads * it.layer.head_dim].contiguous()
    for spoilt in (False, True):
        rows = it.copy()
        if spoilt:
            rows.cache.pool[0, :, 0, ..., it.layer.rope.pairs : it.layer.head_dim // 2] = 5.0
        alone = replace(rows, qkv=queries)
        assert max(relative(ours(rows), want), relative(ours(alone), want)) < 1e-5
        assert (relative(ours(replace(alone, norms=(it.norms[0], None))), want) < 1e-5) != spoilt
