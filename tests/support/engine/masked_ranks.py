"""The KV machine with masks: a masked step runs when its record has come."""

from collections import deque

import numpy as np

from engine.geometry import KVGroup
from engine.plan import ResultRow, StepResult
from engine.step_masks import StepMasks, decode_masks
from tests.support.engine.kvmachine import KVMachine, Model


class MaskedRanks(KVMachine):
    """`masks`: of the step that runs, each masked slot's int32 [words], one behind the other; `first`: position of the first
    token of the row that is sampled."""

    def __init__(
        self, groups: tuple[KVGroup, ...], pages: tuple[int, ...], slots: int, max_len: int, model: Model
    ) -> None:
        super().__init__(groups, pages, slots, max_len, model)
        self.masks: dict[int, list[np.ndarray]] = {}
        self.first = 0
        self._masks: deque[StepMasks] = deque()

    def submit_masks(self, masks: bytes) -> None:
        """As the executor's."""
        self._masks.append(decode_masks(masks))

    @property
    def ready(self) -> bool:
        """There is a plan, and its masks if it is masked."""
        return bool(self.queue) and (bool(self._masks) or not self.queue[0].masked)

    def result(self) -> StepResult:
        """Run the oldest plan, whose masks have come if it is masked."""
        self.masks = {}
        if self.queue[0].masked:
            masks = self._masks.popleft()
            assert masks.step == self.queue[0].step
            for slot, bits in zip(masks.slots.tolist(), masks.bits, strict=True):
                self.masks.setdefault(slot, []).append(bits)
        return super().result()

    def mask(self, slot: int, position: int) -> np.ndarray | None:
        """Of a token of the row that is sampled, int32 [words]; None: any may come."""
        masks, index = self.masks.get(slot), position - self.first
        assert masks is None or index < len(masks), f"slot {slot} has {len(masks)} masks, its row more tokens"
        mask = masks[index] if masks else None
        return None if mask is None or (mask == -1).all() else mask

    def silent(self, slot: int, position: int) -> bool:
        """The mask behind a draft is missing."""
        mask = self.mask(slot, position)
        return mask is not None and not mask.any()

    def _sample(self, slot: int, position: int, drafts: list[int]) -> ResultRow:
        self.first = position
        return super()._sample(slot, position, drafts)
