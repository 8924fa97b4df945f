"""The mapped ring: one writer, n readers, records of any size, no locks and no system calls but a sleep.

    | written | read 0 | read 1 | ... | data ............................................. |
      64 B      64 B each               capacity bytes, records laid end to end, wrapping

    record = size u32 | checksum u32 | step u64 | payload, padded to 8

`written` and `read i` count bytes since the ring was made; a counter has one writer and is published after the bytes it covers.
A record never straddles the end: a size of 0xFFFFFFFF there says "continue at the start". Step numbers are contiguous. A record
whose checksum is still bad after a millisecond of re-reading, or whose step is not the next, raises ChannelBroken: the group ends.

The memory is an anonymous file (memfd) whose descriptor the children inherit: it has no name, so no kill can leave it behind.
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
    """Returns 32 bits of `data`: the crc32 of all its pages of 4 KiB added up, words of 64 bits, and of what is behind the last
    whole one.

    A crc32 of all of it would take ten times as long: 0.7 ms for the masks of 64 rows."""
    whole = len(data) // _PAGE * _PAGE
    if whole <= _PAGE:
        return zlib.crc32(data, start)
    import numpy as np  # not above: `quartet --help` does without it

    added = np.frombuffer(data, np.uint64, whole // 8).reshape(-1, _PAGE // 8).sum(0)
    return zlib.crc32(memoryview(data)[whole:], zlib.crc32(added.data, start))


class ChannelBroken(RuntimeError):
    """The ring cannot be trusted any more, or a record can never fit it."""


def create_shared(name: str, size: int) -> int:
    """Returns a descriptor of `size` zeroed bytes of anonymous shared memory; children inherit it through pass_fds."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def map_shared(fd: int) -> memoryview:
    """Map the whole of `fd`, shared and writable. The descriptor may be closed afterwards."""
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def ring_bytes(readers: int, capacity: int = RING_BYTES) -> int:
    """Returns the bytes to create for a ring of `capacity` data bytes."""
    return _LINE * (1 + readers) + capacity


def capacity_for(record: int) -> int:
    """Returns the bytes of data of a ring whose records have payloads of up to `record` bytes."""
    return 2 * (_RECORD.size + -(-record // 8) * 8)


class Waiter:
    """How to wait for memory to change: spin a little where cores are free, then sleep, longer the longer nothing comes.

    `spin` polls are made without sleeping (0 where processes outnumber cores). Sleeps start at 50 us, reach `idle_s` after about
    half a second of silence, and five times that after another ten.
    """

    def __init__(self, spin: int = 0, idle_s: float = 0.001) -> None:
        self._spin = spin
        self._idle_s = idle_s
        self._polls = 0

    def reset(self) -> None:
        """Restart the back-off, because something arrived."""
        self._polls = 0

    def wait(self) -> None:
        """Spin or sleep once, after a poll that found nothing."""
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
    """The one writer. `readers` is their number; each must keep reading or `write` waits for it. `step`: of the last record."""

    def __init__(self, memory: memoryview, readers: int, waiter: Waiter | None = None) -> None:
        super().__init__(memory, readers)
        self._waiter = waiter or Waiter()
        self._written = 0
        self.step = 0

    def write(self, step: int, payload: bytes | memoryview) -> None:
        """Publish one record. Waits while a reader is a whole ring behind."""
        size = _RECORD.size + (len(payload) + 7) // 8 * 8
        if size > self._capacity // 2:
            raise ChannelBroken(f"a record of {len(payload)} bytes does not fit a ring of {self._capacity}")
        if step != self.step + 1:
            raise ChannelBroken(f"step {step} written after step {self.step}")
        at = self._written % self._capacity
        skip = self._capacity - at if self._capacity - at < size else 0
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
    """One of the readers. What is wrong with a record raises ChannelBroken, and the record stays the next one."""

    def __init__(self, memory: memoryview, readers: int, index: int) -> None:
        super().__init__(memory, readers)
        self._index = index
        self._read = 0
        self._step = 0

    def poll(self) -> tuple[int, bytes] | None:
        """Returns the next (step, payload), or None when nothing new is published.

        All of a record is read again and again, the mark at the ring's end too: on processors that reorder loads (Arm) any word may
        still be an older one.
        """
        if self._counters[0] == self._read:
            return None
        deadline = time.monotonic() + _REREAD_S
        while True:
            late = time.monotonic() > deadline  # before it is read: this process may stand still in between
            read, at = self._read, self._read % self._capacity
            if at > self._capacity - _RECORD.size or struct.unpack_from("<I", self._memory, self._data + at)[0] == _WRAP:
                read, at = read + self._capacity - at, 0
            start = self._data + at
            size, expected, step = _RECORD.unpack_from(self._memory, start)
            payload = bytes(self._memory[start + _RECORD.size : start + _RECORD.size + size])
            whole = len(payload) == size and checksum(payload, step & 0xFFFFFFFF) == expected
            if whole and step == self._step + 1:
                self._step, self._read = step, read + _RECORD.size + (size + 7) // 8 * 8
                self._counters[1 + self._index] = self._read
                return step, payload
            if late:
                wrong = f"step {step} read" if whole else "a record with a bad size or checksum"
                raise ChannelBroken(f"{wrong} after step {self._step}")
