"""Sends each block of a step's rows to the part that was chosen for its kind and KV group."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.attention.backend_entry import RowKind
from engine.geometry import Layer
from engine.rank.attention.base import AttentionPart, AttentionPlan, Norms
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache


class AttentionRouter:
    """An `AttentionBackend` of parts by kind of rows, in the KV groups' order."""

    def __init__(self, parts: Mapping[RowKind, Sequence[AttentionPart]]) -> None:
        self._parts = parts

    def prepare(self, batch: ForwardBatch) -> AttentionPlan:
        """As `AttentionBackend.prepare`. NotImplementedError for tokens that see each other both ways: no part masks them yet, and
        to run them causally would be a wrong answer."""
        if any(chunk.spans for chunk in batch.chunks):
            raise NotImplementedError("attention: spans that see both ways have no kernel yet")
        return tuple(tuple(part.prepare(block) for part in self._parts[block.kind]) for block in batch.blocks)

    def attend(
        self, qkv: Tensor, layer: Layer, norms: Norms, batch: ForwardBatch, plan: AttentionPlan, group: GroupCache, out: Tensor
    ) -> None:
        """As `AttentionBackend.attend`."""
        index = group.group.index
        for block, prepared in zip(batch.blocks, plan, strict=True):
            part = self._parts[block.kind][index]
            part.attend(qkv[block.rows], layer, norms, block, prepared[index], out[block.rows])
