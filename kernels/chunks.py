"""Lists a step's prefill chunks on the device from its plan, so that a CUDA graph can hold the step.

A list is int32 [n, 4]: slot, first row, first position and rows of each chunk, then an entry of padding rows at positions below
0, then empty entries.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, enabled, launch, trigger, wait
from kernels.slots import PlanLayout, plan_sections

_BLOCK = 64  # chunks looked at in a turn


class StepRows(NamedTuple):
    """int32 [T] each: padded chunks, then decode rows, already filled."""

    ids: Tensor
    positions: Tensor
    slots: Tensor


class ResultInputs(NamedTuple):
    """Rows that give results, `width` a sequence: rows int64 [R], slots and positions int32 [R]; position -1: padding."""

    rows: Tensor
    slots: Tensor
    positions: Tensor


def chunk_inputs(
    plan: Tensor, layout: PlanLayout, tokens: Tensor, padding: int, rows: StepRows, prompts: int, chunks: Tensor,
    results: ResultInputs, width: int = 1,
) -> None:  # fmt: skip
    """Fill rows [0, prompts) of the step, the list `chunks` int32 [n + 1, 4], and `results`.

    tokens int32 [slots, max_len + ..]; width: decode rows of a sequence, after `prompts`
    """
    if enabled(plan):
        launch(
            _chunk_inputs, (cdiv(prompts, 32),), plan, tokens, tokens.shape[1], padding, *rows, prompts, chunks, len(chunks),
            *results, len(results.rows), HEADER=layout.header, COUNTS=layout.counts, ROW=layout.row, CHUNK=layout.chunk,
            WIDTH=width, ROWS=32, BLOCK=_BLOCK,
        )  # fmt: skip
        return
    decodes, planned, *_ = plan_sections(plan, layout)
    entries = []
    outputs = []
    row = 0
    for slot, start, end, first_logit, *_ in planned.tolist():
        entries.append((slot, row, start, end - start))
        row += end - start
        if first_logit < end:
            outputs += [(row - 1, slot, -1 if lane else end - 1) for lane in range(width)]
    entries.append((padding, row, row - prompts, prompts - row))
    for slot, first, position, count in entries:
        covered = torch.arange(position, position + count, dtype=torch.int32, device=plan.device)
        rows.slots[first : first + count], rows.positions[first : first + count] = slot, covered.clamp(min=-1)
        rows.ids[first : first + count] = torch.where(covered >= 0, tokens[slot, covered.clamp(min=0).long()], 0)
    decoding = range(prompts, prompts + len(decodes) * width)
    outputs += zip(decoding, *(x[decoding.start : decoding.stop].tolist() for x in (rows.slots, rows.positions)), strict=True)
    outputs += [(0, padding, -1)] * (len(results.rows) - len(outputs))
    chunks.zero_()[: len(entries)] = torch.tensor(entries, dtype=torch.int32)
    for out, values in zip(results, zip(*outputs, strict=True), strict=False):
        out.copy_(torch.tensor(values))


def extend_tiles(chunks: Tensor, tokens: int, rows: int) -> Tensor:
    """Tiles of up to `tokens` queries: a list int32 [m, 4]."""
    # Longest tiles first, to fill the last wave, but before them every fourth, shortest first: CTAs that read the same keys at once
    # wait for the same L2 lines (H200: 1.88 ms a layer, 1.97 by length alone).
    tiles = chunks.new_empty((rows // tokens + len(chunks), 4), dtype=torch.int32)
    if enabled(chunks):
        launch(_tiles, (cdiv(len(tiles), 64),), chunks, len(chunks), tiles, len(tiles), tokens, TILES=64, BLOCK=_BLOCK)
    else:
        cut = [
            (slot, row + done, position + done, min(tokens, count - done))
            for slot, row, position, count in chunks.tolist()
            for done in range(0, count, tokens)
        ]
        cut.sort(key=lambda tile: -tile[2])
        cut = cut[-4::-4] + [tile for index, tile in enumerate(cut) if (len(cut) - index) % 4]
        tiles.zero_()[: len(cut)] = torch.tensor(cut, dtype=torch.int32).view(-1, 4)
    return tiles


# ---- kernels


@triton.jit
def _store_entries(entries, index, slot, row, position, count, live):
    entry = entries + 4 * index
    tl.store(entry, slot, live)
    tl.store(entry + 1, row, live)
    tl.store(entry + 2, position, live)
    tl.store(entry + 3, count, live)


@triton.jit(do_not_specialize=["tokens_width", "padding", "prompts", "list_length", "result_count"])
def _chunk_inputs(
    plan, tokens, tokens_width, padding, ids, positions, slots, prompts, chunks, list_length, result_rows, result_slots,
    result_positions, result_count,
    HEADER: constexpr, COUNTS: constexpr, ROW: constexpr, CHUNK: constexpr, WIDTH: constexpr, ROWS: constexpr, BLOCK: constexpr,
    PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    wait(PDL)
    decodes = tl.load(plan + COUNTS)
    count = tl.load(plan + COUNTS + 1)
    begin = plan + HEADER + ROW * decodes
    first = tl.program_id(0) == 0
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    slot = row * 0 + padding
    position = row * 0 - 1
    total = decodes * 0
    sampled = decodes * 0
    for offset in range(0, count, BLOCK):
        live = offset + lane < count
        chunk = begin + CHUNK * (offset + lane)
        its_slot = tl.load(chunk, live, 0)
        start = tl.load(chunk + 1, live, 0)
        end = tl.load(chunk + 2, live, 0)
        first_logit = tl.load(chunk + 3, live, 0)
        last = total + tl.cumsum(end - start, 0)
        begun = last - (end - start)
        inside = (row[:, None] >= begun[None, :]) & (row[:, None] < last[None, :])
        slot += tl.sum(tl.where(inside, its_slot[None, :] - padding, 0), 1)
        position += tl.sum(tl.where(inside, start[None, :] + row[:, None] - begun[None, :] + 1, 0), 1)
        _store_entries(chunks, offset + lane, its_slot, begun, start, end - start, live & first)
        samples = (first_logit < end).to(tl.int32)
        index = (sampled + tl.cumsum(samples, 0) - samples) * WIDTH
        for token in range(WIDTH):
            gives = (samples > 0) & first
            tl.store(result_rows + index + token, (last - 1).to(tl.int64), gives)
            tl.store(result_slots + index + token, its_slot, gives)
            tl.store(result_positions + index + token, tl.where(token == 0, end - 1, -1), gives)
        total += tl.sum(end - start, 0)
        sampled += tl.sum(samples, 0)
    token = tl.load(tokens + slot.to(tl.int64) * tokens_width + position, position >= 0, 0)
    tl.store(slots + row, slot, row < prompts)
    tl.store(positions + row, position, row < prompts)
    tl.store(ids + row, token, row < prompts)
    if first:
        for offset in range(count, list_length, BLOCK):
            pad = offset + lane == count
            at = tl.where(pad, total, 0)
            start = tl.where(pad, total - prompts, 0)
            held = tl.where(pad, prompts - total, 0)
            _store_entries(chunks, offset + lane, tl.where(pad, padding, 0), at, start, held, offset + lane < list_length)
        for offset in range(sampled * WIDTH, result_count, BLOCK):
            index = offset + lane
            source = prompts + index - sampled * WIDTH
            written = index < result_count
            live = written & (index < (sampled + decodes) * WIDTH)
            tl.store(result_rows + index, tl.where(live, source, 0).to(tl.int64), written)
            tl.store(result_slots + index, tl.load(slots + source, live, padding), written)
            tl.store(result_positions + index, tl.load(positions + source, live, -1), written)


@triton.jit(do_not_specialize=["count", "tiles_count", "tokens"])
def _tiles(chunks, count, tiles, tiles_count, tokens, TILES: constexpr, BLOCK: constexpr, PDL: constexpr):
    trigger(PDL)
    wait(PDL)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, BLOCK)
    slot = tile * 0
    row = tile * 0
    position = tile * 0
    size = tile * 0
    total = count * 0
    longer = tile * 0
    for offset in range(0, count, BLOCK):
        live = offset + lane < count
        entry = chunks + 4 * (offset + lane)
        rows = tl.load(entry + 3, live, 0)
        cut = (rows + tokens - 1) // tokens
        last = total + tl.cumsum(cut, 0)
        done = (tile[:, None] - (last - cut)[None, :]) * tokens
        inside = (done >= 0) & (tile[:, None] < last[None, :])
        slot += tl.sum(tl.where(inside, tl.load(entry, live, 0)[None, :], 0), 1)
        row += tl.sum(tl.where(inside, tl.load(entry + 1, live, 0)[None, :] + done, 0), 1)
        position += tl.sum(tl.where(inside, tl.load(entry + 2, live, 0)[None, :] + done, 0), 1)
        size += tl.sum(tl.where(inside, tl.minimum(rows[None, :] - done, tokens), 0), 1)
        total += tl.sum(cut, 0)
    before = count * 0
    for offset in range(0, count, BLOCK):  # tiles that are longer, or as long and of a chunk before
        entry = chunks + 4 * (offset + lane)
        cut = (tl.load(entry + 3, offset + lane < count, 0) + tokens - 1) // tokens
        last = before + tl.cumsum(cut, 0)
        bound = position[:, None] - (last[None, :] <= tile[:, None])
        not_longer = (bound - tl.load(entry + 2, offset + lane < count, 0)[None, :] + tokens) // tokens
        longer += tl.sum(cut[None, :] - tl.minimum(tl.maximum(not_longer, 0), cut[None, :]), 1)
        before += tl.sum(cut, 0)
    fourths = (total - longer) // 4
    index = tl.where((total - longer) % 4 == 0, fourths - 1, longer + fourths)
    _store_entries(tiles, tl.where(tile < total, index, tile), slot, row, position, size, tile < tiles_count)
