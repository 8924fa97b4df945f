"""Sends each block of a step's rows to the part that was chosen for its kind and KV group."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from engine.attention.backend_entry import RowKind
from engine.geometry import Layer
from engine.rank.attention.base import AttentionPart, AttentionPlan, Norms
from engine.rank.batch import ForwardBatch, RowBlock
from engine.rank.kv import GroupCache


class SpanExtend:
    """Chunks by `usual`; those of a step in which tokens see each other both ways by `own`, which alone masks them so."""

    def __init__(self, usual: AttentionPart, own: AttentionPart) -> None:
        self._usual, self._own = usual, own

    def prepare(self, block: RowBlock) -> tuple[AttentionPart, Any]:
        """The part, and what it prepared."""
        part = self._own if block.has_spans else self._usual
        return part, part.prepare(block)

    def attend(
        self, qkv: Tensor, layer: Layer, norms: Norms, block: RowBlock, plan: tuple[AttentionPart, Any], out: Tensor
    ) -> None:
        """As `AttentionPart.attend`."""
        part, prepared = plan
        part.attend(qkv, layer, norms, block, prepared, out)


class AttentionRouter:
    """An `AttentionBackend` of parts by kind of rows, in the KV groups' order."""

    def __init__(self, parts: Mapping[RowKind, Sequence[AttentionPart]]) -> None:
        self._parts = parts

    def prepare(self, batch: ForwardBatch) -> AttentionPlan:
        """As `AttentionBackend.prepare`."""
        return tuple(tuple(part.prepare(block) for part in self._parts[block.kind]) for block in batch.blocks)

    def attend(
        self, qkv: Tensor, layer: Layer, norms: Norms, batch: ForwardBatch, plan: AttentionPlan, group: GroupCache, out: Tensor
    ) -> None:
        """As `AttentionBackend.attend`."""
        index = group.group.index
        for block, prepared in zip(batch.blocks, plan, strict=True):
            part = self._parts[block.kind][index]
            part.attend(qkv[block.rows], layer, norms, block, prepared[index], out[block.rows])
