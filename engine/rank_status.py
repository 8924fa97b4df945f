"""The status of a group's processes: 256-byte records in a shared block; each field has one writer."""

from collections.abc import Mapping
from typing import NamedTuple

STATUS_BYTES = 256
HASHES = 8  # of the last steps
_ENCODER = 16  # first word of the encoders' figures
_LOW = 0xFFFFFFFF


class EncoderFigures(NamedTuple):
    """Figures of a rank since boot."""

    us: int = 0  # microseconds in them
    images: int = 0  # encoded by the group, as are `frames` and `clips`
    frames: int = 0
    clips: int = 0
    rows: int = 0  # soft tokens of these
    queries: int = 0  # lookups in the output cache
    hits: int = 0
    host_hits: int = 0  # of the `hits` on the host
    evictions: int = 0  # outputs lost
    cached_bytes: int = 0  # held now on the device
    host_bytes: int = 0  # on the host


class RankStatus(NamedTuple):
    """One process's record. Times are CLOCK_MONOTONIC nanoseconds, the same in every process of a
    node.

    `launched`, `finished`: steps, last moved at `progress_ns`. `hashes`: state hashes by step
    modulo 2^32. The lifeline thread writes `heartbeat_ns`, the main thread the rest.
    """

    launched: int = 0
    finished: int = 0
    progress_ns: int = 0
    heartbeat_ns: int = 0
    busy_us: int = 0
    idle_us: int = 0
    late_compilations: int = 0
    encodes_read: int = 0  # plans with encodes whose media it has read
    hashes: Mapping[int, int] = {}
    encoder: EncoderFigures = EncoderFigures()


class StatusBlock:
    """Index 0..tp-1: the ranks, tp: the core.

    Fields are parts of 8-byte words, loaded and stored at once: struct works byte by byte, so readers would see halves. A hash
    shares a word with its step.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    def read(self, index: int) -> RankStatus:
        """Fields are read one by one, so they may differ by a step."""
        words = self._record(index).tolist()
        hashes = {word >> 32: word & _LOW for word in words[8 : 8 + HASHES] if word}
        encoder = EncoderFigures(*words[_ENCODER : _ENCODER + len(EncoderFigures._fields)])
        return RankStatus._make((*words[:8], hashes, encoder))

    def progress(self, index: int, launched: int, finished: int, now_ns: int, state_hash: int) -> None:
        record = self._record(index)
        record[0] = launched
        record[2] = now_ns
        record[8 + finished % HASHES] = state_hash | (finished & _LOW) << 32
        record[1] = finished

    def device(self, index: int, busy_us: int, idle_us: int, late_compilations: int) -> None:
        record = self._record(index)
        record[4], record[5], record[6] = busy_us, idle_us, late_compilations

    def read_encodes(self, index: int, plans: int) -> None:
        self._record(index)[7] = plans

    def encoder(self, index: int, figures: EncoderFigures) -> None:
        record = self._record(index)
        for at, value in enumerate(figures, _ENCODER):
            record[at] = value

    def heartbeat(self, index: int, now_ns: int) -> None:
        """Called by the lifeline thread."""
        self._record(index)[3] = now_ns

    def _record(self, index: int) -> memoryview:
        """A temporary view, so that the memory's owner can unmap it."""
        return self._buffer[index * STATUS_BYTES : (index + 1) * STATUS_BYTES].cast("Q")
