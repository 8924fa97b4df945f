"""What the sampling kernels read: the rows of a step that sample, and the tables of all slots that say how."""

from dataclasses import dataclass

from torch import Tensor

GREEDY_BELOW = 1e-5  # temperatures under it are greedy: logits divided by less would overflow into ties


@dataclass(frozen=True)
class SlotParameters:
    """How each slot samples: integers int64 [slots, 3] (seed, top_k, first position that may stop), floats fp32 [slots, 3]
    (temperature, top_p, min_p), stop int32 [slots, ids], -1: none."""

    integers: Tensor
    floats: Tensor
    stop: Tensor


@dataclass(frozen=True)
class SlotAdjustments:
    """What is done to each slot's logits before they are sampled, on a rank that has those of ids first .. first + n - 1.

    masks       int32 [slots, words]: bit id % 32 of word id // 32 - first // 32 says whether the id may come
    mask_steps  int32 [slots]: the low word of the one step that the slot's mask is for
    """

    masks: Tensor
    mask_steps: Tensor


@dataclass(frozen=True)
class SamplingBatch:
    """R rows that sample, and the tables of all slots that say how.

    slots, positions  int32 [R], of each row's input; position -1: a padding row
    parameters        of every slot
    tokens            int32 [slots, max_len + 1]: a row's token is written behind its input
    suppress          int32 [m]: ids that no row may give
    softcap           of the logits; None: they have none
    adjustments       of every slot; None: no row's logits are adjusted
    plan              int32, the step's plan on the device (`engine.plan`); None where nothing is adjusted
    capped            int32 [R], 1: the row's logits are soft-capped already, because they are adjusted; None: no row's are
    """

    slots: Tensor
    positions: Tensor
    parameters: SlotParameters
    tokens: Tensor
    suppress: Tensor
    softcap: float | None
    adjustments: SlotAdjustments | None = None
    plan: Tensor | None = None
    capped: Tensor | None = None
