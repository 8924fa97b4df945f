"""Page tables held against what they should hold: the kernel, in the interpreter, records what the reference records."""

import random
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.launch import enabled, plain_torch
from kernels.slots import gather_pages
from kernels.table_check import COPIED_ENTRY, RECORD, RECORDS, ROW_ENTRY, TABLE_ENTRY, check_rows, new_violations
from tests.support import interpreter

pytestmark = pytest.mark.cpu

PAGE, PAGES, SLOTS, WIDTH, ROWS = 32, 50, 20, 24, 9
END = WIDTH * PAGE - 1  # the position of a slot's last token
CPU = torch.device("cpu")
Records = list[tuple[int, ...]]


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@dataclass
class Tables:
    """A table that is right, and decode rows whose page ids were gathered from it."""

    table: Tensor
    expected: Tensor
    slots: Tensor
    positions: Tensor
    gathered: Tensor
    window: int | None

    def check(self, *, reference: bool = False) -> Records:
        """The records, sorted."""
        slots = torch.arange(SLOTS, dtype=torch.int32), torch.full((SLOTS,), END, dtype=torch.int32)
        rows = self.slots, self.positions
        return self.checked(reference, (TABLE_ENTRY, self.table, slots, None), (ROW_ENTRY, self.gathered, rows, self.window))

    def copies(self) -> Tensor:
        """The rows' page ids as another library's kernel takes them, over what an earlier step left."""
        width = WIDTH if self.window is None else 8
        copies, lengths = torch.full((ROWS, width), 2**31 - 7, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
        gather_pages(self.table, self.slots, self.positions, PAGE, self.window, copies, lengths)
        return copies

    def check_copies(self, copies: Tensor) -> Records:
        """The records, sorted."""
        return self.checked(False, (COPIED_ENTRY, copies, (self.slots, self.positions), self.window))

    def checked(self, reference: bool, *kinds: tuple[int, Tensor, tuple[Tensor, Tensor], int | None]) -> Records:
        """The records of these rows, sorted."""
        violations = new_violations(CPU)
        with plain_torch() if reference else nullcontext():
            for kind, actual, rows, window in kinds:
                check_rows(kind, 1, actual, self.expected, PAGES, *rows, PAGE, window, violations)
        return recorded(violations)


def recorded(violations: Tensor) -> Records:
    """The records, sorted, and how many violations there were."""
    count = int(violations[0])
    records = violations[RECORD:].view(RECORDS, RECORD)
    assert not records[count:].any()
    return [*sorted(tuple(record) for record in records[: min(count, RECORDS)].tolist()), (count,)]


def made(seed: int, window: int | None) -> Tables:
    """Slots of random lengths, their pages distinct; rows of some of them, the last one padding."""
    rng = random.Random(seed)
    table = torch.zeros((SLOTS, WIDTH), dtype=torch.int32)
    slots = rng.sample(range(SLOTS - 1), ROWS - 1)
    positions = [rng.randrange(WIDTH * PAGE) for _ in slots]
    for slot, position in zip(slots, positions, strict=True):
        first = 0 if window is None else max(position - window + 1, 0) // PAGE
        for entry in range(first, position // PAGE + 1):
            table[slot, entry] = rng.randrange(1, PAGES)
    rows = torch.tensor([*slots, SLOTS - 1], dtype=torch.int32), torch.tensor([*positions, -1], dtype=torch.int32)
    gathered = torch.full((ROWS, WIDTH if window is None else window // PAGE + 2), 2**31 - 7, dtype=torch.int32)
    gather_pages(table, *rows, PAGE, window, gathered)
    return Tables(table, table.clone(), *rows, gathered, window)


def spoil(tables: Tables, seed: int) -> None:
    """Planted faults: table entries and gathered ids of all kinds, in and out of range, in use and behind it."""
    rng = random.Random(seed)
    for _ in range(rng.randrange(1, 8)):
        tables.table[rng.randrange(SLOTS), rng.randrange(WIDTH)] = rng.choice([0, 7, PAGES - 1, PAGES, -1, 2**30])
    for _ in range(rng.randrange(1, 4)):
        tables.gathered[rng.randrange(ROWS), rng.randrange(tables.gathered.shape[1])] = rng.choice([0, 7, PAGES, -5])


@pytest.mark.parametrize("window", [None, 128])
def test_what_is_right_has_no_violations(window: int | None) -> None:
    """Ids behind what a row reads may be anything, in rows that `gather_pages` copied nothing but zeros; nothing is recorded,
    nothing changed."""
    for seed in range(10):
        tables = made(seed, window)
        gathered, copies = tables.gathered.clone(), tables.copies()
        assert tables.check() == tables.check_copies(copies) == [(0,)]
        assert torch.equal(tables.gathered, gathered)
        assert torch.equal(copies, tables.copies())


def test_each_planted_fault_is_recorded() -> None:
    """A stale tail, an id out of the pool, a null page that a row needs: each by its place, with what was found and wanted."""
    tables = made(3, None)
    slot, position = int(tables.slots[0]), int(tables.positions[0])
    tail = position // PAGE + 1
    tables.table[slot, tail], tables.table[slot, 0] = 9, PAGES + 3
    first = int(tables.expected[slot, 0])
    tables.expected[slot, 1] = tables.table[slot, 1] = tables.gathered[0, 1] = 0
    assert tables.check() == [
        (ROW_ENTRY, 1, slot, 1, 0, 0, 0, position), (TABLE_ENTRY, 1, slot, 0, PAGES + 3, first, slot, END),
        (TABLE_ENTRY, 1, slot, tail, 9, 0, slot, END), (3,),
    ]
    assert tables.table[slot, 0] == first
    assert tables.table[slot, tail] == 9


@pytest.mark.parametrize("window", [None, 128])
def test_each_fault_in_a_copy_is_recorded(window: int | None) -> None:
    """A stale tail, an id in a padding row, another row's pages, an id of no pool: by row, slot and entry; the last is mended."""
    tables = made(3, window)
    copies = tables.copies()
    slot, position = int(tables.slots[0]), int(tables.positions[0])
    first = 0 if window is None else max(position - window + 1, 0) // PAGE
    wanted = int(copies[0, 0])
    copies[0, -1], copies[0, 0], copies[ROWS - 1, 2] = 9, 2**31 - 7, 5
    assert tables.check_copies(copies) == [
        (COPIED_ENTRY, 1, slot, first, 2**31 - 7, wanted, 0, position),
        (COPIED_ENTRY, 1, slot, first + copies.shape[1] - 1, 9, 0, 0, position),
        (COPIED_ENTRY, 1, SLOTS - 1, 2, 5, 0, ROWS - 1, -1), (3,),
    ]
    assert (int(copies[0, 0]), int(copies[0, -1])) == (wanted, 9)
    copies = tables.copies()
    copies[1] = copies[0]
    found = tables.check_copies(copies)
    assert found[-1][0] == int((copies[0] != tables.copies()[1]).sum()) > 0
    assert all(record[2] == int(tables.slots[1]) and record[6] == 1 for record in found[:-1])


interpreted_each_planted_fault_is_recorded = test_each_planted_fault_is_recorded
interpreted_each_fault_in_a_copy_is_recorded = test_each_fault_in_a_copy_is_recorded


def interpreted_kernel_equals_reference() -> None:
    """The same records and the same repairs, with a window and without; a fault more is a record more."""
    for seed, window in product((0, 1), (None, 128)):
        kernel, reference = made(seed, window), made(seed, window)
        assert enabled(kernel.table)
        for tables in (kernel, reference):
            spoil(tables, seed + 100)
        assert kernel.check() == reference.check(reference=True)
        assert torch.equal(kernel.table, reference.table)
        assert torch.equal(kernel.gathered, reference.gathered)


def interpreted_many_violations_are_counted() -> None:
    """More than there is room for: all are counted, the first are kept, nothing is written behind them."""
    tables = made(1, None)
    tables.table[:] = 3
    tables.expected[:] = 4
    tables.gathered[:] = 4
    records = tables.check()
    assert records[-1] == (SLOTS * WIDTH,)
    assert len(records) == RECORDS + 1
