"""Returns memory to the kernel after a burst of large bodies. glibc raises its threshold for mapped
blocks when one is freed: later bodies stay on the heap, where one small block above keeps all of
it."""

import ctypes

_M_MMAP_THRESHOLD = -3
_APART_BYTES = 1 << 16  # a piece of a body, as uvicorn reads it


def keep_large_blocks_apart() -> None:
    """Fix the threshold. OSError: the C library lacks the setting."""
    if not ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _APART_BYTES):
        raise OSError("mallopt(M_MMAP_THRESHOLD)")
