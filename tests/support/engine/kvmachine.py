"""A fake of all ranks that checks instead of computing: every page slot remembers whose entry it holds.

It runs plans as a rank would (releases, admissions, appends, then all writes of the step, then all reads) and raises KVFault when a
row would read a position whose page slot does not hold that row's own entry, or when a page number is not one of its pool's.
"""

from collections import deque

import numpy as np

from engine.geometry import KVGroup
from engine.plan import ResultRow, StepPlan, StepResult, decode_plan, encode_plan

_POSITIONS = 1 << 20


class KVFault(AssertionError):
    """A row would have read somebody else's K and V."""


class KVMachine:
    """Executor with the two-step depth of the real one: `submit` a plan, `result` of the oldest comes when asked for.

    `next_token(number, slot, position)` stands for the model. Planted faults: `plant(plan)` may alter each plan before it runs.
    """

    def __init__(self, groups: tuple[KVGroup, ...], pages: tuple[int, ...], slots: int, max_len: int, model) -> None:  # noqa: ANN001
        self.groups = groups
        self.pages = pages
        width = -(-max_len // groups[0].page) + 1
        self.tables = [np.zeros((slots, width), np.int64) for _ in groups]
        self.owner = [np.full((count, group.page), -1, np.int64) for group, count in zip(groups, pages, strict=True)]
        self.number = [0] * slots
        self.length = [0] * slots
        self.model = model
        self.queue: deque[StepPlan] = deque()
        self.reads = 0
        self.plant = lambda plan: plan

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan, through its bytes."""
        decoded = decode_plan(encode_plan(plan))
        assert (decoded.step, decoded.chunks, decoded.decodes) == (plan.step, plan.chunks, plan.decodes)
        self.queue.append(self.plant(decoded))

    def result(self) -> StepResult:
        """Run the oldest plan."""
        plan = self.queue.popleft()
        self._apply(plan)
        rows = [(chunk.slot, chunk.start, chunk.end) for chunk in plan.chunks]
        rows += [(slot, self.length[slot], self.length[slot] + 1) for slot in plan.decodes]
        for slot, start, end in rows:
            self._write(slot, start, end)
            self.length[slot] = end
        for slot, start, end in rows:
            self._read(slot, start, end)
        return StepResult(plan.step, [self._sample(slot) for slot in plan.result_slots])

    def _apply(self, plan: StepPlan) -> None:
        for release in plan.releases:
            self.tables[release.group][release.slot, release.first : release.first + release.count] = 0
        for admission in plan.admissions:
            self.number[admission.slot] = admission.number
            self.length[admission.slot] = 0
            for table in self.tables:
                table[admission.slot] = 0
        for append in plan.appends:
            if not 0 < append.page < self.pages[append.group]:
                raise KVFault(f"page {append.page} is not one of group {append.group}'s {self.pages[append.group]}")
            self.tables[append.group][append.slot, append.index] = append.page

    def _entries(self, slot: int, positions: np.ndarray) -> np.ndarray:
        return self.number[slot] * _POSITIONS + positions

    def _write(self, slot: int, start: int, end: int) -> None:
        positions = np.arange(start, end)
        for group, table, owner in zip(self.groups, self.tables, self.owner, strict=True):
            pages = table[slot, positions // group.page]
            if not pages.all():
                raise KVFault(f"slot {slot} writes to the null page of {group.name} in [{start}, {end})")
            owner[pages, positions % group.page] = self._entries(slot, positions)

    def _read(self, slot: int, start: int, end: int) -> None:
        for group, table, owner in zip(self.groups, self.tables, self.owner, strict=True):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            positions = np.arange(first, end)
            held = owner[table[slot, positions // group.page], positions % group.page]
            self.reads += len(positions)
            wrong = held != self._entries(slot, positions)
            if wrong.any():
                at = int(positions[wrong][0])
                raise KVFault(f"slot {slot} at [{start}, {end}) reads position {at} of {group.name}: not its own entry")

    def _sample(self, slot: int) -> ResultRow:
        number = self.number[slot]
        return ResultRow(slot, number, (self.model(number, self.length[slot]),))
