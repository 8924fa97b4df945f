"""Sends each KV group's decode rows and prefill chunks to the parts that were chosen for them."""

from collections.abc import Sequence

from torch import Tensor

from engine.geometry import Layer
from engine.rank.attention.base import AttentionPlan, DecodePart, ExtendPart, Norms, PartSettings
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache
from kernels.qkv import qkv_post


class AttentionRouter:
    """An `AttentionBackend` of a part for decode rows and one for chunks of each KV group, in the groups' order."""

    def __init__(self, decode: Sequence[DecodePart], extend: Sequence[ExtendPart], settings: PartSettings) -> None:
        assert len(decode) == len(extend), (len(decode), len(extend))
        self._decode, self._extend, self._settings = tuple(decode), tuple(extend), settings

    def prepare(self, batch: ForwardBatch) -> AttentionPlan:
        """As `AttentionBackend.prepare`. NotImplementedError for tokens that see each other both ways: no part masks them yet, and
        to run them causally would be a wrong answer."""
        if any(chunk.spans for chunk in batch.chunks):
            raise NotImplementedError("attention: spans that see both ways have no kernel yet")
        decodes = batch.rows > batch.decode_start
        return AttentionPlan(
            tuple(part.prepare(batch) for part in self._decode) if decodes else (),
            tuple(part.prepare(batch) for part in self._extend) if batch.chunks else (),
        )

    def attend(
        self, qkv: Tensor, layer: Layer, norms: Norms, batch: ForwardBatch, plan: AttentionPlan, group: GroupCache, out: Tensor
    ) -> None:
        """As `AttentionBackend.attend`."""
        index, first = group.group.index, batch.decode_start
        if first:
            q, places = qkv.new_empty(first, self._settings.heads, layer.head_dim), batch.chunk_places
            qkv_post(
                qkv[:first], group.layer(layer.kv_source), group.table, places.slots, places.positions,
                places.rope[layer.rope, layer.head_dim], *norms, self._settings.eps, q,
            )  # fmt: skip
            self._extend[index].attend(q, layer, plan.extend[index], out[:first].view(q.shape))
        if batch.rows > first:
            self._decode[index].attend(qkv[first:], layer, norms, batch, plan.decode[index], out[first:])
