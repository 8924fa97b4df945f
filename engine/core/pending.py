"""Transfers that run beside steps, and the sequences that wait for them.

    begin --> id ... a result says `ended` --> end(id) --> release: sequences that waited for it go on

A transfer is what one plan has its ranks do beside the steps: the encodes of its media items. Ids are consecutive, and transfers
end in the order of their ids, so one number says which have ended.
"""

from engine.core.sequence import Sequence


class PendingTransfers:
    """Ids begin at 1. `begun`: the last transfer that began; `ended`: the last one that ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self._waiting: dict[Sequence, int] = {}  # the last transfer that each one waits for

    @property
    def running(self) -> bool:
        """Some transfers have not ended."""
        return self.ended < self.begun

    @property
    def waiting(self) -> int:
        """How many sequences wait."""
        return len(self._waiting)

    def begin(self) -> None:
        """A plan begins the next transfer."""
        self.begun += 1

    def end(self, transfer: int) -> None:
        """This transfer has ended, and all before it."""
        self.ended = max(self.ended, transfer)

    def wait(self, sequence: Sequence, transfer: int) -> None:
        """Let a sequence wait for this transfer; for the next `release`, if it has ended."""
        self._waiting[sequence] = transfer
        sequence.waits.add("transfer")

    def release(self) -> None:
        """Let the sequences go on whose transfers have ended."""
        for sequence in [sequence for sequence, transfer in self._waiting.items() if transfer <= self.ended]:
            self.forget(sequence)

    def release_all(self) -> None:
        """Let all sequences go on: a rank waits for the transfers that its step needs."""
        self.ended = self.begun
        self.release()

    def forget(self, sequence: Sequence) -> None:
        """The sequence waits no more, if it did."""
        if self._waiting.pop(sequence, None) is not None:
            sequence.waits.discard("transfer")
