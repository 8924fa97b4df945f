"""Memory that processes of a test share."""

import os

from engine.channel import create_shared, map_shared


def mapped(size: int) -> memoryview:
    """Maps `size` zeroed bytes, which forks of this process share at the same address."""
    fd = create_shared("shared", size)
    try:
        return map_shared(fd)
    finally:
        os.close(fd)
