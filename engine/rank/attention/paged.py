"""Attention by Quartet's own ops, for the backends `triton` and `reference`."""

import bisect
from functools import partial
from operator import mul

from torch import Tensor

from engine.geometry import Layer
from engine.rank.attention.base import AttentionParts, Norms, PartSettings, normed_queries
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache
from kernels.chunks import extend_tiles
from kernels.decode import DecodeScratch, decode_attention, decode_splits
from kernels.launch import enabled, processors
from kernels.prefill import extend_attention, tile_tokens
from kernels.splitkv import read_pairs
from kernels.verify import verify_attention, verify_cut_of

ExtendPlan = tuple[Tensor, Tensor | None]


class PagedDecode:
    """Decode rows are launched as those of the next bucket."""

    def __init__(self, cache: GroupCache, settings: PartSettings) -> None:
        group = cache.group
        buckets = settings.buckets
        self._cache = cache
        self._settings = settings
        cores = processors(settings.device)
        heads = settings.heads // group.kv_heads
        form = heads, group.kv_heads, group.head_dim, cache.read_width, cores
        self._splits = [decode_splits(rows, *form) for rows in buckets]
        parts = max(map(mul, buckets, self._splits))
        most = settings.width * max(parts, 2 * cores // group.kv_heads)  # also of rows that verify drafts
        self._scratch = DecodeScratch(buckets[-1], settings.heads, group.kv_heads, group.head_dim, most, settings.device)

    def prepare(self, block: ForwardBatch) -> None:
        ...

    def attend(self, qkv: Tensor, layer: Layer, norms: Norms, block: ForwardBatch, _plan: None, out: Tensor) -> None:
        cache = self._cache
        group = self._cache.group
        settings = self._settings
        pages = block.pages[group.index]
        scales = cache.scales.get(layer.kv_source)
        index = bisect.bisect_left(settings.buckets, len(pages))
        bucket = settings.buckets[index]
        if block.width == 1:
            reads = qkv, cache.layers[layer.kv_source], pages, block.positions, block.rope[layer.rope, layer.head_dim]
            decode_attention(
                *reads, *norms, settings.eps, group.window, self._scratch, out, self._splits[index], bucket=bucket, scales=scales
            )
            return
        folds = layer.k_eq_v and norms[1] is not None and enabled(qkv)
        if folds:
            pairs = read_pairs(layer.rope.pairs, cache.pool.element_size())
        else:
            pairs = 0
        queries = settings.heads // group.kv_heads * block.width
        splits, tile = verify_cut_of(cache.pool[0], bucket, queries, pages.shape[1], pairs)
        q, pool = normed_queries(cache, settings, qkv, layer, norms, block, fold=tile.pairs > 0)
        verify_attention(q, pool, pages, block.positions, group.window, self._scratch, out.view(q.shape), splits, tile, scales)


class PagedExtend:
    def __init__(self, cache: GroupCache, settings: PartSettings) -> None:
        self._cache = cache
        self._settings = settings
        self._tokens = tile_tokens(settings.heads, cache.group.kv_heads)

    def prepare(self, block: ForwardBatch) -> ExtendPlan:
        """The tiles int32 [n, 4], and `last_seen` of steps with bidirectional spans."""
        assert block.chunk_list is not None
        rows = len(block.slots)
        tiles = extend_tiles(block.chunk_list, self._tokens if enabled(block.slots) else rows, rows)  # torch takes chunks whole
        return tiles, block.last_seen if self._cache.group.bidirectional else None

    def attend(self, qkv: Tensor, layer: Layer, norms: Norms, block: ForwardBatch, plan: ExtendPlan, out: Tensor) -> None:
        cache = self._cache
        q, pool = normed_queries(cache, self._settings, qkv, layer, norms, block)
        tiles, last_seen = plan
        scales = cache.scales.get(layer.kv_source)
        extend_attention(q, pool, cache.table, tiles, cache.group.window, out.view(q.shape), last_seen, scales)


def parts(settings: PartSettings, **_: bool) -> AttentionParts:
    return AttentionParts(partial(PagedDecode, settings=settings), partial(PagedExtend, settings=settings))
