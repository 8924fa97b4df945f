"""The attention that a rank runs, of the backends asked for; a backend's module is imported where it was asked for."""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from engine.attention import BACKENDS, REFERENCE
from engine.attention.backend_entry import RowKind
from engine.geometry import Geometry, KVGroup
from engine.rank.attention.base import AttentionBackend, AttentionPart, AttentionParts, CopyCheck, LayerRows, PartSettings
from engine.rank.batch import RowBlock
from engine.rank.kv import GroupCache, KVCache

FailedChecks = Collection[tuple[RowKind, int]]  # kinds of rows of KV groups


@dataclass(frozen=True)
class AttentionConfig:
    """Backends by kind of rows; None: our own ops. failed_checks: (kind, KV group) that run our own ops whatever was asked for.
    download: FlashInfer may fetch kernels that it lacks."""

    decode: str | None = None
    extend: str | None = None
    failed_checks: FailedChecks = ()
    download: bool = False


@dataclass(frozen=True)
class SpanExtend:
    """Chunks by `usual`; those of a step in which tokens see each other both ways by `own`, which alone masks them so."""

    usual: AttentionPart
    own: AttentionPart

    def prepare(self, block: RowBlock) -> tuple[AttentionPart, Any]:
        """Choose the part; returns it, and what it prepared."""
        part = self.own if block.has_spans else self.usual
        return part, part.prepare(block)

    def attend(self, rows: LayerRows, plan: tuple[AttentionPart, Any]) -> None:
        """As `AttentionPart.attend`."""
        part, prepared = plan
        part.attend(rows, prepared)


def attention_backend(
    config: AttentionConfig,
    geometry: Geometry,
    cache: KVCache,
    tp: int,
    buckets: Sequence[int],
    device: torch.device,
    check: CopyCheck | None = None,
    width: int = 1,
) -> AttentionBackend:
    """Build the attention of a rank, of the backends asked for. Tokens that see each other both ways are left to our own.

    buckets: the numbers of rows that decode steps are padded to, ascending;  check: of the page ids that parts copy
    width: decode rows of a sequence at most
    """
    settings = PartSettings(geometry.heads // tp, geometry.eps, tuple(buckets), device, check, width)
    made = functools.cache(lambda module: import_module(module).parts(settings, download=config.download))
    own, asked = made(REFERENCE.parts), {"decode": config.decode, "extend": config.extend}

    def parts(kind: RowKind, group: KVGroup) -> AttentionParts:
        name = asked[kind]
        return own if name is None or (kind, group.index) in config.failed_checks else made(BACKENDS[name].parts)

    def extend(pages: GroupCache) -> AttentionPart:
        usual = parts("extend", pages.group)
        if usual is own or not pages.group.bidirectional:
            return usual.extend(pages)
        return SpanExtend(usual.extend(pages), own.extend(pages))

    decodes = [parts("decode", pages.group).decode(pages) for pages in cache]
    extends = [extend(pages) for pages in cache]
    return AttentionBackend(cache, settings, {"decode": decodes, "extend": extends})
