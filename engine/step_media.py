"""Media items that a step encodes: core -> ranks, in a ring of their own, behind their plan and in the order of its `encodes`.

A plan's items are one message, which may be longer than a record, and than the ring: ranks read on while the core writes.

    message = a record of the length u64, and records of up to MAX_RECORD bytes: msgpack of the items
"""

import struct
from collections.abc import Sequence

import msgspec

from engine.channel import MAX_RECORD, RingReader, RingWriter, Waiter
from engine.protocol import MediaItem

MEDIA_BYTES = 64 << 20  # of the ring: what two steps usually encode
_LENGTH = struct.Struct("<Q")
_decode = msgspec.msgpack.Decoder(tuple[MediaItem, ...]).decode
_encode = msgspec.msgpack.Encoder().encode


class MediaWriter:
    """The core's end."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring, self._records = ring, 0

    def write(self, items: Sequence[MediaItem]) -> None:
        """Send a plan's items. Waits while a rank is a whole ring behind."""
        data = memoryview(_encode(items))
        self._write(_LENGTH.pack(len(data)))
        for first in range(0, len(data), MAX_RECORD):
            self._write(data[first : first + MAX_RECORD])

    def _write(self, record: bytes | memoryview) -> None:
        self._records += 1
        self._ring.write(self._records, record)


class MediaReader:
    """A rank's end."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring

    def read(self, waiter: Waiter) -> tuple[MediaItem, ...]:
        """The next plan's items; waits for them. The replica bounds the wait (`step_timeout_s`)."""
        left, parts = _LENGTH.unpack(self._record(waiter))[0], list[bytes]()
        while left:
            parts.append(self._record(waiter))
            left -= len(parts[-1])
        return _decode(parts[0] if len(parts) == 1 else b"".join(parts))

    def _record(self, waiter: Waiter) -> bytes:
        while (record := self._ring.poll()) is None:
            waiter.wait()
        waiter.reset()
        return record[1]
