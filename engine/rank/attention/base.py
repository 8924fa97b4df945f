"""The interfaces of attention: everything between the QKV product and the output product."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.backend_entry import RowKind
from engine.geometry import KVGroup, Layer
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache, KVCache
from kernels.qkv import qkv_post, query_dtype

Norms = tuple[Tensor, Tensor | None]  # weights [head_dim] of q's norm and, where the layer owns K and V, of k's
# (group, copies, slots, positions, window): checks rows of page ids that a part copied from its group's table (`debug_pages`), as
# `kernels.table_check.check_rows`. A graph can hold it.
CopyCheck = Callable[[KVGroup, Tensor, Tensor, Tensor, int | None], None]


@dataclass(frozen=True)
class PartSettings:
    heads: int  # query heads of this rank
    eps: float
    buckets: tuple[int, ...]  # row counts of decode steps, ascending
    device: torch.device
    check: CopyCheck | None = None  # called for page ids that a part copies, before a kernel reads them
    width: int = 1  # most decode rows of a sequence


AttentionPlan = tuple[tuple[Any, ...], ...]  # what the parts prepared of each of a step's blocks, by KV group


class AttentionPart(Protocol):
    def prepare(self, block: ForwardBatch) -> Any:
        """Called once a step. For decode rows it does not synchronise, so a graph can hold it."""

    def attend(self, qkv: Tensor, layer: Layer, norms: Norms, block: ForwardBatch, plan: Any, out: Tensor) -> None:
        """qkv [rows, ...] -> out [rows, heads * head_dim]. Writes K and V into their pages."""


class AttentionParts(NamedTuple):
    """ConfigError: no kernels for a group.

    A backend's module has `parts(settings: PartSettings, *, download: bool) -> AttentionParts`; download: missing kernels may be
    fetched.
    """

    decode: Callable[[GroupCache], AttentionPart]
    extend: Callable[[GroupCache], AttentionPart]


def normed_queries(
    cache: GroupCache, settings: PartSettings, qkv: Tensor, layer: Layer, norms: Norms, block: ForwardBatch, *, fold: bool = False
) -> tuple[Tensor, Tensor]:
    """Writes K and V into their pages; returns normed and roped queries [rows, heads, d], and the pool. fold: `qkv_post`."""
    pool = cache.layers[layer.kv_source]
    q = qkv.new_empty((len(qkv), settings.heads, layer.head_dim), dtype=query_dtype(qkv, pool))
    rope = block.rope[layer.rope, layer.head_dim]
    rows = qkv, pool, cache.table, block.slots, block.positions, rope
    qkv_post(*rows, *norms, settings.eps, q, fold=fold, scales=cache.scales.get(layer.kv_source))
    return q, pool


@dataclass(frozen=True)
class AttentionBackend:
    cache: KVCache
    settings: PartSettings
    parts: Mapping[RowKind, Sequence[AttentionPart]]

    def prepare(self, batch: ForwardBatch) -> AttentionPlan:
        return tuple(tuple(part.prepare(block) for part in self.parts[block.kind]) for block in batch.blocks)

    def store(self, qkv: Tensor, layer: Layer, norms: Norms, batch: ForwardBatch) -> None:
        for block, rows in zip(batch.blocks, qkv.split([block.rows for block in batch.blocks]), strict=True):
            normed_queries(self.cache.of(layer), self.settings, rows, layer, norms, block)

    def attend(self, qkv: Tensor, layer: Layer, norms: Norms, batch: ForwardBatch, plan: AttentionPlan, out: Tensor) -> None:
        """qkv [T, (heads + kv_projections * kv_heads) * head_dim], raw -> out [T, heads * head_dim]. Writes K and V of layers
        that own them."""
        index = self.cache.of(layer).group.index
        first = 0
        for block, prepared in zip(batch.blocks, plan, strict=True):
            rows = slice(first, first + block.rows)
            self.parts[block.kind][index].attend(qkv[rows], layer, norms, block, prepared[index], out[rows])
            first += block.rows
