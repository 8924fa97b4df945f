"""The core's figures, made up: what is not said is 0."""

from typing import Any

from engine.protocol import Load, PoolLoad


def load(step: int = 1, pools: list[PoolLoad] | None = None, **figures: Any) -> Load:
    """A Load; `pools`: one with nothing in use, unless given."""
    none = dict.fromkeys(Load.__struct_fields__, 0) | {"draft_positions": [], "draft_switches": []}
    return Load(**none | {"step": step, "pools": [pool("full", 0, 9)] if pools is None else pools} | figures)


def pool(name: str, used: int, total: int) -> PoolLoad:
    """Pages of one KV group."""
    return PoolLoad(group=name, total=total, used=used, cached=0)
