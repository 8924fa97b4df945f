"""Plain-torch attention, on any device: what other backends are held to."""

import torch
from torch import Tensor

from engine.geometry import Layer
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache
from kernels.decode import paged_decode
from kernels.prefill import paged_prefill


class ReferenceAttention:
    """Chunks one by one, decode rows together."""

    def attend(self, q: Tensor, layer: Layer, batch: ForwardBatch, cache: GroupCache) -> Tensor:
        pool, window = cache.layer(layer.kv_source), cache.group.window
        out = torch.empty_like(q)
        for chunk in batch.chunks:
            rows = slice(chunk.offset, chunk.offset + chunk.size)
            out[rows] = paged_prefill(q[rows], pool, cache.table[chunk.slot], chunk.start, window)
        rows = slice(batch.decode_start, None)
        slots, positions = batch.slots[rows], batch.positions[rows]
        out[rows] = paged_decode(q[rows], pool, cache.table, slots, positions, batch.decode_bounds, window)
        return out
