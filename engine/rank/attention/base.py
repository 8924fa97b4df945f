"""What a model asks of attention."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.geometry import Layer
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache


@dataclass(frozen=True)
class AttentionPlan:
    """What a backend prepares of a step's chunks, once for all layers. tiles: int32 [n, 4] of each KV group, by index
    (`kernels.prefill.extend_tiles`)."""

    tiles: tuple[Tensor, ...] = ()


class AttentionBackend(Protocol):
    """Everything between the QKV product and the output product."""

    def prepare(self, batch: ForwardBatch) -> AttentionPlan:
        """Once a step, before `attend`. For a batch of decode rows alone it makes nothing, so that a graph can hold the step."""
        ...

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
        """qkv [T, (heads + sides * kv_heads) * head_dim], the raw product: q, then k and v as far as the layer has its own.

        norms: of q and, where the layer owns K and V, of k. Writes K and V of every row into the pages of `group`, which holds
        those of `layer.kv_source`, and out [T, heads * head_dim].
        """
        ...
