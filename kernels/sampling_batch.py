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
class SamplingBatch:
    """R rows that sample, and the tables of all slots that say how.

    slots, positions  int32 [R], of each row's input; position -1: a padding row
    parameters        of every slot
    tokens            int32 [slots, max_len + 1]: a row's token is written behind its input
    suppress          int32 [m]: ids that no row may give
    softcap           of the logits; None: they have none
    """

    slots: Tensor
    positions: Tensor
    parameters: SlotParameters
    tokens: Tensor
    suppress: Tensor
    softcap: float | None
