"""Tables for attention kernels that take one contiguous row of page ids a sequence, and its length.

    tables[r, j]    the page of keys j * page ..  of row r, counted from the first page that the row's query reads; 0 behind them
    lengths[r]      keys of row r, its own included, counted from there

With a window only its pages are named: keys carry their rotation, so only their distance to the query matters, and a window that is
masked by distance sees the same. A kernel may then touch any entry of a row: each names a page of the table's own pool.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.slots import first_page, row_entries


def block_tables(
    table: Tensor, slots: Tensor, positions: Tensor, page: int, window: int | None, tables: Tensor, lengths: Tensor
) -> None:
    """Fill tables int32 [rows, width] and lengths int32 [rows] for queries at `positions`, which are each row's last keys.

    table int32 [slots, columns], a KV group's; slots and positions int32 [rows]. A padding row (position -1) has one key, in the
    null page.
    """
    rows, width = tables.shape
    check_contiguous(tables)
    if not enabled(table):
        first = first_page(positions, page, window)
        entries = first[:, None] + torch.arange(tables.shape[1], dtype=torch.int32, device=tables.device)
        pages = table[slots[:, None].long(), entries.clamp(max=table.shape[1] - 1).long()]
        tables.copy_(torch.where(entries * page <= positions[:, None], pages, 0))
        lengths.copy_((positions + 1 - first * page).clamp(min=1))
        return
    block = min(1024, next_power_of_2(width))
    launch(
        _tables, (rows, cdiv(width, block)),
        table, slots, positions, tables, lengths, table.shape[1], width,
        PAGE=page, WINDOW=window or 0, BLOCK=block, warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["columns", "width", "slots", "positions"])  # rows may begin anywhere
def _tables(
    table, slots, positions, tables, lengths, columns, width,
    PAGE: constexpr, WINDOW: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0)
    position, slot, first, offset = row_entries(slots, positions, WINDOW, PAGE, BLOCK)
    entry = first + offset
    pages = tl.load(table + slot * columns + entry, (offset < width) & (entry * PAGE <= position) & (entry < columns), 0)
    tl.store(tables + row.to(tl.int64) * width + offset, pages, offset < width)
    if tl.program_id(1) == 0:
        tl.store(lengths + row, tl.maximum(position + 1 - first * PAGE, 1))
