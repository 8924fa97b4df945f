"""Compares rows of page ids with the expected ones before a step's kernels read them.

    TABLE_ENTRY    a slot's whole row of the page table
    ROW_ENTRY      a decode row's gathered page ids, up to its position, none null
    COPIED_ENTRY   a copied row: pages up to its position, then the null page

    violations int32 [RECORD * (RECORDS + 1)]    [0] their number; record r from RECORD * (r + 1):
                                                 kind, group, slot, entry, actual, expected, row, position

The expected id replaces one outside the pool, so that later kernels do not fault.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.slots import first_entry, first_page

RECORD = 8
RECORDS = 64
ROW_ENTRY, COPIED_ENTRY, TABLE_ENTRY = 1, 2, 3  # in the order in which violations are said
_RECORD = constexpr(RECORD)
_ROW_ENTRY = constexpr(ROW_ENTRY)


def new_violations(device: torch.device) -> Tensor:
    """Zeros, never reset: the first step with a violation is the last."""
    return torch.zeros(RECORD * (RECORDS + 1), dtype=torch.int32, device=device)


def check_rows(
    kind: int,
    group: int,
    actual: Tensor,
    expected: Tensor,
    pages: int,
    slots: Tensor,
    positions: Tensor,
    page: int,
    window: int | None,
    violations: Tensor,
) -> None:
    """Check page ids `actual`, int32 [rows, width], and replace invalid ones.

    expected int32 [slots, columns]; pages: of the pool; slots and positions int32 [rows]: column 0 is the first entry that a
    query at the position sees
    """
    rows, width = actual.shape
    check_contiguous(actual)
    if not enabled(actual):
        first = first_page(positions, page, window)[:, None]
        entries = first + torch.arange(width, device=actual.device)
        reach = positions[:, None]
        needed = (reach >= 0) & (entries * page <= reach)
        held = expected[slots[:, None].long(), entries.clamp(max=expected.shape[1] - 1)]
        correct = torch.where(needed & (entries < expected.shape[1]), held, 0)
        bad = actual != correct
        if kind == ROW_ENTRY:
            bad = needed & (bad | (correct == 0))
        for row, column in bad.nonzero().tolist():
            count = int(violations[0])
            cell = (row, column)
            if count < RECORDS:
                record = kind, group, slots[row], entries[cell], actual[cell], correct[cell], row, positions[row]
                violations[RECORD * (count + 1) : RECORD * (count + 2)] = torch.tensor(record)
            violations[0] += 1
        actual.copy_(torch.where(bad & ((actual < 0) | (actual >= pages)), correct, actual))
        return
    launch(
        _check_rows, (rows,), group, actual, width, expected, expected.shape[1], pages, slots, positions, violations,
        KIND=kind, PAGE=page, WINDOW=window or 0, BLOCK=min(1024, next_power_of_2(width)), LIMIT=RECORDS,
    )  # fmt: skip


# ---- kernel


@triton.jit(do_not_specialize=["group", "width", "columns", "pages", "slots", "positions"])
def _check_rows(
    group, actual, width, expected, columns, pages, slots, positions, violations,
    KIND: constexpr, PAGE: constexpr, WINDOW: constexpr, BLOCK: constexpr, LIMIT: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    first = first_entry(position, WINDOW, PAGE)
    for start in range(0, width, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        entry = first + offset
        needed = (offset < width) & (position >= 0) & (entry * PAGE <= position)
        address = actual + row.to(tl.int64) * width + offset
        value = tl.load(address, offset < width, 0)
        correct = tl.load(expected + slot.to(tl.int64) * columns + entry, needed & (entry < columns), 0)
        if KIND == _ROW_ENTRY:
            bad = needed & ((value != correct) | (correct == 0))
        else:
            bad = (offset < width) & (value != correct)
        ones = tl.full(entry.shape, 1, tl.int32)
        index = tl.atomic_add(violations + entry * 0, ones, mask=bad)
        kept = bad & (index < LIMIT)
        record = violations + _RECORD * (index + 1)
        fields = (ones * KIND, ones * group, ones * slot, entry, value, correct, ones * row, ones * position)
        for i in tl.static_range(_RECORD):
            tl.store(record + i, fields[i], kept)
        tl.store(address, correct, bad & ((value < 0) | (value >= pages)))
