"""The status of each process of a group: one 256-byte record a process in a shared block; each field has one writer."""

from collections.abc import Mapping
from typing import NamedTuple

STATUS_BYTES = 256
HASHES = 8  # of the last steps
_ENCODER = 16  # first word of the encoders' figures
_LOW = 0xFFFFFFFF


class EncoderFigures(NamedTuple):
    """What a rank's encoders of media have done since boot: microseconds in them; `images`, `frames` of videos and `clips` that the
    group has encoded, and `rows`, the soft tokens that these gave; items looked up in the cache of outputs (`queries`), and found,
    `host_hits` of them on the host. `evictions`: outputs that it has lost; bytes: that it holds now, on the device and the host."""

    us: int = 0
    images: int = 0
    frames: int = 0
    clips: int = 0
    rows: int = 0
    queries: int = 0
    hits: int = 0
    host_hits: int = 0
    evictions: int = 0
    cached_bytes: int = 0
    host_bytes: int = 0


class RankStatus(NamedTuple):
    """One process's record, its first words in the order of the fields. Times are CLOCK_MONOTONIC nanoseconds (the same clock in
    every process of a node).

    `busy_us`, `idle_us`: how long the device took for the last step, and stood idle before the last one with decode rows.
    `launched`/`finished` are step numbers; `progress_ns` is when either last moved; `hashes` are the state hashes after the
    last steps, by step modulo 2^32; `heartbeat_ns` is written by the lifeline thread, the other fields by the main thread.
    """

    launched: int = 0
    finished: int = 0
    progress_ns: int = 0
    heartbeat_ns: int = 0
    busy_us: int = 0
    idle_us: int = 0
    late_compilations: int = 0
    hashes: Mapping[int, int] = {}
    encoder: EncoderFigures = EncoderFigures()


class StatusBlock:
    """The shared block of records, index 0..tp-1 the ranks and tp the core.

    Every field is part of an 8-byte word that is loaded and stored at once: struct goes byte by byte, and pack_into clears its
    target first, so that a reader would see zeros and halves. A hash is one word with its step: whenever it is read, they belong
    together. `finished` comes after its hash.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    def read(self, index: int) -> RankStatus:
        """Read the current record; fields are read one by one, so they may differ by a step."""
        words = self._record(index).tolist()
        hashes = {word >> 32: word & _LOW for word in words[8 : 8 + HASHES] if word}
        encoder = EncoderFigures(*words[_ENCODER : _ENCODER + len(EncoderFigures._fields)])
        return RankStatus._make((*words[:7], hashes, encoder))

    def progress(self, index: int, launched: int, finished: int, now_ns: int, state_hash: int) -> None:
        """Write that a step was launched or finished; for the main thread."""
        record = self._record(index)
        record[0] = launched
        record[2] = now_ns
        record[8 + finished % HASHES] = state_hash | (finished & _LOW) << 32
        record[1] = finished

    def device(self, index: int, busy_us: int, idle_us: int, late_compilations: int) -> None:
        """Write how the device spent the last step; for the main thread."""
        record = self._record(index)
        record[4], record[5], record[6] = busy_us, idle_us, late_compilations

    def encoder(self, index: int, figures: EncoderFigures) -> None:
        """Write what the encoders have done; for the main thread."""
        record = self._record(index)
        for at, value in enumerate(figures, _ENCODER):
            record[at] = value

    def heartbeat(self, index: int, now_ns: int) -> None:
        """Write that the process is scheduled at all; for the lifeline thread."""
        self._record(index)[3] = now_ns

    def _record(self, index: int) -> memoryview:
        """Returns the record's words; a temporary view, so that the memory's owner can unmap it."""
        return self._buffer[index * STATUS_BYTES : (index + 1) * STATUS_BYTES].cast("Q")
