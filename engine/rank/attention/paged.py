"""Attention by Quartet's own ops: decode rows in one launch a layer; chunks by a launch for K and V, and one for all queries.

The ops choose: Triton kernels on a GPU (`TritonAttention`), plain torch elsewhere (`ReferenceAttention`).
"""

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.geometry import Geometry, Layer
from engine.rank.attention.base import AttentionPlan
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache, KVCache
from kernels.decode import DecodeScratch, DecodeTile, decode_attention, decode_cut
from kernels.launch import processors
from kernels.prefill import extend_attention, extend_tiles, tile_tokens
from kernels.qkv import qkv_post


class PagedAttention:
    """For steps of decode rows padded to one of `buckets`, ascending; other numbers of rows are launched as the next bucket is."""

    def __init__(self, geometry: Geometry, cache: KVCache, tp: int, buckets: Sequence[int], device: torch.device) -> None:
        self._eps, self._device = geometry.eps, device
        self._heads = geometry.heads // tp
        self._processors = processors(device)
        self._groups = cache.groups
        self._buckets = tuple(buckets)
        self._cuts = [[self._cut(group, rows) for rows in buckets] for group in cache]
        self._scratch = [self._scratch_of(group, cuts) for group, cuts in zip(cache, self._cuts, strict=True)]

    def _cut(self, group: GroupCache, rows: int) -> tuple[int, DecodeTile]:
        return decode_cut(rows, group.pool[0], group.read_width, self._processors)

    def _scratch_of(self, group: GroupCache, cuts: Sequence[tuple[int, DecodeTile]]) -> DecodeScratch:
        parts = max(rows * splits for rows, (splits, _) in zip(self._buckets, cuts, strict=True))
        return DecodeScratch(self._buckets[-1], self._heads, group.group.kv_heads, group.group.head_dim, parts, self._device)

    def prepare(self, batch: ForwardBatch) -> AttentionPlan:
        """The chunks, cut into tiles of queries."""
        if not batch.chunks:
            return AttentionPlan()
        chunks = [(chunk.slot, chunk.offset, chunk.start, chunk.size) for chunk in batch.chunks]
        tiles = []
        for cache in self._groups:
            tokens = tile_tokens(self._heads, cache.group.kv_heads, cache.group.head_dim)
            tiles.append(torch.tensor(extend_tiles(chunks, tokens), dtype=torch.int32).to(self._device, non_blocking=True))
        return AttentionPlan(tuple(tiles))

    def attend(
        self,
        qkv: Tensor,
        layer: Layer,
        norms: tuple[Tensor, Tensor | None],
        batch: ForwardBatch,
        plan: AttentionPlan,
        group: GroupCache,
        out: Tensor,
    ) -> None:
        """As `AttentionBackend.attend`."""
        rope, pool, first = batch.rope[layer.rope, layer.head_dim], group.layer(layer.kv_source), batch.decode_start
        index, window = group.group.index, group.group.window
        if first:
            chunked = slice(0, first)
            q = qkv.new_empty(first, self._heads, layer.head_dim)
            places = (batch.slots[chunked], batch.positions[chunked], rope[chunked])
            qkv_post(qkv[chunked], pool, group.table, *places, *norms, self._eps, q)
            extend_attention(q, pool, group.table, plan.tiles[index], window, out[chunked].view(q.shape))
        rows = batch.rows - first
        if rows:
            cut = self._cuts[index][bisect.bisect_left(self._buckets, rows)]
            decode_attention(
                qkv[first:], pool, batch.pages[index], batch.positions[first:], rope[first:], *norms, self._eps, window,
                self._scratch[index], out[first:], *cut,
            )  # fmt: skip


class TritonAttention(PagedAttention):
    """On a GPU, or where a GPU's launches are only listed (`kernels.launch.record`)."""

    def __init__(self, geometry: Geometry, cache: KVCache, tp: int, buckets: Sequence[int], device: torch.device) -> None:
        if device.type == "cpu":
            raise ConfigError("attention: triton needs a GPU; this engine runs on the CPU, where reference is the backend")
        super().__init__(geometry, cache, tp, buckets, device)


class ReferenceAttention(PagedAttention):
    """Plain torch, on the CPU."""

    def __init__(self, geometry: Geometry, cache: KVCache, tp: int, buckets: Sequence[int], device: torch.device) -> None:
        if device.type == "cuda":
            raise ConfigError("attention: reference runs on the CPU; on a GPU triton is the backend")
        super().__init__(geometry, cache, tp, buckets, device)
