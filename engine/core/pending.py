"""Transfers that run concurrently with steps, and the sequences that wait for them. A transfer is
one plan's encodes.

    begin --> id ... a result reports `ended` --> end(id) --> release: the waiting sequences continue

Ids are consecutive and end in order: one number tells which have ended.
"""

from engine.core.sequence import Sequence


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
