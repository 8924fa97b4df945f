"""The inputs of the sampling kernels, in the order of their arguments."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

BIASED, PENALIZED, LIMITED, BAD_WORDS = 1, 2, 4, 8  # flags of a slot
GREEDY_BELOW = 1e-5  # temperatures under it are greedy: logits divided by less would overflow into ties
SMALL_TOP_K = 128  # for a top_k up to this, each rank's best SMALL_TOP_K ids decide the filters (`kernels.candidates`)


class SlotParameters(NamedTuple):
    integers: Tensor  # int64 [slots, 3]: seed, top_k, first position that may stop
    floats: Tensor  # fp32 [slots, 3]: temperature, top_p, min_p
    stop: Tensor  # int32 [slots, ids], -1: none


class SlotAdjustments(NamedTuple):
    """Adjustments of each slot, on a rank with n ids from `first` on."""

    flags: Tensor  # int32 [slots]: BIASED | PENALIZED | LIMITED | BAD_WORDS
    bias_ids: Tensor  # int32 [slots, m], -1: none
    bias: Tensor  # fp32 [slots, m]
    penalties: Tensor  # fp32 [slots, 3]: repetition, presence, frequency
    counts: Tensor  # int16 [slots, n] of each id: how often it was generated, below 2^15; plus 2^15 (the sign) if the prompt has it
    starts: Tensor  # int32 [slots, 2]: the first generated position; the first that `counts` lacks at admission
    allowed: Tensor  # int32 [slots, words]: bit id % 32 of word id // 32 - first // 32: the id may come
    bad_words: Tensor  # int32 [slots, ids], consecutive words
    word_ends: Tensor  # int32 [slots, m], rising, then repeated
    masks: Tensor  # int32 [n, words], as `allowed`, of some rows of one step, those of a slot consecutive
    mask_rows: Tensor  # int32 [slots, 2]: low word of the masks' step, and first row in `masks`


@dataclass(frozen=True)
class SamplingBatch:
    """R rows that sample, and the tables of all slots."""

    slots: Tensor  # int32 [R]
    positions: Tensor  # int32 [R], of each row's input; -1: a padding row
    parameters: SlotParameters
    tokens: Tensor  # int32 [slots, max_len + 1]: a row's token is written after its input
    suppress: Tensor  # int32 [m]: ids that no row may give
    softcap: float | None
    adjustments: SlotAdjustments | None = None  # None: no row's logits are adjusted
    plan: Tensor | None = None  # int32 on the device, None without adjustments
    step: int = 0  # index of its step's low word
    capped: Tensor | None = None  # int32 [R], 1: the row is adjusted, so already soft-capped; None: no row is
    width: int = 1  # rows of a slot, consecutive: its input and draft tokens
