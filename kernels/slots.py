"""Applies a plan to device tables, and makes a step's inputs from them at fixed addresses.

A plan is int32, laid out by `PlanLayout`. Rows beyond its decode rows are padding: slot `padding`,
position -1, token 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait

_INPUTS = 32  # of decode rows, of a program: a lane each


class PlanLayout(NamedTuple):
    """Sections are decode rows, chunks, appends, releases, and others. row .. release: int32 of a section's row."""

    header: int  # before the sections
    counts: int  # index of the sections' numbers
    row: int
    chunk: int
    append: int
    release: int


def apply_plan(plan: Tensor, layout: PlanLayout, tables: Sequence[Tensor], lengths: Tensor) -> None:
    """plan int32 [n]; tables int32 [slots, width], one a KV group; lengths int32 [slots].

    Releases become 0, then appends their page, except those of group -1.
    """
    assert 1 <= len(tables) <= 2, len(tables)  # an entry is appended only once: the device writes in any order
    if enabled(plan):
        first = tables[0]
        last = tables[-1]
        launch(
            _apply, (1,), plan, first, first.shape[1], last, last.shape[1], lengths, HEADER=layout.header, COUNTS=layout.counts,
            ROW=layout.row, CHUNK=layout.chunk, APPEND=layout.append, RELEASE=layout.release, BLOCK=128,
        )  # fmt: skip
    else:
        _, chunks, appends, releases = plan_sections(plan, layout)
        for group, slot, first, count in releases.tolist():
            tables[group][slot, first : first + count] = 0
        for index, table in enumerate(tables):
            own = appends[appends[:, 0] == index]
            table[own[:, 1], own[:, 2]] = own[:, 3].int()
        lengths[chunks[:, 0]] = chunks[:, 2].int()


def decode_inputs(
    plan: Tensor, layout: PlanLayout, tokens: Tensor, lengths: Tensor, padding: int, ids: Tensor, positions: Tensor, slots: Tensor,
    width: int = 1,
) -> None:  # fmt: skip
    """Fill ids, positions and slots int32 [rows * width] from the plan's decode rows; lengths int32 [slots] grow by one.

    tokens int32 [slots, max_len + ..]. A row starts at its slot's length and goes on with draft tokens; narrower rows are padded,
    at position -1.
    """
    if enabled(plan):
        rows = len(ids) // width
        block_rows = _INPUTS // width
        launch(
            _inputs, (cdiv(rows, block_rows),), plan, tokens, tokens.shape[1], lengths, padding, ids, positions, slots, len(ids),
            HEADER=layout.header, COUNTS=layout.counts, ROW=layout.row, WIDTH=width, BLOCK_ROWS=block_rows, BLOCK=_INPUTS, warps=1,
        )  # fmt: skip
    else:
        decodes, widths, *_ = plan_sections(plan, layout)[0].unbind(1)
        count = len(decodes) * width
        lane = torch.arange(width, device=plan.device)
        offset = lengths[decodes].long()[:, None] + lane
        live = lane < widths[:, None]
        slots[:count], slots[count:] = decodes.int().repeat_interleave(width), padding
        positions[:count], positions[count:] = torch.where(live, offset, -1).flatten().int(), -1
        ids[:count], ids[count:] = torch.where(live, tokens[decodes[:, None], offset.clamp(max=tokens.size(1) - 1)], 0).flatten(), 0
        lengths[decodes] += 1


def gather_pages(
    table: Tensor, slots: Tensor, positions: Tensor, page: int, window: int | None, out: Tensor, lengths: Tensor | None = None
) -> None:
    """out int32 [sequences, width]: entry j is the page of positions (first + j) * page .. of a sequence's slot; first:
    `first_page` of its first row.

    slots and positions int32 [sequences * rows]: a sequence's rows are consecutive, at rising positions, then padding (-1).
    lengths int32 [sequences], for other libraries' kernels, which may touch any entry: entries after the last row's page become
    0; lengths count keys from the first page to the last row's, 1 for padding.
    """
    check_contiguous(out)
    (sequences, width), q_len = out.shape, max(1, len(slots) // max(1, len(out)))
    assert sequences * q_len == len(slots) == len(positions), (out.shape, slots.shape, positions.shape)
    if enabled(table):
        block = min(1024, next_power_of_2(width))
        launch(
            _pages, (sequences, cdiv(width, block)),
            table, slots, positions, out, lengths, table.shape[1], width,
            PAGE=page, WINDOW=window or 0, BLOCK=block, Q_LEN=q_len, warps=2,
        )  # fmt: skip
    else:
        slots = slots.view(-1, q_len)[:, 0]
        positions = positions.view(-1, q_len)
        first = first_page(positions[:, :1], page, window)
        last = positions.amax(1, keepdim=True)
        entries = first + torch.arange(width, device=out.device)
        pages = table[slots[:, None].long(), entries.clamp(max=table.shape[1] - 1)]
        out.copy_(torch.where(entries * page <= last, pages, out if lengths is None else 0))
        if lengths is not None:
            lengths.copy_((last + 1 - first * page).clamp(min=1).squeeze(1))


def first_page(positions: Tensor, page: int, window: int | None) -> Tensor:
    return torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0) // page


def rotary_table(positions: Tensor, frequencies: Tensor, out: Tensor) -> None:
    """positions int32 [rows], frequencies fp32 [pairs] -> out fp32 [rows, 2 * pairs]: cos, then
    sin."""
    pairs = frequencies.shape[0]
    if enabled(positions):
        launch(_rotary, (positions.shape[0],), positions, frequencies, out, pairs, warps=1, BLOCK=next_power_of_2(pairs))
    else:
        angles = positions[:, None].float() * frequencies
        out[:, :pairs], out[:, pairs:] = angles.cos(), angles.sin()


