"""The inputs of the sampling kernels, in the order of their arguments."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

BIASED, PENALIZED, LIMITED, BAD_WORDS = 1, 2, 4, 8  # flags of a slot
GREEDY_BELOW = 1e-5  # temperatures under it are greedy: logits divided by less would overflow into ties
SMALL_TOP_K = 128  # filters after a top_k up to it are decided by so many best ids of each rank (`kernels.candidates`)


class SlotParameters(NamedTuple):
    """How each slot samples: integers int64 [slots, 3] (seed, top_k, first position that may stop),
    floats fp32 [slots, 3] (temperature, top_p, min_p), stop int32 [slots, ids], -1: none."""

    integers: Tensor
    floats: Tensor
    stop: Tensor


class SlotAdjustments(NamedTuple):
    """Logit adjustments of each slot, on a rank with ids first .. first + n - 1.

    flags       int32 [slots]: BIASED | PENALIZED | LIMITED | BAD_WORDS
    bias_ids    int32 [slots, m], -1: none;  bias  fp32 [slots, m]
    penalties   fp32 [slots, 3]: repetition, presence, frequency
    counts      int16 [slots, n] of each id: how often it was generated, below 2^15; plus 2^15 (the sign) if the prompt has it
    starts      int32 [slots, 2]: the first generated position; the first that `counts` lacks at admission
    allowed     int32 [slots, words]: bit id % 32 of word id // 32 - first // 32: the id may come
    bad_words   int32 [slots, ids], consecutive words;  word_ends  int32 [slots, m], rising, then repeated
    masks       int32 [n, words], as `allowed`, of some rows of one step, those of a slot consecutive
    mask_rows   int32 [slots, 2]: low word of the masks' step, and first row in `masks`
    """

    flags: Tensor
    bias_ids: Tensor
    bias: Tensor
    penalties: Tensor
    counts: Tensor
    starts: Tensor
    allowed: Tensor
    bad_words: Tensor
    word_ends: Tensor
    masks: Tensor
    mask_rows: Tensor


@dataclass(frozen=True)
class SamplingBatch:
    """R rows that sample, and the tables of all slots.

    slots, positions  int32 [R], of each row's input; position -1: a padding row
    width             rows of a slot, consecutive: its input and draft tokens
    tokens            int32 [slots, max_len + 1]: a row's token is written after its input
    suppress          int32 [m]: ids that no row may give
    adjustments       None: no row's logits are adjusted
    plan              int32 on the device, None without adjustments;   step: index of its step's low word
    capped            int32 [R], 1: the row is adjusted, so already soft-capped; None: no row is
    """

    slots: Tensor
    positions: Tensor
    parameters: SlotParameters
    tokens: Tensor
    suppress: Tensor
    softcap: float | None
    adjustments: SlotAdjustments | None = None
    plan: Tensor | None = None
    step: int = 0
    capped: Tensor | None = None
    width: int = 1
