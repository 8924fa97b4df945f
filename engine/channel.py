"""A lock-free ring in shared memory: one writer, n readers, records of any size.

    | written | read 0 | read 1 | ... | data ............................................. |
      64 B      64 B each               capacity bytes, records laid end to end, wrapping

    record = size u32 | checksum u32 | step u64 | payload, padded to 8

Counters are published after the bytes that they count. A size of 0xFFFFFFFF continues at the start. A wrong step, or a checksum
that stays wrong for a millisecond, raises ChannelBroken.
"""

import mmap
import os
import struct
import time
import zlib

_RECORD = struct.Struct("<IIQ")
_LINE = 64
_WRAP = 0xFFFFFFFF
_REREAD_S = 0.001
_PAGE = 4096
RING_BYTES = 16 << 20
MAX_RECORD = RING_BYTES // 2 - _RECORD.size  # of a ring of that size: the payload of one record
_SHORT, _LONG = 5_000, 50_000  # sleeps before they get longer


def checksum(data: bytes | memoryview, start: int = 0) -> int:
    """The crc32 of the sum of all 4 KiB pages, and of the rest; ten times faster than a plain crc32."""
    whole = len(data) // _PAGE * _PAGE
    if whole <= _PAGE:
        return zlib.crc32(data, start)
    import numpy as np  # not above: `quartet --help` does without it

    added = np.frombuffer(data, np.uint64, whole // 8).reshape(-1, _PAGE // 8).sum(0)
    return zlib.crc32(memoryview(data)[whole:], zlib.crc32(added.data, start))


class ChannelBroken(RuntimeError):
    """The ring is corrupt, or a record can never fit."""


def create_shared(name: str, size: int) -> int:
    """Zeroed anonymous shared memory, inherited through pass_fds."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def map_shared(fd: int) -> memoryview:
    """The descriptor may be closed afterwards."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def ring_bytes(readers: int, capacity: int = RING_BYTES) -> int:
    return _LINE * (1 + readers) + capacity


def capacity_for(record: int) -> int:
    return 2 * (_RECORD.size + -(-record // 8) * 8)


class Waiter:
    """Waits for memory to change: `spin` polls, then sleeps of 50 us, in long silence of up to `idle_s` and five times that."""

    def __init__(self, spin: int = 0, idle_s: float = 0.001) -> None:
        self._spin = spin
        self._idle_s = idle_s
        self._polls = 0

    def reset(self) -> None:
        self._polls = 0

    def wait(self) -> None:
        self._polls += 1
        silent = self._polls - self._spin
        if silent > 0:
            time.sleep(50e-6 if silent < _SHORT else self._idle_s if silent < _LONG else 5 * self._idle_s)


class _Ring:
    def __init__(self, memory: memoryview, readers: int) -> None:
        self._memory = memory
        self._data = _LINE * (1 + readers)
        # `written`, and what each reader has read; stores of eight bytes: struct.pack_into clears its target first, and a reader
        # would see that zero.
        self._counters = memory[: self._data].cast("Q")[:: _LINE // 8]
        self._capacity = len(memory) - self._data


class RingWriter(_Ring):
    """`step`: of the last record."""

    def __init__(self, memory: memoryview, readers: int, waiter: Waiter | None = None) -> None:
        super().__init__(memory, readers)
        self._waiter = waiter or Waiter()
        self._written = 0
        self.step = 0

    def write(self, step: int, payload: bytes | memoryview) -> None:
        """Waits while a reader is a whole ring late."""
        size = _RECORD.size + (len(payload) + 7) // 8 * 8
        if size > self._capacity // 2:
            raise ChannelBroken(f"a record of {len(payload)} bytes does not fit a ring of {self._capacity}")
        if step != self.step + 1:
            raise ChannelBroken(f"step {step} written after step {self.step}")
        at = self._written % self._capacity
        if self._capacity - at < size:
            skip = self._capacity - at
        else:
            skip = 0
        while self._written + skip + size - min(self._counters[1:]) > self._capacity:
            self._waiter.wait()
        self._waiter.reset()
        if skip:
            struct.pack_into("<I", self._memory, self._data + at, _WRAP)
            at = 0
        start = self._data + at
        self._memory[start + _RECORD.size : start + _RECORD.size + len(payload)] = payload
        _RECORD.pack_into(self._memory, start, len(payload), checksum(payload, step & 0xFFFFFFFF), step)
        self._written += skip + size
        self.step = step
        self._counters[0] = self._written


class RingReader(_Ring):
    """ChannelBroken leaves the bad record as the next one."""

    def __init__(self, memory: memoryview, readers: int, index: int) -> None:
        super().__init__(memory, readers)
        self._index = index
        self._read = 0
        self._step = 0

    def poll(self) -> tuple[int, bytes] | None:
        """The next (step, payload), or None.

        Re-reads the whole record, wrap marker included, until its checksum matches: processors that
        reorder loads (Arm) may return old words.
        """
        if self._counters[0] == self._read:
            return None
        deadline = time.monotonic() + _REREAD_S
        while True:
            late = time.monotonic() > deadline  # before it is read: this process may stand still in between
            read = self._read
            at = self._read % self._capacity
            if at > self._capacity - _RECORD.size or struct.unpack_from("<I", self._memory, self._data + at)[0] == _WRAP:
                read = read + self._capacity - at
                at = 0
            start = self._data + at
            size, expected, step = _RECORD.unpack_from(self._memory, start)
            payload = bytes(self._memory[start + _RECORD.size : start + _RECORD.size + size])
            whole = len(payload) == size and checksum(payload, step & 0xFFFFFFFF) == expected
            if whole and step == self._step + 1:
                self._step = step
                self._read = read + _RECORD.size + (size + 7) // 8 * 8
                self._counters[1 + self._index] = self._read
                return step, payload
            if late:
                if whole:
                    wrong = f"step {step} read"
                else:
                    wrong = "a record with a bad size or checksum"
                raise ChannelBroken(f"{wrong} after step {self._step}")
