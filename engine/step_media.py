"""Media items that a step encodes: core -> ranks, in their own ring, after their plan, in the order
of `encodes`.

    message = msgpack of the items without their data, then records of up to RECORD_BYTES with the data of each in order
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from engine.channel import RingReader, RingWriter, Waiter
from engine.protocol import MediaItem, encode_message

MEDIA_BYTES = 64 << 20  # of the ring: what two steps usually encode
RECORD_BYTES = 1 << 20  # of data: what a rank reads between two looks for a plan
_decode = msgspec.msgpack.Decoder(tuple[MediaItem, ...]).decode


def write_media(ring: RingWriter, items: Sequence[MediaItem]) -> None:
    """Waits while a rank is a whole ring late."""
    headers = encode_message([msgspec.structs.replace(item, data=b"") for item in items])
    for record in (memoryview(headers), *_records(item.data for item in items)):
        ring.write(ring.step + 1, record)


class MediaReader:
    """The replica bounds its waits (`step_timeout_s`)."""

    def __init__(self, ring: RingReader, waiter: Waiter) -> None:
        self._ring = ring
        self._waiter = waiter
        self.left = deque[memoryview]()  # of unread records

    def items(self) -> tuple[MediaItem, ...]:
        """Waits for the next plan's items, without data."""
        while (record := self._ring.poll()) is None:
            self._waiter.wait()
        self._waiter.reset()
        return _decode(record[1])

    def read_into(self, buffers: Iterable[memoryview]) -> None:
        """Register memory for the items' data, filled by `advance` and `finish`."""
        self.left.extend(_records(buffers))

    def advance(self) -> bool:
        if not self.left or (record := self._ring.poll()) is None:
            return False
        self.left.popleft()[:] = record[1]
        return True

    def finish(self) -> None:
        while self.left:
            if not self.advance():
                self._waiter.wait()


def _records(items: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for data in items:
        for first in range(0, len(data), RECORD_BYTES):
            yield memoryview(data)[first : first + RECORD_BYTES]
