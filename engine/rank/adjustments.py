"""Logit adjustments of each slot, in device tables written at admission.

The device counts generated tokens (`kernels.adjust`); a preempted sequence's counts are restored from its tokens.
"""

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from engine.logit_adjustments import MAX_BAD_WORD_IDS, MAX_BAD_WORDS, MAX_BIAS_IDS, LogitAdjustments
from engine.plan import Admission
from engine.rank.step_clock import DeviceEvent
from engine.rank.upload import staging, uploaded
from kernels.adjust import IN_PROMPT, MOST_COUNTED
from kernels.sampling_batch import BAD_WORDS, BIASED, LIMITED, PENALIZED, SlotAdjustments

_NO_STEP = -1  # the low word of no step that is reached


class Adjustments:
    """width: most masks of a slot in a step. Masks are stamped with their step, on host and device, and apply to no other."""

    def __init__(self, slots: int, ids: range, device: torch.device, width: int = 1) -> None:
        self.ids = ids
        self._device = device
        self._words = range(ids.start >> 5, ((ids.stop - 1) >> 5) + 1)
        words = len(self._words)
        self.tables = _tables(slots, len(ids), words, width, device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging = zip(staging(device, slots * width, words), staging(device, slots, 2), strict=False)
        self._flags = np.zeros(slots, np.int32)
        self._mask_steps = np.full(slots, _NO_STEP, np.int64)

    def admit(self, admissions: Sequence[Admission]) -> None:
        changed = [admission for admission in admissions if admission.params.adjustments is not None or self._flags[admission.slot]]
        if not changed:
            return
        slots = [admission.slot for admission in changed]
        self._flags[slots] = [_flags(admission.params.adjustments) for admission in changed]
        self._put(self.tables.flags, slots, self._flags[slots])
        for admission in changed:
            if admission.params.adjustments is not None:
                self._store(admission, admission.params.adjustments)

    def _store(self, admission: Admission, adjustments: LogitAdjustments) -> None:
        slot = [admission.slot]
        flags = self._flags[admission.slot]
        if flags & (PENALIZED | BAD_WORDS):
            self._put(self.tables.starts, slot, np.array([[admission.prompt, len(admission.tokens)]], np.int32))
        if flags & BIASED:
            ids, values = zip(*adjustments.bias, strict=True)
            self._put(self.tables.bias_ids, slot, _padded(ids, MAX_BIAS_IDS, -1))
            self._put(self.tables.bias, slot, _padded(values, MAX_BIAS_IDS, 0.0, np.float32))
        if flags & PENALIZED:
            self._put(self.tables.penalties, slot, np.array([adjustments.penalties], np.float32))
            self._put(self.tables.counts, slot, self._counts(admission)[None])
        if flags & LIMITED:
            self._put(self.tables.allowed, slot, self._bits(adjustments.allowed_ids)[None])
        if flags & BAD_WORDS:
            ends = list(accumulate(map(len, adjustments.bad_words)))
            self._put(self.tables.word_ends, slot, _padded(ends, MAX_BAD_WORDS, ends[-1]))
            self._put(self.tables.bad_words, slot, _padded(list(chain.from_iterable(adjustments.bad_words)), MAX_BAD_WORD_IDS, -1))

    def _counts(self, admission: Admission) -> np.ndarray:
        local = np.asarray(admission.tokens, np.int64) - self.ids.start
        parts = np.split(local, [admission.prompt])
        prompt, generated = (part[(part >= 0) & (part < len(self.ids))] for part in parts)
        counts = np.minimum(np.bincount(generated, minlength=len(self.ids)), MOST_COUNTED)
        counts[prompt] |= IN_PROMPT
        return counts.astype(np.uint16).view(np.int16)

    def _bits(self, ids: Sequence[int]) -> np.ndarray:
        """This rank's words, int32, of a mask that allows `ids`."""
        bits = np.zeros(32 * len(self._words), np.bool_)
        local = np.asarray(ids, np.int64) - 32 * self._words.start
        bits[local[(local >= 0) & (local < len(bits))]] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def set_masks(self, step: int, slots: np.ndarray, bits: np.ndarray, after: DeviceEvent | None = None) -> None:
        """Upload the masks of `step` for `slots` int32 [n]; a slot's are consecutive. At most DEPTH steps may be in flight.

        bits int32 [n, ceil(vocabulary / 32)]: bit id % 32 of word id // 32. after: end of the last sampled step, which the copies
        wait for; None: they wait for all earlier work, a running forward too.
        """
        owners, first = np.unique(slots, return_index=True)
        if not len(slots):
            return
        rows, mask_rows = next(self._staging)
        rows = rows[: len(slots)]
        local = bits[:, self._words.start : self._words.stop]
        rows.numpy()[:, : local.shape[1]] = local  # after the vocabulary's end there is nothing to allow
        table = mask_rows.numpy()
        table[:, 0] = _NO_STEP
        table[owners, 0], table[owners, 1] = np.int64(step).astype(np.int32), first  # the low word, as in a plan's header
        copies = None
        if after is not None and (copies := self._copies) is not None:
            copies.wait_event(after)
        with torch.cuda.stream(copies):  # stream None: the current stream
            self.tables.masks[: len(slots)].copy_(rows, non_blocking=True)  # copies alone: the host must not wait for the forward
            self.tables.mask_rows.copy_(mask_rows, non_blocking=True)
        if copies is not None:
            torch.cuda.current_stream(self._device).wait_stream(copies)
        self._mask_steps[owners] = step

    def are_adjusted(self, slots: np.ndarray, step: int) -> list[bool]:
        return ((self._mask_steps[slots] == step) | (self._flags[slots] != 0)).tolist()

    def _put(self, table: Tensor, slots: Sequence[int], rows: np.ndarray) -> None:
        index, values = (uploaded(torch.from_numpy(array), self._device) for array in (np.array(slots, np.int64), rows))
        table[index] = values


def _flags(adjustments: LogitAdjustments | None) -> int:
    if adjustments is None:
        return 0
    flags = BIASED * bool(adjustments.bias) | PENALIZED * (adjustments.penalties != (1.0, 0.0, 0.0))
    return flags | LIMITED * bool(adjustments.allowed_ids) | BAD_WORDS * bool(adjustments.bad_words)


def _tables(slots: int, ids: int, words: int, width: int, device: torch.device) -> SlotAdjustments:
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros((slots, *shape), dtype=dtype, device=device)

    return SlotAdjustments(
        flags=zeros(),
        bias_ids=zeros(MAX_BIAS_IDS),
        bias=zeros(MAX_BIAS_IDS, dtype=torch.float32),
        penalties=zeros(3, dtype=torch.float32),
        counts=zeros(ids, dtype=torch.int16),
        starts=zeros(2),
        allowed=zeros(words),
        bad_words=zeros(MAX_BAD_WORD_IDS),
        word_ends=zeros(MAX_BAD_WORDS),
        masks=zeros(width, words).flatten(0, 1),
        mask_rows=zeros(2) + _NO_STEP,
    )


def _padded(values: Sequence[float], width: int, padding: float, dtype: type[np.generic] = np.int32) -> np.ndarray:
    row = np.full((1, width), padding, dtype)
    row[0, : len(values)] = values
    return row
