"""The setting `debug_pages`: compares the device's page tables with those that the plans make.

    plan --expect--> expected tables --.
    plan --apply--> tables ------------+--> check_rows -----> violations --with the step's result--> PageViolation
                      |                |                          |
                      `--FlashInfer's own copies --> check_rows --'
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import PageViolation
from engine.geometry import KVGroup
from engine.plan import PlanView
from engine.rank.batch import ForwardBatch
from engine.rank.slots import SlotState
from kernels.table_check import (
    COPIED_ENTRY,
    RECORD,
    RECORDS,
    ROW_ENTRY,
    TABLE_ENTRY,
    check_rows,
    new_violations,
)

_SHOWN = 4


class Violation(NamedTuple):
    kind: int
    group: int
    slot: int
    entry: int
    page: int
    expected: int
    row: int
    position: int


class PageCheck:
    def __init__(self, slots: SlotState) -> None:
        self._slots = slots
        self._pages = [cache.pool.shape[1] for cache in slots.cache]
        self._tables = [torch.zeros_like(cache.table) for cache in slots.cache]
        self._all_slots = torch.arange(len(self._tables[0]), dtype=torch.int32, device=slots.device)
        self._ends = [torch.full_like(self._all_slots, cache.group.page * cache.table.shape[1] - 1) for cache in slots.cache]
        self.violations = new_violations(slots.device)

    def expect(self, plan: PlanView) -> None:
        """Apply a plan to the expected tables. PageViolation: it appends an entry or page that does
        not exist."""
        for group, slot, first, count in plan.releases.tolist():
            self._tables[group][slot, first : first + count] = 0
        for table in self._tables:
            for admission in plan.admissions:
                table[admission.slot] = 0
        for group, slot, entry, page in plan.appends.tolist():
            pages = self._pages[group]
            width = self._tables[group].shape[1]
            if not (0 < page < pages and 0 <= entry < width):
                where = self._entry_name(group, slot, entry)
                has = f"its pool has {pages} pages, its table {width} entries"
                raise PageViolation(f"plan {plan.step}: {where} gets page {page}; {has}")
            self._tables[group][slot, entry] = page

    def clear(self) -> None:
        for table in self._tables:
            table.zero_()

    def check(self, batch: ForwardBatch) -> None:
        first = batch.prompts
        slots, positions = (rows[first :: batch.width].contiguous() for rows in (batch.slots, batch.positions))
        for cache, ends, gathered in zip(self._slots.cache, self._ends, batch.pages, strict=True):
            self.compare(TABLE_ENTRY, cache.group, cache.table, self._all_slots, ends, None)
            self.compare(ROW_ENTRY, cache.group, gathered, slots, positions, cache.group.window)

    def compare(self, kind: int, group: KVGroup, actual: Tensor, slots: Tensor, positions: Tensor, window: int | None) -> None:
        """As `CopyCheck`. Capturable."""
        expected = self._tables[group.index]
        pages = self._pages[group.index]
        check_rows(kind, group.index, actual, expected, pages, slots, positions, group.page, window, self.violations)

    def verify(self, step: int, violations: np.ndarray) -> None:
        count = int(violations[0])
        if count:
            records = violations[RECORD:].reshape(RECORDS, RECORD)[:count].tolist()
            shown = "; ".join(self._sentence(Violation(*record)) for record in sorted(records)[:_SHOWN])
            if count > _SHOWN:
                more = f"; and {count - _SHOWN} more"
            else:
                more = ""
            raise PageViolation(f"step {step}: {shown}{more}")

    def _entry_name(self, group: int, slot: int, entry: int) -> str:
        return f"slot {slot}, group {self._slots.cache.groups[group].group.name}, entry {entry}"

    def _sentence(self, wrong: Violation) -> str:
        if wrong.kind == TABLE_ENTRY:
            row = ""
        else:
            row = f"row {wrong.row} at position {wrong.position}, "
        where = f"{row}{self._entry_name(wrong.group, wrong.slot, wrong.entry)}"
        if wrong.kind == ROW_ENTRY and wrong.page == wrong.expected == 0:
            return f"{where}: needs a page and has none"
        verb = {ROW_ENTRY: "reads", TABLE_ENTRY: "names", COPIED_ENTRY: "attention's copy names"}[wrong.kind]
        if wrong.expected:
            expected = f"page {wrong.expected}"
        else:
            expected = "no page"
        return f"{where}: {verb} page {wrong.page}, expected {expected}; {self._owner(wrong.group, wrong.page)}"

    def _owner(self, group: int, page: int) -> str:
        if not 0 <= page < self._pages[group]:
            return f"its pool has {self._pages[group]} pages"
        if not page:
            return "page 0 is the null page"
        for slot, entry in (self._tables[group] == page).nonzero().tolist():
            return f"page {page} is slot {slot}'s entry {entry}"
        return f"nobody holds page {page}"
