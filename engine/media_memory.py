"""The media memory of a group, an anonymous file: the front writes data of media, ranks read them, the
core frees them.

    | freed | request 7 | freed | request 9 | request 10 |      a place is used once, and what is freed takes no memory
"""

import mmap
import os
from collections import deque
from collections.abc import Iterable

from engine.channel import ChannelBroken

PIECE_BYTES = 1 << 20  # what a rank reads between two looks for a plan


class MediaWriter:
    """`fd` may be closed afterwards."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(os.dup(fd), "wb", buffering=0)
        self._end = 0

    def reserve(self, size: int) -> range:
        """Whole pages."""
        pages = max(1, -(-size // mmap.PAGESIZE))
        reserved = range(self._end, self._end + pages * mmap.PAGESIZE)
        self._end = reserved.stop
        os.ftruncate(self._file.fileno(), self._end)
        return reserved

    def write(self, place: int, data: Iterable[bytes]) -> None:
        """Slow. OSError: no memory."""
        for each in data:
            left = memoryview(each)
            while left:
                written = os.pwrite(self._file.fileno(), left, place)
                place += written
                left = left[written:]

    def close(self) -> None:
        self._file.close()


class MediaReader:
    """`left`: unread pieces, by the memory that gets each and its place."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.left = deque[tuple[memoryview, int]]()

    def read_into(self, buffer: memoryview, place: int) -> None:
        """Register memory, filled by `advance` and `finish`."""
        for first in range(0, len(buffer), PIECE_BYTES):
            self.left.append((buffer[first : first + PIECE_BYTES], place + first))

    def advance(self) -> bool:
        """Read a piece, if any is left. ChannelBroken: the file ends before it."""
        if not self.left:
            return False
        piece, place = self.left.popleft()
        if os.preadv(self._fd, [piece], place) < len(piece):
            raise ChannelBroken(f"the media memory has no {len(piece)} bytes at {place}")
        return True

    def finish(self) -> None:
        while self.advance():
            pass


def free_media(fd: int, pages: range) -> None:
    with mmap.mmap(fd, len(pages), offset=pages.start) as memory:
        memory.madvise(mmap.MADV_REMOVE)