# ---- references


def plan_sections(plan: Tensor, layout: PlanLayout) -> list[Tensor]:
    widths = layout[-4:]
    counts = plan[layout.counts : layout.counts + 4].tolist()
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    sections = plan[layout.header : layout.header + sum(sizes)].long().split(sizes)
    return [section.view(-1, width) for section, width in zip(sections, widths, strict=True)]


# ---- kernels


@triton.jit(do_not_specialize=["first_width", "last_width"])
def _apply(
    plan, first_table, first_width, last_table, last_width, lengths,
    HEADER: constexpr, COUNTS: constexpr, ROW: constexpr, CHUNK: constexpr, APPEND: constexpr, RELEASE: constexpr, BLOCK: constexpr,
    PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    wait(PDL)
    rows = tl.load(plan + COUNTS)
    chunks = tl.load(plan + COUNTS + 1)
    appends = tl.load(plan + COUNTS + 2)
    releases = tl.load(plan + COUNTS + 3)
    chunk_at = plan + HEADER + ROW * rows
    append_at = chunk_at + CHUNK * chunks
    release_at = append_at + APPEND * appends
    lane = tl.arange(0, BLOCK)
    for start in range(0, releases, BLOCK):
        row = start + lane
        live = row < releases
        at = release_at + RELEASE * row
        group = tl.load(at, live, -1)
        slot = tl.load(at + 1, live, 0).to(tl.int64)
        first = tl.load(at + 2, live, 0)
        count = tl.load(at + 3, live, 0)
        for step in range(tl.max(count, 0)):
            named = live & (step < count)
            tl.store(first_table + slot * first_width + first + step, 0, named & (group == 0))
            tl.store(last_table + slot * last_width + first + step, 0, named & (group == 1))
    tl.debug_barrier()  # a page that is appended where another was released stands
    for start in range(0, appends, BLOCK):
        row = start + lane
        live = row < appends
        at = append_at + APPEND * row
        group = tl.load(at, live, -1)
        slot = tl.load(at + 1, live, 0).to(tl.int64)
        entry = tl.load(at + 2, live, 0)
        page = tl.load(at + 3, live, 0)
        tl.store(first_table + slot * first_width + entry, page, live & (group == 0))
        tl.store(last_table + slot * last_width + entry, page, live & (group == 1))
    for start in range(0, chunks, BLOCK):
        row = start + lane
        live = row < chunks
        chunk = chunk_at + CHUNK * row
        tl.store(lengths + tl.load(chunk, live, 0), tl.load(chunk + 2, live, 0), live)


@triton.jit(do_not_specialize=["tokens_width", "padding", "count", "ids", "positions", "slots"])  # rows may begin anywhere
def _inputs(
    plan, tokens, tokens_width, lengths, padding, ids, positions, slots, count,
    HEADER: constexpr, COUNTS: constexpr, ROW: constexpr, WIDTH: constexpr, BLOCK_ROWS: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    """A row's first lane advances its slot's length after all lanes, of one warp, have read it."""
    trigger(PDL)
    wait(PDL)
    lane = tl.arange(0, BLOCK)
    entry = tl.program_id(0) * (BLOCK_ROWS * WIDTH) + lane
    row = tl.program_id(0) * BLOCK_ROWS + lane // WIDTH
    own = lane < BLOCK_ROWS * WIDTH
    live = own & (row < tl.load(plan + COUNTS))
    slot = tl.load(plan + HEADER + ROW * row, live, padding)
    length = tl.load(lengths + slot, live, -1)
    given = live
    position = length
    if WIDTH > 1:
        ahead = lane % WIDTH
        given = live & (ahead < tl.load(plan + HEADER + ROW * row + 1, live, 0))
        position = tl.where(given, length + ahead, -1)
    token = tl.load(tokens + slot.to(tl.int64) * tokens_width + position, given, 0)
    tl.store(slots + entry, slot, own & (entry < count))
    tl.store(positions + entry, position, own & (entry < count))
    tl.store(ids + entry, token, own & (entry < count))
    tl.store(lengths + slot, length + 1, live & (lane % WIDTH == 0))


@triton.jit
def first_entry(position, WINDOW: constexpr, PAGE: constexpr):
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0) // PAGE
    return first


@triton.jit(do_not_specialize=["width", "out_width", "slots", "positions"])
def _pages(
    table, slots, positions, out, lengths, width, out_width,
    PAGE: constexpr, WINDOW: constexpr, BLOCK: constexpr, Q_LEN: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0) * Q_LEN
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    first = first_entry(position, WINDOW, PAGE)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if Q_LEN > 1:
        lane = tl.arange(0, triton.next_power_of_2(Q_LEN))
        position = tl.max(tl.load(positions + row + lane, lane < Q_LEN, -1), 0)
    entry = first + offset
    live = (offset < out_width) & (entry * PAGE <= position) & (position >= 0)
    pages = tl.load(table + slot * width + entry, live, 0)
    if lengths is not None:
        live = offset < out_width
        if tl.program_id(1) == 0:
            tl.store(lengths + tl.program_id(0), tl.maximum(position + 1 - first * PAGE, 1))
    tl.store(out + tl.program_id(0).to(tl.int64) * out_width + offset, pages, live)


@triton.jit(do_not_specialize=["pairs", "positions"])
def _rotary(positions, frequencies, out, pairs, BLOCK: constexpr, PDL: constexpr):
    trigger(PDL)
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    live = pair < pairs
    frequency = tl.load(frequencies + pair, live, 0.0)
    wait(PDL)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    out += row * 2 * pairs + pair
    tl.store(out, tl.cos(angle), live)
    tl.store(out + pairs, tl.sin(angle), live)
