"""Page tables held against what they should hold, before the kernels of a step read them.

    table entries   table[slot, entry] = expected[slot, entry], for every entry of every slot
    row entries     a decode row's page ids, as gathered, are those expected of its slot, and none that its position needs is null
    copied entries  a row of page ids that was copied for another library's kernel (`kernels.block_tables`) names the pages expected
                    of its slot up to its position, and the null page behind it and in all of a padding row

What differs is recorded, RECORDS of them at most, and counted. An id outside the pool is replaced by the expected one, so that the
kernels behind do not fault before anybody has read the record. With `every` = n a step looks at the slots and rows that are equal
to its number modulo n.

    violations int32 [RECORD * (RECORDS + 1)]    [0] how many there were; record r from RECORD * (r + 1):
                                                 kind, group, slot, entry, actual, expected, row, position
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.grid import cdiv, next_power_of_2
from kernels.launch import enabled, launch, trigger, wait
from kernels.slots import first_entry

RECORD, RECORDS = 8, 64
TABLE_ENTRY, ROW_ENTRY, COPIED_ENTRY = 1, 2, 3  # kinds; a table entry has row and position -1


def new_violations(device: torch.device) -> Tensor:
    """Zeroed; never reset: the first step with a violation is the last."""
    return torch.zeros(RECORD * (RECORDS + 1), dtype=torch.int32, device=device)


def check_table(
    plan: Tensor,
    step: int,
    group: int,
    table: Tensor,
    expected: Tensor,
    pages: int,
    slots: Tensor,
    positions: Tensor,
    gathered: Tensor,
    page: int,
    window: int | None,
    every: int,
    violations: Tensor,
) -> None:
    """Checks one KV group; may change `table` and `gathered`.

    plan int32, in which the step's low word is number `step`; table and expected int32 [slots, width]; pages: of the pool
    slots, positions int32 [rows] of the decode rows, gathered int32 [rows, read width] as `kernels.slots.gather_pages` made it
    """
    assert table.shape == expected.shape, (table.shape, expected.shape)
    assert slots.shape == positions.shape == gathered.shape[:1], (slots.shape, positions.shape, gathered.shape)
    rows, (count, width) = slots.shape[0], table.shape
    if not enabled(table, __name__):
        rest = (plan, step, group, table, expected, pages, slots, positions, gathered, page, window, every, violations)
        _check_reference(*rest)
        return
    block = min(1024, next_power_of_2(max(width, gathered.shape[1])))
    blocks = cdiv(width, block)
    launch(
        _check, (count * blocks + rows,), plan, group, table, expected, pages, count * blocks, blocks, width, slots, positions,
        gathered, gathered.shape[1], violations, STEP=step, PAGE=page, WINDOW=window or 0, EVERY=every, BLOCK=block,
        LIMIT=RECORDS, warps=4,
    )  # fmt: skip


def check_copies(
    plan: Tensor,
    step: int,
    group: int,
    expected: Tensor,
    pages: int,
    slots: Tensor,
    positions: Tensor,
    copies: Tensor,
    page: int,
    window: int | None,
    every: int,
    violations: Tensor,
) -> None:
    """Checks every entry of one KV group's copied rows; may change `copies`.

    copies int32 [rows, width], contiguous: of each row the pages of keys from the first that a query at `positions` int32 [rows]
    sees through `window` (None: from key 0) up to its own, then zeros; the rest as in `check_table`
    """
    rows, width = copies.shape
    assert slots.shape == positions.shape == (rows,), (slots.shape, positions.shape, copies.shape)
    assert copies.is_contiguous(), copies.stride()
    if not enabled(copies, __name__):
        _copies_reference(plan, step, group, expected, pages, slots, positions, copies, page, window, every, violations)
        return
    launch(
        _check_copies, (rows,), plan, group, expected, pages, expected.shape[1], slots, positions, copies, width, violations,
        STEP=step, PAGE=page, WINDOW=window or 0, EVERY=every, BLOCK=min(1024, next_power_of_2(width)), LIMIT=RECORDS, warps=4,
    )  # fmt: skip


# ---- reference


def _check_reference(
    plan: Tensor, step: int, group: int, table: Tensor, expected: Tensor, pages: int, slots: Tensor, positions: Tensor,
    gathered: Tensor, page: int, window: int | None, every: int, violations: Tensor,
) -> None:
    turn = int(plan[step]) % every
    for slot, entry in (table != expected).nonzero().tolist():
        if slot % every == turn:
            actual, correct = int(table[slot, entry]), int(expected[slot, entry])
            _record(violations, TABLE_ENTRY, group, slot, entry, actual, correct, -1, -1)
            if not 0 <= actual < pages:
                table[slot, entry] = correct
    for row in range(turn, slots.shape[0], every):
        slot, position = int(slots[row]), int(positions[row])
        first = 0 if window is None else max(position - window + 1, 0) // page
        for entry in range(first, min(position // page + 1, first + gathered.shape[1])):
            actual = int(gathered[row, entry - first])
            correct = int(expected[slot, entry]) if entry < table.shape[1] else 0
            if actual != correct or not correct:
                _record(violations, ROW_ENTRY, group, slot, entry, actual, correct, row, position)
            if not 0 <= actual < pages:
                gathered[row, entry - first] = correct


def _copies_reference(
    plan: Tensor, step: int, group: int, expected: Tensor, pages: int, slots: Tensor, positions: Tensor, copies: Tensor, page: int,
    window: int | None, every: int, violations: Tensor,
) -> None:
    turn = int(plan[step]) % every
    for row in range(turn, slots.shape[0], every):
        slot, position = int(slots[row]), int(positions[row])
        first = 0 if window is None else max(position - window + 1, 0) // page
        held = expected[slot, first : max(position, -1) // page + 1][: copies.shape[1]]
        correct = torch.zeros_like(copies[row])
        correct[: len(held)] = held
        for at in (copies[row] != correct).nonzero().flatten().tolist():
            actual, correct_page = int(copies[row, at]), int(correct[at])
            _record(violations, COPIED_ENTRY, group, slot, first + at, actual, correct_page, row, position)
            if not 0 <= actual < pages:
                copies[row, at] = correct_page


def _record(violations: Tensor, *values: int) -> None:
    at = int(violations[0])
    violations[0] += 1
    if at < RECORDS:
        violations[RECORD * (at + 1) : RECORD * (at + 2)] = torch.tensor(values, dtype=torch.int32)


# ---- kernel


@triton.jit
def _note(
    violations: tl.tensor, bad: tl.tensor, kind: tl.tensor, group: tl.tensor, slot: tl.tensor, entry: tl.tensor, actual: tl.tensor,
    correct: tl.tensor, row: tl.tensor, position: tl.tensor, LIMIT: tl.constexpr,
) -> None:
    """A record of each lane that is `bad`."""
    one = tl.full(entry.shape, 1, tl.int32)
    at = tl.atomic_add(violations + entry * 0, one, mask=bad)
    record = violations + 8 * (at + 1)
    kept = bad & (at < LIMIT)
    tl.store(record, one * kind, kept)
    tl.store(record + 1, one * group, kept)
    tl.store(record + 2, one * slot, kept)
    tl.store(record + 3, entry, kept)
    tl.store(record + 4, actual, kept)
    tl.store(record + 5, correct, kept)
    tl.store(record + 6, one * row, kept)
    tl.store(record + 7, one * position, kept)


@triton.jit(do_not_specialize=["group", "pages", "tables", "blocks", "width", "read_width", "slots", "positions"])
def _check(
    plan: tl.tensor, group: tl.tensor, table: tl.tensor, expected: tl.tensor, pages: tl.tensor, tables: tl.tensor,
    blocks: tl.tensor, width: tl.tensor, slots: tl.tensor, positions: tl.tensor, gathered: tl.tensor, read_width: tl.tensor,
    violations: tl.tensor, STEP: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, EVERY: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr, PDL: tl.constexpr,
) -> None:
    trigger(PDL)
    wait(PDL)
    program = tl.program_id(0)
    turn = tl.load(plan + STEP) % EVERY
    lane = tl.arange(0, BLOCK)
    if program < tables:
        slot = program // blocks
        entry = (program % blocks) * BLOCK + lane
        live = (entry < width) & (slot % EVERY == turn)
        address = table + slot.to(tl.int64) * width + entry
        actual = tl.load(address, live, 0)
        correct = tl.load(expected + slot.to(tl.int64) * width + entry, live, 0)
        bad = actual != correct
        _note(violations, bad, 1, group, slot, entry, actual, correct, -1, -1, LIMIT)
        tl.store(address, correct, bad & ((actual < 0) | (actual >= pages)))
    else:
        row = program - tables
        if row % EVERY == turn:
            slot = tl.load(slots + row)
            position = tl.load(positions + row)
            first = first_entry(position, WINDOW, PAGE)
            for start in range(0, read_width, BLOCK):
                at = start + lane
                entry = first + at
                used = (at < read_width) & (entry * PAGE <= position) & (position >= 0)
                address = gathered + row.to(tl.int64) * read_width + at
                actual = tl.load(address, used, 0)
                correct = tl.load(expected + slot.to(tl.int64) * width + entry, used & (entry < width), 0)
                bad = used & ((actual != correct) | (correct == 0))
                _note(violations, bad, 2, group, slot, entry, actual, correct, row, position, LIMIT)
                tl.store(address, correct, used & ((actual < 0) | (actual >= pages)))


@triton.jit(do_not_specialize=["group", "pages", "columns", "width", "slots", "positions"])
def _check_copies(
    plan: tl.tensor, group: tl.tensor, expected: tl.tensor, pages: tl.tensor, columns: tl.tensor, slots: tl.tensor,
    positions: tl.tensor, copies: tl.tensor, width: tl.tensor, violations: tl.tensor, STEP: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, EVERY: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """A CTA: one row."""
    trigger(PDL)
    wait(PDL)
    row = tl.program_id(0)
    if row % EVERY == tl.load(plan + STEP) % EVERY:
        slot = tl.load(slots + row)
        position = tl.load(positions + row)
        first = first_entry(position, WINDOW, PAGE)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            entry = first + at
            live = at < width
            held = live & (position >= 0) & (entry * PAGE <= position) & (entry < columns)
            address = copies + row.to(tl.int64) * width + at
            actual = tl.load(address, live, 0)
            correct = tl.load(expected + slot.to(tl.int64) * columns + entry, held, 0)
            bad = live & (actual != correct)
            _note(violations, bad, 3, group, slot, entry, actual, correct, row, position, LIMIT)
            tl.store(address, correct, bad & ((actual < 0) | (actual >= pages)))
