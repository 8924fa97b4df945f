"""Masks of the tokens that may come in a step's masked rows: core -> ranks, in their own ring, a record for each `masked` plan.

A record comes before its plan, or after it while ranks compute the step's forward. A row of the plan that is not in it is free:
its sequence has ended, or needs no mask any more. A slot has as many masks, one behind the other, as its row is wide: of the next
token, and behind each draft as if it came. Or fewer, the last of zeros: there no token comes, and the row ends before.

    StepMasks   step u64, n u32, words u32 | slots int32 [n] | bits int32 [n, words]          little-endian
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from engine.channel import RING_BYTES, capacity_for

_HEADER = struct.Struct("<QII")


class StepMasks(NamedTuple):
    """slots int32 [n];   bits int32 [n, words]: bit id % 32 of word id // 32 is set where token `id` may come."""

    step: int
    slots: np.ndarray
    bits: np.ndarray


def mask_words(vocabulary: int) -> int:
    """int32 words of one mask."""
    return -(-vocabulary // 32)


def only(token: int, vocabulary: int) -> np.ndarray:
    """int32 [words]: nothing but `token` may come."""
    bits = np.zeros(mask_words(vocabulary), np.uint32)
    bits[token // 32] = 1 << token % 32
    return bits.view(np.int32)


def allows(bits: np.ndarray, token: int) -> bool:
    """Whether `token` may come by the mask `bits`, int32 [words]."""
    return bool(bits[token // 32] >> token % 32 & 1)


def masks_capacity(count: int, vocabulary: int) -> int:
    """Bytes of data of a ring whose records hold so many masks: every token of a step may have one."""
    return max(RING_BYTES, capacity_for(_HEADER.size + 4 * count * (1 + mask_words(vocabulary))))


def encode_masks(step: int, masks: Mapping[int, np.ndarray], words: int) -> bytes:
    """Bytes of the masks int32 [n, words] of a step's slots; `decode_masks` reads them."""
    slots = np.array([slot for slot, bits in masks.items() for _ in bits], np.int32)
    return b"".join([_HEADER.pack(step, len(slots), words), slots.tobytes(), *(bits.tobytes() for bits in masks.values())])


def decode_masks(data: bytes) -> StepMasks:
    """The masks in `data`, in place; raises ValueError when its length is wrong."""
    step, count, words = _HEADER.unpack_from(data)
    numbers = np.frombuffer(data, np.int32, offset=_HEADER.size)
    return StepMasks(step, numbers[:count], numbers[count:].reshape(count, words))
