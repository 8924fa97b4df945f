"""Masks of a step's masked rows: core -> ranks, in their own ring, a record for each `masked` plan.

A record may come before its plan, or during the step's forward. A row without a mask is free. A slot has a mask for its next
token, then one after each draft; a last one of zeros ends the row.

    StepMasks   step u64, n u32, words u32 | slots int32 [n] | bits int32 [n, words]          little-endian
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from engine.channel import RING_BYTES, capacity_for

_HEADER = struct.Struct("<QII")


class StepMasks(NamedTuple):
    step: int
    slots: np.ndarray  # int32 [n]
    bits: np.ndarray  # int32 [n, words]: bit id % 32 of word id // 32 is set where token `id` may come


def mask_words(vocabulary: int) -> int:
    return -(-vocabulary // 32)


def only(token: int, vocabulary: int) -> np.ndarray:
    bits = np.zeros(mask_words(vocabulary), np.uint32)
    bits[token // 32] = 1 << token % 32
    return bits.view(np.int32)


def allows(bits: np.ndarray, token: int) -> bool:
    return bool(bits[token // 32] >> token % 32 & 1)


def masks_capacity(count: int, vocabulary: int) -> int:
    return max(RING_BYTES, capacity_for(_HEADER.size + 4 * count * (1 + mask_words(vocabulary))))


def encode_masks(step: int, masks: Mapping[int, np.ndarray], words: int) -> bytes:
    slots = np.array([slot for slot, bits in masks.items() for _ in bits], np.int32)
    return b"".join([_HEADER.pack(step, len(slots), words), slots.tobytes(), *(bits.tobytes() for bits in masks.values())])


def decode_masks(data: bytes) -> StepMasks:
    """Reads in place. ValueError: wrong length."""
    step, count, words = _HEADER.unpack_from(data)
    numbers = np.frombuffer(data, np.int32, offset=_HEADER.size)
    return StepMasks(step, numbers[:count], numbers[count:].reshape(count, words))
