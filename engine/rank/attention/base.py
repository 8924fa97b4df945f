"""What a model asks of attention, and what a step's two kinds of rows ask of a backend.

    AttentionBackend   what the model sees: everything between the QKV product and the output product
    DecodePart         one KV group's decode rows: from the raw product on
    ExtendPart         one KV group's prefill chunks: queries that are normed and roped, K and V already in their pages
    AttentionParts     what makes both, for one backend

Parts are made for one group each, so that the groups, and decode rows and chunks, may run on different backends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.geometry import KVGroup, Layer
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache

Norms = tuple[Tensor, Tensor | None]  # weights [head_dim] of q's norm and, where the layer owns K and V, of k's


class CopyCheck(Protocol):
    """Holds rows of page ids that a part copied from its group's table against what the plans say (`debug_pages`)."""

    def __call__(self, group: KVGroup, copies: Tensor, slots: Tensor, positions: Tensor, window: int | None) -> None:
        """As `kernels.table_check.check_copies`. A graph can hold it."""
        ...


@dataclass(frozen=True)
class PartSettings:
    """What parts are made for. heads: query heads of this rank; buckets: the rows that decode steps are padded to, ascending;
    check: called by a part for the rows of page ids that it copies, before a kernel reads them."""

    heads: int
    eps: float
    buckets: tuple[int, ...]
    device: torch.device
    check: CopyCheck | None = None


@dataclass(frozen=True)
class AttentionPlan:
    """What the parts prepared of a step, by KV group; empty for a kind of rows that the step lacks."""

    decode: tuple[Any, ...] = ()
    extend: tuple[Any, ...] = ()


class DecodePart(Protocol):
    """Decode rows of one KV group."""

    def prepare(self, batch: ForwardBatch) -> Any:
        """Once a step that has decode rows, before `attend`. A graph can hold it: it asks the host nothing."""
        ...

    def attend(self, qkv: Tensor, layer: Layer, norms: Norms, batch: ForwardBatch, plan: Any, out: Tensor) -> None:
        """qkv [rows, ...] and out [rows, heads * head_dim] of the decode rows alone; their K and V go into their pages."""
        ...


class ExtendPart(Protocol):
    """Prefill chunks of one KV group."""

    def prepare(self, batch: ForwardBatch) -> Any:
        """Once a step that has chunks, before `attend`."""
        ...

    def attend(self, q: Tensor, layer: Layer, plan: Any, out: Tensor) -> None:
        """q and out [chunk rows, heads, head_dim]."""
        ...


@dataclass(frozen=True)
class AttentionParts:
    """What makes the parts of one backend on one rank. ConfigError: the backend has no kernels for a group.

    A backend's module has a function `parts(settings: PartSettings, *, download: bool, for_check: bool) -> AttentionParts`.
    download: kernels that the node lacks may be fetched;  for_check: for the few rows of the check at start.
    """

    decode: Callable[[GroupCache], DecodePart]
    extend: Callable[[GroupCache], ExtendPart]


class AttentionBackend(Protocol):
    """Everything between the QKV product and the output product."""

    def prepare(self, batch: ForwardBatch) -> AttentionPlan:
        """Once a step, before `attend`. Of decode rows alone it asks the host nothing, so that a graph can hold the step."""
        ...

    def attend(
        self, qkv: Tensor, layer: Layer, norms: Norms, batch: ForwardBatch, plan: AttentionPlan, group: GroupCache, out: Tensor
    ) -> None:
        """qkv [T, (heads + kv_projections * kv_heads) * head_dim], the raw product: q, then k and v, if the layer has its own.

        Writes K and V of every row into the pages of `group`, which holds those of `layer.kv_source`, and out
        [T, heads * head_dim].
        """
        ...
