"""Attention backends, by name; FlashInfer is imported where it was asked for."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.geometry import Geometry
from engine.rank.attention.base import AttentionBackend, CopyCheck, DecodePart, ExtendPart, Kind, PartSettings
from engine.rank.attention.paged import PagedDecode, PagedExtend
from engine.rank.attention.router import AttentionRouter
from engine.rank.attention.trtllm import TrtllmDecode, TrtllmExtend, TrtllmScratch, load
from engine.rank.kv import GroupCache, KVCache

Unsound = Collection[tuple[Kind, int]]  # kinds of rows of KV groups
BACKENDS = ("reference", "triton", "trtllm_mha")


@dataclass(frozen=True)
class AskedAttention:
    """Backends by kind of rows; None: the device's. unsound: (kind, KV group) that run the house's own ops whatever was asked for,
    because a check at start found the others wrong. download: FlashInfer may fetch kernels that it lacks."""

    decode: str | None = None
    extend: str | None = None
    unsound: Unsound = ()
    download: bool = False

    @classmethod
    def of(cls, config: EngineConfig, unsound: Unsound = ()) -> "AskedAttention":
        """What the settings ask for."""
        decode, extend = config.attention_decode or config.attention, config.attention_extend or config.attention
        return cls(decode, extend, unsound, config.flashinfer_download)


def attention_backend(
    asked: str | AskedAttention | None,
    geometry: Geometry,
    cache: KVCache,
    tp: int,
    buckets: Sequence[int],
    device: torch.device,
    check: CopyCheck | None = None,
) -> AttentionBackend:
    """The backends asked for, one name for all; ConfigError lists the names there are, or says why one cannot run here.

    buckets: the numbers of rows that decode steps are padded to, ascending;  check: of the page ids that parts copy.
    """
    if not isinstance(asked, AskedAttention):
        asked = AskedAttention(asked, asked)
    unsound = asked.unsound
    named: dict[Kind, str] = {"decode": _checked(asked.decode, device), "extend": _checked(asked.extend, device)}
    settings = PartSettings(geometry.heads // tp, geometry.eps, tuple(buckets), device, check)
    theirs = {
        (kind, group.group.index)
        for kind, backend in named.items()
        for group in cache
        if backend == "trtllm_mha" and (kind, group.group.index) not in unsound
    }
    scratch = TrtllmScratch(load(device, download=asked.download), settings) if theirs else None
    decodes: list[DecodePart] = []
    extends: list[ExtendPart] = []
    for group in cache:
        decodes.append(_decode_part(group, settings, scratch if ("decode", group.group.index) in theirs else None))
        extends.append(_extend_part(group, settings, scratch if ("extend", group.group.index) in theirs else None))
    return AttentionRouter(decodes, extends, settings)


def _decode_part(cache: GroupCache, settings: PartSettings, scratch: TrtllmScratch | None) -> DecodePart:
    return PagedDecode(cache, settings) if scratch is None else TrtllmDecode(cache, settings, scratch)


def _extend_part(cache: GroupCache, settings: PartSettings, scratch: TrtllmScratch | None) -> ExtendPart:
    return PagedExtend(cache, settings) if scratch is None else TrtllmExtend(cache, settings, scratch)


def _checked(name: str | None, device: torch.device) -> str:
    name = name or ("triton" if device.type == "cuda" else "reference")
    if name not in BACKENDS:
        raise ConfigError(f"attention: {name!r} is not one of {', '.join(BACKENDS)}")
    if name == "reference" and device.type == "cuda":
        raise ConfigError("attention: reference runs on the CPU; on a GPU triton is the backend")
    if name != "reference" and device.type == "cpu":
        raise ConfigError(f"attention: {name} needs a GPU; this engine runs on the CPU, where reference is the backend")
    return name
