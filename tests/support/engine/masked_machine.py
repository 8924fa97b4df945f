"""Ranks whose model knows nothing of grammars: a masked row gives any token that its mask allows, every other any token at all."""

import numpy as np

from engine.front.text import TextProcessor
from engine.geometry import KVGroup
from engine.plan import StepResult
from tests.support.engine.draws import mixed
from tests.support.engine.masked_ranks import MaskedRanks

GROUPS = (KVGroup(0, "sliding", (0,), 1, 256, 8, 4), KVGroup(1, "full", (1,), 1, 512, None, 4))
HURRY = 120  # tokens after which a reply takes the shortest way out
CLOSERS = frozenset(b'"}],:')


class MaskedMachine(MaskedRanks):
    """One in ten of the tokens without a mask is one of `marks`."""

    def __init__(self, text: TextProcessor, pages: tuple[int, ...], slots: int, max_len: int, marks: tuple[int, ...]) -> None:
        super().__init__(GROUPS, pages, slots, max_len, mixed)
        self._text, self._marks = text, marks
        self._begun = [0] * slots

    def result(self) -> StepResult:
        """Run the oldest plan."""
        for admission in self.queue[0].admissions:
            self._begun[admission.slot] = admission.prompt
        return super().result()

    def _token(self, slot: int, prefix: int, position: int) -> int:
        drawn, bits = super()._token(slot, prefix, position), self.bits.get(slot)
        if bits is None:
            return self._marks[drawn // 10 % len(self._marks)] if drawn % 10 == 0 else 200 + drawn % 700
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        special, ends = self._text.pieces.special, self._text.eos_ids
        marks = [token for token in allowed if token in special]
        hurry = position - self._begun[slot] > HURRY
        if marks and (hurry or drawn % 10 < 3):
            return ([token for token in marks if token in ends] or marks)[0] if hurry else marks[drawn % len(marks)]
        closers = [token for token in allowed if hurry and self._text.pieces.bytes_of(token)[0] in CLOSERS]
        found = closers or allowed
        return int(found[drawn % len(found)])
