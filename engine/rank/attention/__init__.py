"""Attention backends, by name; a backend is imported when it is asked for."""

from importlib import import_module

from engine.errors import ConfigError
from engine.rank.attention.base import AttentionBackend

_BACKENDS = {"reference": ("engine.rank.attention.reference", "ReferenceAttention")}


def attention_backend(name: str) -> AttentionBackend:
    """The backend called `name`; ConfigError lists the names there are."""
    if name not in _BACKENDS:
        raise ConfigError(f"attention: {name!r} is not one of {', '.join(_BACKENDS)}")
    module, backend = _BACKENDS[name]
    made: AttentionBackend = getattr(import_module(module), backend)()
    return made
