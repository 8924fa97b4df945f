"""Which slot holds which page according to the plans: the host applies each plan, as the device does.

A plan that contradicts those before it is a violation:

    range      a page that its pool does not have, an entry that the table does not have, the null page appended
    release    an entry that holds nothing is released
    append     an entry that holds a page gets another
    ownership  a sequence runs on after its page went to another. Two may hold a page only as a shared prefix: at the same
               entry, and wholly within what the later one found cached
    coverage   a row's position, or a key in its window, has no page
    positions  a chunk does not begin where its sequence stands

Plans do not name finished sequences: they keep their entries until their slot or pages go to others. A decode row advances its
sequence by one: rows with drafts would need their results.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import PageViolation
from engine.geometry import KVGroup
from engine.plan import DEPTH, PlanView


@dataclass(frozen=True)
class Undo:
    """What a plan changed: table entries by their flat index and what stood there, and every slot's length before it."""

    step: int
    index: np.ndarray
    before: np.ndarray
    lengths: np.ndarray


class PageMap:
    """tables: int32 [slots, width] of each group, views of `flat`; lengths: int32 [slots], positions computed or planned.

    `pages` and `widths`: of each group's pool, null page included, and of its table.
    """

    def __init__(self, groups: Sequence[KVGroup], pages: Sequence[int], slots: int, widths: Sequence[int]) -> None:
        self.groups, self.pages = tuple(groups), tuple(pages)
        self.flat = np.zeros(slots * sum(widths), np.int32)
        self._starts = [slots * sum(widths[:at]) for at in range(len(widths))]
        self.tables = [
            self.flat[start : start + slots * width].reshape(slots, width)
            for start, width in zip(self._starts, widths, strict=True)
        ]
        self.lengths = np.zeros(slots, np.int32)
        self.undo: deque[Undo] = deque(maxlen=DEPTH + 1)
        self._holders: list[dict[int, set[int]]] = [{} for _ in groups]
        self._cached = [0] * slots
        self.lost_pages: dict[int, tuple[int, str]] = {}  # slots that may not run on: since which plan, and why
        self._changes: dict[int, int] = {}  # flat index -> what stood there

    def fold(self, plan: PlanView) -> tuple[np.ndarray, np.ndarray]:
        """Apply a plan: the flat indices that changed, int64 [n], and what stands there now. PageViolation: it may not."""
        self._changes = {}
        lengths = self.lengths.copy()
        try:
            self._release(plan)
            for admission in plan.admissions:
                self._admit(admission.slot, admission.cached)
            self._append(plan)
            self._run(plan)
        except PageViolation as error:
            raise PageViolation(f"plan {plan.step}: {error}") from None
        finally:
            index = np.fromiter(self._changes.keys(), np.int64, len(self._changes))
            before = np.fromiter(self._changes.values(), np.int32, len(self._changes))
            self.undo.append(Undo(plan.step, index, before, lengths))
        return index, self.flat[index]

    def restore(self, flat: np.ndarray, lengths: np.ndarray, lost_pages: Mapping[int, tuple[int, str]]) -> None:
        """Begin anew from tables, lengths and slots that may not run on."""
        self.flat[:], self.lengths[:], self.lost_pages = flat, lengths, dict(lost_pages)
        self.undo.clear()
        for table, holders in zip(self.tables, self._holders, strict=True):
            holders.clear()
            for slot, entry in np.argwhere(table).tolist():
                holders.setdefault(int(table[slot, entry]), set()).add(slot)

    def holders(self, group: int, page: int) -> Iterator[tuple[int, int]]:
        """(slot, entry) of every table entry that should name `page`."""
        yield from map(tuple, np.argwhere(self.tables[group] == page).tolist())

    # -- one plan

    def _release(self, plan: PlanView) -> None:
        for group, slot, first, count in plan.releases.tolist():
            for entry in range(first, first + count):
                if not self._entry(group, slot, entry):
                    raise PageViolation(f"{self._place(group, slot, entry)} is released and holds no page")
                self._set(group, slot, entry, 0)

    def _admit(self, slot: int, cached: int) -> None:
        for group, table in enumerate(self.tables):
            for entry in table[slot].nonzero()[0].tolist():
                self._set(group, slot, entry, 0)
        self.lost_pages.pop(slot, None)
        self._cached[slot] = self.lengths[slot] = cached

    def _append(self, plan: PlanView) -> None:
        last = {(group, slot, entry): page for group, slot, entry, page in plan.appends.tolist()}
        for (group, slot, entry), page in last.items():
            if not 0 < page < self.pages[group]:
                raise PageViolation(f"{self._place(group, slot, entry)} gets page {page} of a pool of {self.pages[group]}")
            if held := self._entry(group, slot, entry):
                raise PageViolation(f"{self._place(group, slot, entry)} holds page {held} and gets page {page}")
            whole = (entry + 1) * self.groups[group].page <= self._cached[slot]
            for other in list(self._holders[group].get(page, ())):
                if not (whole and self.tables[group][other, entry] == page):
                    name = self.groups[group].name
                    why = f"its page {page} of group {name} went to slot {slot}, entry {entry}, in plan {plan.step}"
                    self.lost_pages.setdefault(other, (plan.step, why))
                    self._holders[group][page].discard(other)
            self._set(group, slot, entry, page)

    def _run(self, plan: PlanView) -> None:
        chunks, decodes = plan.chunks, plan.decodes
        for slot in (*chunks[:, 0].tolist(), *decodes.tolist()) if self.lost_pages else ():
            if slot in self.lost_pages:
                raise PageViolation(f"slot {slot} runs on, but {self.lost_pages[slot][1]}")
        for slot, start, end, _ in chunks.tolist():
            if start != self.lengths[slot]:
                raise PageViolation(f"slot {slot} stands at position {self.lengths[slot]}, its chunk begins at {start}")
            self._cover(slot, start, end)
            self.lengths[slot] = end
        for group, table in zip(self.groups, self.tables, strict=True):
            for place in self._uncovered(group, table, decodes):
                slot = int(decodes[place])
                self._cover(slot, int(self.lengths[slot]), int(self.lengths[slot]) + 1)
        self.lengths[decodes] += 1

    def _uncovered(self, group: KVGroup, table: np.ndarray, slots: np.ndarray) -> list[int]:
        """Decode rows whose own page, or that of the oldest key they see, is not there."""
        positions = self.lengths[slots]
        last = positions // group.page
        first = np.zeros_like(last) if group.window is None else np.maximum(positions - group.window + 1, 0) // group.page
        inside = np.minimum(last, table.shape[1] - 1)
        missing = (last >= table.shape[1]) | (table[slots, inside] == 0) | (table[slots, np.minimum(first, inside)] == 0)
        return missing.nonzero()[0].tolist()

    def _cover(self, slot: int, start: int, end: int) -> None:
        for group, table in zip(self.groups, self.tables, strict=True):
            for entry in group.pages_for(start, end):
                if entry >= table.shape[1] or not table[slot, entry]:
                    where = self._place(group.index, slot, entry)
                    raise PageViolation(f"{where} holds no page, and positions [{start}, {end}) need it")

    # -- one entry

    def _entry(self, group: int, slot: int, entry: int) -> int:
        table = self.tables[group]
        if not (0 <= slot < table.shape[0] and 0 <= entry < table.shape[1]):
            raise PageViolation(f"{self._place(group, slot, entry)} lies outside a table of {table.shape}")
        return int(table[slot, entry])

    def _set(self, group: int, slot: int, entry: int, page: int) -> None:
        table, holders = self.tables[group], self._holders[group]
        before = int(table[slot, entry])
        self._changes.setdefault(self._starts[group] + slot * table.shape[1] + entry, before)
        table[slot, entry] = page
        if before:
            holders.get(before, set()).discard(slot)
        if page:
            holders.setdefault(page, set()).add(slot)

    def _place(self, group: int, slot: int, entry: int) -> str:
        return f"slot {slot}, group {self.groups[group].name}, entry {entry}"


def rolled_back(flat: np.ndarray, undos: Iterable[Undo]) -> np.ndarray:
    """Flat tables as they were before the plans of `undos`, newest last."""
    flat = flat.copy()
    for undo in reversed(list(undos)):
        flat[undo.index] = undo.before
    return flat
