"""What a model asks of attention."""

from typing import Protocol

from torch import Tensor

from engine.geometry import Layer
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache


class AttentionBackend(Protocol):
    """Attends over pages. The batch's own K and V are written before it is called."""

    def attend(self, q: Tensor, layer: Layer, batch: ForwardBatch, cache: GroupCache) -> Tensor:
        """q [T, heads, head_dim], normed and roped -> [T, heads, head_dim]; keys and values are those of `layer.kv_source`."""
        ...
