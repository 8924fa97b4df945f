"""How each slot's logits are adjusted before they are sampled: device tables, and the host's mirror of who is adjusted when."""

import numpy as np
import torch

from engine.plan import DEPTH
from kernels.sampling_batch import SlotAdjustments

_NO_STEP = -1  # the low word of no step that is reached


class Adjustments:
    """Of `slots` slots, on a rank that has the logits of `ids`.

    A mask is for one step: it is stamped with it, on the host as on the device, and counts in no other.
    """

    def __init__(self, slots: int, ids: range, device: torch.device) -> None:
        self._words = range(ids.start >> 5, ((ids.stop - 1) >> 5) + 1)
        self.tables = SlotAdjustments(
            masks=torch.zeros((slots, len(self._words)), dtype=torch.int32, device=device),
            mask_steps=torch.full((slots,), _NO_STEP, dtype=torch.int32, device=device),
        )
        pinned = device.type == "cuda"
        shape = (slots, len(self._words))
        self._staging = [torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(DEPTH + 1)]
        self._mask_steps = np.full(slots, _NO_STEP, np.int64)

    def set_masks(self, step: int, slots: np.ndarray, bits: np.ndarray) -> None:
        """Which ids the rows of `slots` int32 [n] may give in `step`, and in no other; each slot once.

        bits int32 [n, ceil(vocabulary / 32)]: bit id % 32 of word id // 32. At most DEPTH steps may be out, as for plans.
        """
        assert len(slots) == len(bits) == len(set(slots.tolist())), (slots, bits.shape)
        staging = self._staging.pop(0)
        self._staging.append(staging)
        mine = bits[:, self._words.start : self._words.stop]
        rows = staging[: len(slots)]
        rows.numpy()[:, : mine.shape[1]] = mine  # behind the vocabulary's end there is nothing to allow
        device = self.tables.masks.device
        index = torch.from_numpy(slots.astype(np.int64))
        if device.type == "cuda":
            index = index.pin_memory().to(device, non_blocking=True)
        self.tables.masks[index] = rows.to(device, non_blocking=True)
        self.tables.mask_steps[index] = _low_word(step)
        self._mask_steps[slots] = step

    def of(self, slots: np.ndarray, step: int) -> list[bool]:
        """Whether each of these slots' rows is adjusted in `step`."""
        adjusted: list[bool] = (self._mask_steps[slots] == step).tolist()
        return adjusted


def _low_word(step: int) -> int:
    """As a plan's header shows it, read as int32."""
    return (step & 0xFFFFFFFF) - ((step & 0x80000000) << 1)
