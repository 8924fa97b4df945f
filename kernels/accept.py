"""Accepts draft tokens after sampling, and makes the drafter's inputs.

    sampled   s_0 .. s_W    s_i: the target's token after the row's input and draft tokens d_1 .. d_i
    accepted  s_0 .. s_a    a: the first i with s_i != d_{i+1}, or W; smaller after a stop id or missing token

Exact at every temperature: a token's noise depends only on seed, position and id.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import check_contiguous, enabled, launch, next_power_of_2, trigger, wait

_BLOCK = 128  # stop ids compared at once
_COLUMNS = 2048  # of a hidden row copied at once


class DraftInputs(NamedTuple):
    """A drafter's n rows, one a sequence, then padding."""

    ids: Tensor  # int32 [n]: the last accepted token, whose K and V are not computed yet
    slots: Tensor  # int32 [n]
    positions: Tensor  # int32 [1 + drafts, n]: of the last K and V, then of the input of each draft token; -1: padding
    hidden: Tensor  # [n, m], the row that gave the last token; undefined for padding


class Verified(NamedTuple):
    chosen: Tensor  # int32 [n * width, 2]: token and flags (`kernels.choose`)
    ids: Tensor  # int32 [n * width]: inputs
    slots: Tensor
    positions: Tensor  # int32 [n * width], of the inputs, as `slots`; -1: padding
    hidden: Tensor  # [n * width, m], the rows that gave the tokens
    width: int


def accept(rows: Verified, stop: Tensor, lengths: Tensor, padding: int, out: DraftInputs) -> Tensor:
    """Fills `out`; returns each row's number of accepted tokens, int32 [m]: 1 to width, 0 for padding.

    stop int32 [slots, ids], -1: none. lengths int32 [slots] grow by accepted - 1.
    """
    width = rows.width
    count = len(out.ids)
    sequences = len(rows.chosen) // width
    assert sequences <= count, (rows.chosen.shape, width, count)
    check_contiguous(*rows[:-1], out.hidden)
    if not enabled(rows.chosen):
        slots = rows.slots[::width]
        positions = rows.positions[::width]
        sampled, flags = (x.view(sequences, width) for x in rows.chosen.unbind(1))
        matches = sampled.new_ones((sequences, width), dtype=torch.int32)
        if width > 1:
            ids = rows.ids.view(sequences, width)[:, 1:]
            drafted = rows.positions.view(sequences, width)[:, 1:] >= 0
            ends = (sampled[:, :-1, None] == stop[slots.long()][:, None]).any(-1)
            matches[:, 1:] = (sampled[:, :-1] == ids) & drafted & ~ends & (flags[:, 1:] == 0) & (flags[:, :1] == 0)
        accepted = torch.zeros_like(out.ids)
        accepted[:sequences] = matches.cumprod(1).sum(1, dtype=torch.int32) * (positions >= 0)
        ahead = (accepted[:sequences] - 1).clamp(min=0)
        lengths[slots.long()] += ahead
        last = torch.arange(sequences, device=ahead.device) * width + ahead
        out.ids[:sequences], out.ids[sequences:] = rows.chosen[last, 0], 0
        out.slots[:sequences], out.slots[sequences:] = slots, padding
        offsets = torch.arange(len(out.positions), dtype=torch.int32, device=ahead.device)[:, None]
        out.positions[:, :sequences] = torch.where(positions >= 0, positions + ahead + offsets, -1)
        out.positions[:, sequences:] = -1
        out.hidden[:sequences] = torch.where((positions >= 0)[:, None], rows.hidden[last], out.hidden[:sequences])
        return accepted
    accepted = torch.empty_like(out.ids)
    stops = stop.shape[1]
    hidden = rows.hidden.shape[1]
    launch(
        _accept, (count,),
        rows.chosen, rows.ids, rows.slots, rows.positions, rows.hidden, stop, lengths, *out, out.positions.stride(0), accepted,
        sequences, padding,
        WIDTH=width, LANES=next_power_of_2(width), STOPS=stops, BLOCK=min(_BLOCK, next_power_of_2(stops)),
        OFFSETS=len(out.positions), OFFSET_LANES=next_power_of_2(len(out.positions)),
        HIDDEN=hidden, COLUMNS=min(_COLUMNS, next_power_of_2(hidden)),
    )  # fmt: skip
    return accepted


@triton.jit(do_not_specialize=["positions_stride", "sequences", "padding", "ids", "slots", "positions"])
def _accept(
    chosen, ids, slots, positions, hidden, stop, lengths, out_ids, out_slots, out_positions, out_hidden, positions_stride, accepted,
    sequences, padding,
    WIDTH: constexpr, LANES: constexpr, STOPS: constexpr, BLOCK: constexpr, OFFSETS: constexpr, OFFSET_LANES: constexpr,
    HIDDEN: constexpr, COLUMNS: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    entry = row * WIDTH + lane
    wait(PDL)
    here = row < sequences
    inside = here & (lane < WIDTH)
    is_draft = here & (lane < WIDTH - 1)
    position = tl.load(positions + row * WIDTH, here, -1)
    slot = tl.load(slots + row * WIDTH, here, padding).to(tl.int64)
    chosen += entry * 2
    token = tl.load(chosen, inside, -2)
    failed = tl.load(chosen + 1, inside, 0) != 0
    draft = tl.load(ids + entry + 1, is_draft, -1)
    drafted = tl.load(positions + entry + 1, is_draft, -1) >= 0
    ends = ((token != draft) | (drafted == 0) | (lane >= WIDTH - 1)).to(tl.int32)
    if WIDTH > 1:
        for first in range(0, STOPS, BLOCK):
            stops = first + tl.arange(0, BLOCK)
            stops = tl.load(stop + slot * STOPS + stops, stops < STOPS, -1)
            ends = tl.maximum(ends, tl.max((token[:, None] == stops[None, :]).to(tl.int32), 1))
    whole = tl.min(tl.where(failed, lane, LANES), 0)  # rows in front of the first one without a token
    last = tl.maximum(tl.minimum(tl.min(tl.where(ends > 0, lane, LANES), 0), whole - 1), 0)
    live = position >= 0
    tl.store(accepted + row, tl.where(live, last + 1, 0))
    tl.store(out_ids + row, tl.sum(tl.where((lane == last) & inside, token, 0), 0))
    tl.store(out_slots + row, slot)
    offset = tl.arange(0, OFFSET_LANES)
    tl.store(out_positions + offset * positions_stride + row, tl.where(live, position + last + offset, -1), offset < OFFSETS)
    if live & (last > 0):
        tl.store(lengths + slot, tl.load(lengths + slot) + last)
    if live:
        for first in range(0, HIDDEN, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            values = tl.load(hidden + (row * WIDTH + last) * HIDDEN + column, column < HIDDEN)
            tl.store(out_hidden + row * HIDDEN + column, values, column < HIDDEN)
