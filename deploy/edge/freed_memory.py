"""Gives memory back to the kernel after a burst of large bodies.

glibc maps large blocks apart from the heap. When such a block is freed it raises the size from which it does so, up to 32 MiB.
Later bodies then lie on the heap, where one small block above them keeps all of it. A fixed size keeps bodies apart from the heap,
and the pieces that they arrive in.
"""

import ctypes

_M_MMAP_THRESHOLD = -3
_APART_BYTES = 1 << 16  # a piece of a body, as uvicorn reads it


def keep_large_blocks_apart() -> None:
    """Sets this for the process. OSError: the C library has no such setting."""
    if not ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _APART_BYTES):
        raise OSError("mallopt(M_MMAP_THRESHOLD)")
