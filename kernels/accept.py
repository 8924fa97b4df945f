"""Which of a row's drafts stand: the longest prefix that equals what the target itself sampled, up to the first stop id.

    sampled   s_0 s_1 .. s_W      s_i is the target's token behind the row's input and drafts d_1 .. d_i
    stand     s_0 .. s_a          a: the first i with s_i != d_{i+1}, or W; less where an earlier one of them is a stop id

Equality with the target's own sample is exact at every temperature: the noise of a token is keyed by seed, position and id alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.grid import next_power_of_2
from kernels.launch import enabled, launch, trigger, wait

_BLOCK = 128  # stop ids compared at once


def accept(sampled: Tensor, drafts: Tensor, slots: Tensor, positions: Tensor, stop: Tensor) -> Tensor:
    """sampled int32 [n, W + 1], drafts int32 [n, W], -1: none -> int32 [n], how many of the sampled tokens stand: 1 to W + 1.

    slots, positions int32 [n] of each row's input; position -1: padding, of which none stands. stop int32 [slots, ids], -1: none.
    """
    (rows, width), stops = drafts.shape, stop.shape[1]
    assert sampled.shape == (rows, width + 1), (sampled.shape, drafts.shape)
    assert len(slots) == len(positions) == rows, (slots.shape, positions.shape, drafts.shape)
    assert sampled.is_contiguous(), sampled.stride()
    assert drafts.is_contiguous(), drafts.stride()
    if not enabled(sampled, __name__):
        return _reference(sampled, drafts, stop[slots.long()]) * (positions >= 0)
    accepted = torch.empty(rows, dtype=torch.int32, device=sampled.device)
    launch(
        _accept, (rows,),
        sampled, drafts, slots, positions, stop, accepted,
        WIDTH=width, LANES=next_power_of_2(width + 1), STOPS=stops, BLOCK=min(_BLOCK, next_power_of_2(stops)), warps=1,
    )  # fmt: skip
    return accepted


def _reference(sampled: Tensor, drafts: Tensor, stop: Tensor) -> Tensor:
    stops = (sampled[:, :-1, None] == stop[:, None]).any(-1)
    goes_on = (sampled[:, :-1] == drafts) & ~stops
    return 1 + goes_on.int().cumprod(1).sum(1, dtype=torch.int32)


@triton.jit
def _accept(
    sampled: tl.tensor, drafts: tl.tensor, slots: tl.tensor, positions: tl.tensor, stop: tl.tensor, accepted: tl.tensor,
    WIDTH: tl.constexpr, LANES: tl.constexpr, STOPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row: the first place at which it ends."""
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    wait(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(sampled + row * (WIDTH + 1) + lane, lane < WIDTH, -2)
    ends = (token != tl.load(drafts + row * WIDTH + lane, lane < WIDTH, -1)).to(tl.int32)
    for at in range(0, STOPS, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        ids = tl.load(stop + slot * STOPS + ids, ids < STOPS, -1)
        ends = tl.maximum(ends, tl.max((token[:, None] == ids[None, :]).to(tl.int32), 1))
    count = tl.min(tl.where(ends > 0, lane, WIDTH), 0) + 1
    tl.store(accepted + row, tl.where(tl.load(positions + row) >= 0, count, 0))
