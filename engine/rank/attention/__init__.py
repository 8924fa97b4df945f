"""Attention backends, by name; a backend is imported when it is asked for."""

from collections.abc import Sequence
from importlib import import_module

import torch

from engine.errors import ConfigError
from engine.geometry import Geometry
from engine.rank.attention.base import AttentionBackend
from engine.rank.kv import KVCache

_BACKENDS = {
    "reference": ("engine.rank.attention.paged", "ReferenceAttention"),
    "triton": ("engine.rank.attention.paged", "TritonAttention"),
}


def attention_backend(
    name: str | None, geometry: Geometry, cache: KVCache, tp: int, buckets: Sequence[int], device: torch.device
) -> AttentionBackend:
    """The backend called `name`, by default the one for the device; ConfigError lists the names there are.

    buckets: the numbers of rows that decode steps are padded to, ascending.
    """
    name = name or ("triton" if device.type == "cuda" else "reference")
    if name not in _BACKENDS:
        raise ConfigError(f"attention: {name!r} is not one of {', '.join(_BACKENDS)}")
    module, backend = _BACKENDS[name]
    made: AttentionBackend = getattr(import_module(module), backend)(geometry, cache, tp, buckets, device)
    return made
