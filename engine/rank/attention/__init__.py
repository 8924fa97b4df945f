"""Makes a rank's attention; a backend's module is imported only if it is chosen."""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from engine.attention import BACKENDS, REFERENCE
from engine.attention.backend_entry import RowKind
from engine.config import EngineConfig
from engine.geometry import Geometry, KVGroup, Layer
from engine.rank.attention.base import AttentionBackend, AttentionPart, AttentionParts, CopyCheck, Norms, PartSettings
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache, KVCache

FailedChecks = Collection[tuple[RowKind, int]]  # kinds of rows of KV groups that run our own ops whatever was asked for


@dataclass(frozen=True)
class SpanExtend:
    """Uses `own` for steps with bidirectional spans, which only our ops mask."""

    usual: AttentionPart
    own: AttentionPart

    def prepare(self, block: ForwardBatch) -> tuple[AttentionPart, Any]:
        if block.last_seen is None:
            part = self.usual
        else:
            part = self.own
        return part, part.prepare(block)

    def attend(
        self, qkv: Tensor, layer: Layer, norms: Norms, block: ForwardBatch, plan: tuple[AttentionPart, Any], out: Tensor
    ) -> None:
        part, prepared = plan
        part.attend(qkv, layer, norms, block, prepared, out)


def attention_backend(
    config: EngineConfig | None,
    geometry: Geometry,
    cache: KVCache,
    tp: int,
    buckets: Sequence[int],
    check: CopyCheck | None = None,
    width: int = 1,
    failed_checks: FailedChecks = (),
) -> AttentionBackend:
    """The attention of a rank, of the backends that `config` names; None: our own ops.

    buckets: row counts of decode steps, ascending; check: of page ids that parts copy; width: most decode rows of a sequence
    """
    device = cache.groups[0].table.device
    settings = PartSettings(geometry.heads // tp, geometry.eps, tuple(buckets), device, check, width)
    download = config is not None and config.flashinfer_download
    made = functools.cache(lambda module: import_module(module).parts(settings, download=download))
    own = made(REFERENCE.parts)

    def parts(kind: RowKind, group: KVGroup) -> AttentionParts:
        name = None if config is None else config.attention_of(kind)
        if name is None or (kind, group.index) in failed_checks:
            return own
        return made(BACKENDS[name].parts)

    def extend(pages: GroupCache) -> AttentionPart:
        usual = parts("extend", pages.group)
        if usual is own or not pages.group.bidirectional:
            return usual.extend(pages)
        return SpanExtend(usual.extend(pages), own.extend(pages))

    decodes = [parts("decode", pages.group).decode(pages) for pages in cache]
    extends = [extend(pages) for pages in cache]
    return AttentionBackend(cache, settings, {"decode": decodes, "extend": extends})
