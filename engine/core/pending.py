"""Transfers that run concurrently with steps, the sequences that wait for them, and the media memory
that they read. A transfer is one plan's encodes.

    begin --> id ... a result reports `ended` --> end(id) --> release: the waiting sequences continue

Ids are consecutive and end in order: one number tells which have ended.
"""

from collections import Counter, deque

from engine.core.sequence import Sequence
from engine.protocol import MediaEnd

FREED_BYTES = 8 << 20  # at once: half a millisecond


class PendingTransfers:
    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self._waiting: dict[Sequence, int] = {}  # the last transfer that each one waits for

    @property
    def running(self) -> bool:
        return self.ended < self.begun

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def begin(self) -> None:
        self.begun += 1

    def end(self, transfer: int) -> None:
        """This transfer and all earlier ones have ended."""
        self.ended = max(self.ended, transfer)

    def wait(self, sequence: Sequence, transfer: int) -> None:
        """Wait for this transfer; if it has ended, until the next `release`."""
        self._waiting[sequence] = transfer
        sequence.waits.add("transfer")

    def release(self) -> None:
        for sequence in [sequence for sequence, transfer in self._waiting.items() if transfer <= self.ended]:
            self.forget(sequence)

    def release_all(self) -> None:
        """Continue all sequences: a rank waits for the transfers that its step needs."""
        self.ended = self.begun
        self.release()

    def forget(self, sequence: Sequence) -> None:
        if self._waiting.pop(sequence, None) is not None:
            sequence.waits.discard("transfer")


class MediaUses:
    """Frees media memory, known by its begin, after its last request, once every rank has read the
    transfers begun until then."""

    def __init__(self, transfers: PendingTransfers) -> None:
        self._transfers = transfers
        self._uses = Counter[int]()
        self._ends: dict[int, int] = {}
        self.unused = deque[tuple[int, range]]()  # (transfers that were begun before, memory)

    def add(self, begin: int) -> None:
        self._uses[begin] += 1

    def drop(self, begin: int) -> None:
        self._uses[begin] -= 1
        self._settle(begin)

    def end(self, message: MediaEnd) -> None:
        self._ends[message.begin] = message.end
        self._settle(message.begin)

    def _settle(self, begin: int) -> None:
        if self._uses[begin] or begin not in self._ends:
            return
        del self._uses[begin]
        end = self._ends.pop(begin)
        for piece in range(begin, end, FREED_BYTES):
            self.unused.append((self._transfers.begun, range(piece, min(end, piece + FREED_BYTES))))

    def next_free(self, read: int) -> range | None:
        """A piece of memory to free now. `read`: transfers that every rank has read."""
        if self.unused and self.unused[0][0] <= read:
            return self.unused.popleft()[1]
        return None
