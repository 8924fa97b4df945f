"""Ranks whose model knows nothing of grammars: a masked row gives any token that its mask allows, every other any token at all."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine.front.text import TextProcessor
from engine.geometry import KVGroup
from engine.plan import ResultRow, StepResult
from engine.step_masks import StepMasks, decode_masks
from tests.support.engine.kvmachine import KVMachine
from tests.support.engine.worlds import mixed

GROUPS = (KVGroup(0, "sliding", (0,), 1, 256, 8, 4), KVGroup(1, "full", (1,), 1, 512, None, 4))
HURRY = 120  # tokens after which a reply takes the shortest way out
CLOSERS = frozenset(b'"}],:')


class MaskedMachine(KVMachine):
    """`plant(masks)` may alter each step's masks before it runs. One in ten of the tokens without a mask is `mark`."""

    def __init__(self, text: TextProcessor, pages: tuple[int, ...], slots: int, max_len: int, mark: int) -> None:
        super().__init__(GROUPS, pages, slots, max_len, self._token)
        self._text, self._mark = text, mark
        self._begun = [0] * slots
        self._masks: deque[StepMasks] = deque()
        self._bits: dict[int, np.ndarray] = {}
        self._slot = 0
        self.plant_masks: Callable[[StepMasks], StepMasks] = lambda masks: masks
        self.most = 0  # masked rows of a step

    def submit_masks(self, masks: bytes) -> None:
        """As the executor's."""
        self._masks.append(self.plant_masks(decode_masks(masks)))

    def result(self) -> StepResult:
        """Run the oldest plan, whose masks have come if it is masked."""
        self._bits = {}
        if self.queue[0].masked:
            masks = self._masks.popleft()
            assert masks.step == self.queue[0].step
            self._bits = dict(zip(masks.slots.tolist(), masks.bits, strict=True))
        self.most = max(self.most, len(self._bits))
        for admission in self.queue[0].admissions:
            self._begun[admission.slot] = admission.prompt
        return super().result()

    def _sample(self, slot: int, position: int, drafts: list[int]) -> ResultRow:
        self._slot = slot
        return super()._sample(slot, position, drafts)

    def _token(self, prefix: int, position: int, seed: int) -> int:
        drawn, bits = mixed(prefix, position, seed), self._bits.get(self._slot)
        if bits is None:
            return self._mark if drawn % 10 == 0 else 200 + drawn % 700
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        special, ends = self._text.pieces.special, self._text.eos_ids
        marks = [token for token in allowed if token in special]
        hurry = position - self._begun[self._slot] > HURRY
        if marks and (hurry or drawn % 10 < 3):
            return ([token for token in marks if token in ends] or marks)[0] if hurry else marks[drawn % len(marks)]
        closers = [token for token in allowed if hurry and self._text.pieces.bytes_of(token)[0] in CLOSERS]
        found = closers or allowed
        return int(found[drawn % len(found)])


def of_another_row(masks: StepMasks) -> StepMasks:
    """Planted fault: each row gets its neighbour's mask."""
    return replace(masks, bits=np.roll(masks.bits, 1, axis=0))


def left_out(masks: StepMasks) -> StepMasks:
    """Planted fault: no row gets its mask."""
    return replace(masks, slots=masks.slots[:0], bits=masks.bits[:0])


def a_token_old() -> Callable[[StepMasks], StepMasks]:
    """Planted fault: each slot gets the mask that it had the last time."""
    before: dict[int, np.ndarray] = {}

    def planted(masks: StepMasks) -> StepMasks:
        rows = [before.get(slot, bits) for slot, bits in zip(masks.slots.tolist(), masks.bits, strict=True)]
        before.update(zip(masks.slots.tolist(), masks.bits, strict=True))
        return replace(masks, bits=np.stack(rows) if rows else masks.bits)

    return planted
