"""Logits adjusted before they are sampled, on each rank's own slice of the vocabulary.

    cap    l  <- c tanh(l / c)     the model's own soft cap, of greedy rows too
    mask   l_i <- -inf             where the slot has a mask for this step and its bit i is 0

Rows of slots without adjustments are left as they are. A NaN stays one, whatever is forbidden: it silences its row.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.sample import cap
from kernels.sampling_batch import SamplingBatch

PLAN_STEP = 2  # where a plan's header has the low word of its step


def adjust(logits: Tensor, batch: SamplingBatch, first: int) -> SamplingBatch:
    """logits fp32 [R, n] of ids first .. first + n - 1, before the soft cap: rows to adjust are capped and adjusted in place.

    The batch again, with `capped`.
    """
    assert batch.adjustments is not None, "nothing says how"
    assert batch.plan is not None, "no step"
    tables, slots = batch.adjustments, batch.slots.long()
    masked = tables.mask_steps[slots] == batch.plan[PLAN_STEP]
    for row in masked.nonzero().flatten().tolist():
        adjusted = cap(logits[row], batch.softcap)
        adjusted = adjusted.masked_fill(~_bits(tables.masks[slots[row]], first, logits.shape[1]), -torch.inf)
        logits[row] = torch.where(logits[row].isnan(), logits[row], adjusted)
    return replace(batch, capped=masked.int())


def _bits(words: Tensor, first: int, n: int) -> Tensor:
    """bool [n]: the bits of ids first .. first + n - 1, of int32 words of which the first holds `first`'s."""
    bits = words[:, None].bitwise_right_shift(torch.arange(32, device=words.device)).bitwise_and(1).bool().flatten()
    return bits[first % 32 : first % 32 + n]
