"""The memory arithmetic of the KV cache: how many bytes it may take, and how many pages each group gets. No torch."""

from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.geometry import KVGroup, kv_groups, read_geometry

CPU_BYTES = 1 << 30  # of a whole group, where the device is the machine's own memory
ITEMSIZE = {"float32": 4, "bfloat16": 2}  # bytes of an element, by the setting `dtype`


def gpu_budget(total: int, used: int, fraction: float) -> int:
    """Bytes that a rank may spend on all pools when `used` of a GPU's `total` are taken and all may take `fraction` of them.

    Below zero when more than that is taken already.
    """
    return int(total * fraction) - used


def cpu_budget(tp: int) -> int:
    """Bytes that one of `tp` ranks on a CPU may spend on all pools."""
    return CPU_BYTES // tp


def pages_of(config: EngineConfig, kv_bytes: int) -> tuple[int, ...]:
    """Pages of each KV group: as configured, else what fits `kv_bytes`, the least that any rank has left."""
    if config.pages is not None:
        return config.pages
    groups = kv_groups(read_geometry(Path(config.model)), config.tp, config.page)
    return pool_pages(groups, config.max_seqs, config.max_len, config.prefill_budget, kv_bytes, ITEMSIZE[config.dtype])


def pool_pages(
    groups: Sequence[KVGroup], slots: int, max_len: int, prefill_budget: int, bytes_available: int, itemsize: int
) -> tuple[int, ...]:
    """Pages of each group, null page included, for one rank that may spend `bytes_available` on all pools.

    Sized by need: a sliding group gets what `slots` sequences and one prefill budget can hold at once, a full group what is
    left, and none more than `slots` sequences of `max_len` tokens fill. ConfigError, with the numbers, if not even one page of a
    full group fits.
    """
    pages = {group.index: _windows(group, slots, max_len, prefill_budget) for group in groups if group.window is not None}
    spent = sum(pages[group.index] * group.page_bytes(itemsize) for group in groups if group.index in pages)
    full = [group for group in groups if group.window is None]
    left = bytes_available - spent
    page_bytes = sum(group.page_bytes(itemsize) for group in full)
    count = max(left, 0) // page_bytes if full else 0
    if left < 0 or (full and count < 2):
        raise ConfigError(_does_not_fit(slots, bytes_available, spent, 2 * page_bytes))
    pages |= {group.index: min(count, _most(group, slots, max_len)) for group in full}
    return tuple(pages[group.index] for group in groups)


def _windows(group: KVGroup, slots: int, max_len: int, prefill_budget: int) -> int:
    """Windows of all slots, one prefill budget, the null page."""
    assert group.window is not None
    each = -(-(group.window + 1) // group.page) + 1
    return min(slots * each + -(-prefill_budget // group.page) + 1, _most(group, slots, max_len))


def _most(group: KVGroup, slots: int, max_len: int) -> int:
    return slots * -(-max_len // group.page) + 1


def _does_not_fit(slots: int, available: int, spent: int, least: int) -> str:
    return (
        f"the KV cache does not fit: {available / 2**20:.1f} MiB are available for it, the windows of {slots} sequences "
        f"(max_seqs) and one prefill_budget take {spent / 2**20:.1f} MiB, and full attention needs {least / 2**20:.1f} MiB "
        "at the very least; lower max_seqs, or give it more memory"
    )
