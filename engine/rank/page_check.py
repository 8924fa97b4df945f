"""The setting `debug_pages` on a rank: compares plans with those before them, and the device's tables with the plans.

    plan --fold--> PageMap (host) --what changed--> expected tables (device)
                                                        |
    plan --apply--> tables (device) --------------- check_table ---> violations --with the step's result--> PageViolation
                          |                             |                 |
                          `--FlashInfer's own copies-- check_copies ------'

A plan that contradicts those before it raises before its step starts; a wrong table on the device raises with the result of the
step that would have read it. In both cases a dump is written first.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import PageViolation
from engine.geometry import KVGroup
from engine.plan import HEADER_INTS, PlanView, read_header, read_plan
from engine.rank.batch import ForwardBatch
from engine.rank.page_dump import PageDump, write_dump
from engine.rank.page_map import PageMap, rolled_back
from engine.rank.slots import SlotState
from engine.rank.upload import uploaded
from kernels.table_check import (
    COPIED_ENTRY,
    RECORD,
    RECORDS,
    ROW_ENTRY,
    TABLE_ENTRY,
    check_copies,
    check_table,
    new_violations,
)

SAMPLED = 16  # with `sample`, a step checks every 16th slot
_SHOWN = 4
_ORDER = (ROW_ENTRY, COPIED_ENTRY, TABLE_ENTRY)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A record of `kernels.table_check`, by name."""

    kind: int
    group: int
    slot: int
    entry: int
    found: int
    wanted: int
    row: int
    position: int

    def order(self) -> tuple[int, ...]:
        """In a message: first what names a row."""
        return _ORDER.index(self.kind), self.group, self.slot, self.entry


class PageCheck:
    """The check of one rank. `violations`: device records, which a step copies out with its result."""

    def __init__(self, config: EngineConfig, rank: int, slots: SlotState) -> None:
        self._config, self._rank, self._slots = config, rank, slots
        self._every = 1 if config.debug_pages == "every" else SAMPLED
        caches = slots.cache.groups
        self.pages = tuple(cache.pool.shape[1] for cache in caches)
        self.map = PageMap([cache.group for cache in caches], self.pages, slots.padding + 1, [c.table.shape[1] for c in caches])
        self._expected = torch.zeros(len(self.map.flat), dtype=torch.int32, device=slots.device)
        sizes = [cache.table.numel() for cache in caches]
        self._tables = [part.view_as(c.table) for part, c in zip(self._expected.split(sizes), caches, strict=True)]
        self.violations = new_violations(slots.device)
        self._plan = torch.zeros(HEADER_INTS, dtype=torch.int32, device=slots.device)  # of the step that `check` saw last
        self.dumps = True  # False: where a dump is replayed
        self._judges = True  # False: inside `unjudged`
        self._plans: deque[bytes] = deque(maxlen=self.map.undo.maxlen)  # the last ones, and masks of those that had any, by step
        self._masks: deque[tuple[int, bytes]] = deque(maxlen=self.map.undo.maxlen)

    def fold(self, plan: PlanView, data: bytes) -> None:
        """Call before the step of `plan`, whose bytes are `data`. PageViolation: the plan is wrong."""
        if not self._judges:
            self._follow(plan)
            return
        self._plans.append(data)
        try:
            index, values = self.map.fold(plan)
        except PageViolation as error:
            raise self._dumped(plan.step, str(error), started=False) from None
        if len(index):
            self.expect(index, values)

    @contextmanager
    def unjudged(self) -> Iterator[None]:
        """Inside the `with`, plans may contradict each other; tables should hold what they append, and zeros afterwards."""
        self._judges, dumps, self.dumps = False, self.dumps, False
        try:
            yield
        finally:
            self._judges, self.dumps = True, dumps
            self._expected.zero_()

    def _follow(self, plan: PlanView) -> None:
        """Expect the entries of `plan`, unchecked: admissions clear rows, appends set entries."""
        slots = [admission.slot for admission in plan.admissions]
        for group, table in enumerate(self._tables):
            table[slots] = 0
            appends = torch.from_numpy(plan.appends[plan.appends[:, 0] == group].astype(np.int64))
            _, rows, entries, pages = uploaded(appends, table.device).unbind(1)
            table[rows, entries] = pages.int()

    def keep_masks(self, step: int, masks: bytes) -> None:
        """The masks of plan `step`, for a dump."""
        self._masks.append((step, masks))

    def expect(self, index: np.ndarray, values: np.ndarray) -> None:
        """The device's tables should hold `values` at the flat indices `index`."""
        packed = uploaded(torch.from_numpy(np.stack([index, values.astype(np.int64)])), self._expected.device)
        self._expected[packed[0]] = packed[1].int()

    def check(self, plan: Tensor, batch: ForwardBatch) -> None:
        """Check on the device, between a step's inputs and its model. Capturable."""
        self._plan = plan
        rows = slice(batch.decode_start, batch.rows)
        for cache, expected, gathered in zip(self._slots.cache, self._tables, batch.pages, strict=True):
            check_table(
                plan, cache.group.index, cache.table, expected, cache.pool.shape[1], batch.slots[rows], batch.positions[rows],
                gathered, cache.group.page, cache.group.window, self._every, self.violations,
            )  # fmt: skip

    def check_copies(self, group: KVGroup, copies: Tensor, slots: Tensor, positions: Tensor, window: int | None) -> None:
        """As `CopyCheck`, of the step that `check` saw last. Capturable."""
        expected, pages = self._tables[group.index], self.pages[group.index]
        places = (slots, positions, copies, group.page, window, self._every, self.violations)
        check_copies(self._plan, group.index, expected, pages, *places)

    def verify(self, step: int, violations: np.ndarray) -> None:
        """What step `step` copied out. PageViolation: something was found; the message says what, and where the dump is."""
        count = int(violations[0])
        if count:
            records = violations[RECORD:].reshape(RECORDS, RECORD)[:count].tolist()
            found = sorted((Found(*record) for record in records), key=Found.order)
            shown = "; ".join(self._sentence(each) for each in found[:_SHOWN])
            more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
            raise self._dumped(step, f"step {step}: {shown}{more}", found, started=True)

    def _sentence(self, found: Found) -> str:
        """A violation in words: row, group, entry, and the page's owner."""
        name = self.map.groups[found.group].name
        who = "" if found.kind == TABLE_ENTRY else f"row {found.row} at position {found.position}, "
        what = {ROW_ENTRY: "reads", TABLE_ENTRY: "names", COPIED_ENTRY: "attention's copy names"}[found.kind]
        if found.kind == ROW_ENTRY and found.found == found.wanted == 0:
            return f"{who}slot {found.slot}, group {name}, entry {found.entry}: needs a page and has none"
        wanted = f"page {found.wanted}" if found.wanted else "no page"
        return (
            f"{who}slot {found.slot}, group {name}, entry {found.entry}: {what} page {found.found}, expected {wanted}; "
            f"{self._owner(found)}"
        )

    def _owner(self, found: Found) -> str:
        """The owner of the page in the wrong place."""
        page, group = found.found, found.group
        if not 0 <= page < self.pages[group]:
            return f"its pool has {self.pages[group]} pages"
        if not page:
            return "page 0 is the null page"
        for slot, entry in self.map.holders(group, page):
            return f"page {page} is slot {slot}'s entry {entry}"
        for other in self.map.groups:
            if other.index != group and (found.slot, found.entry) in self.map.holders(other.index, page):
                return f"page {page} is that entry's in group {other.name}, and nobody's in this one"
        return f"nobody holds page {page}"

    # -- the dump

    def restore(self, dump: PageDump) -> None:
        """Tables, lengths and tokens as in a dump of this rank's shape; its plan is the next to run."""
        self.map.restore(dump.expected, dump.expected_lengths, dump.lost_pages)
        self.expect(np.arange(len(dump.expected)), dump.expected)
        sizes = [cache.table.numel() for cache in self._slots.cache]
        for cache, table in zip(self._slots.cache, torch.from_numpy(dump.tables).split(sizes), strict=True):
            cache.table.copy_(table.view_as(cache.table))
        self._slots.lengths.copy_(torch.from_numpy(dump.lengths))
        self._slots.tokens[:, : dump.tokens.shape[1]] = torch.from_numpy(dump.tokens).to(self._slots.device)

    def _dumped(self, step: int, message: str, found: Sequence[Found] = (), *, started: bool) -> PageViolation:
        """The error to raise, with the path of the dump if one was written."""
        if not self.dumps:
            return PageViolation(message)
        try:
            path = write_dump(self.dump(step, message, found, started=started))
        except (OSError, RuntimeError, LookupError) as error:  # full disk, lost device, old plan: the violation must be raised
            logger.warning("no page dump: %s", error)
            return PageViolation(message)
        return PageViolation(f"{message} (dump: {path})")

    def dump(self, step: int, message: str, found: Sequence[Found], *, started: bool) -> PageDump:
        """Everything as it was before plan `step`, which has `started` or not; later steps on their way are taken back."""
        back = [undo for undo in self.map.undo if undo.step >= step]
        plans = {at: data for data in self._plans if (at := read_header(data).step) >= step}
        lengths = self._slots.lengths.cpu().numpy().copy()
        for data in plans.values() if started else ():
            np.subtract.at(lengths, read_plan(data).decodes, 1)
        longest = int(min(max(lengths.max(), 0) + 2, self._slots.tokens.shape[1]))
        lost_pages = {slot: found for slot, found in self.map.lost_pages.items() if found[0] < step}
        return PageDump(
            config=self._config, rank=self._rank, step=step, pages=self.pages, message=message, plan=plans[step],
            masks=dict(self._masks).get(step, b""), lost_pages=lost_pages,
            tables=rolled_back(self._found_tables(found), back), expected=rolled_back(self.map.flat, back), lengths=lengths,
            expected_lengths=back[0].lengths, tokens=self._slots.tokens[:, :longest].cpu().numpy(),
        )  # fmt: skip

    def _found_tables(self, found: Sequence[Found]) -> np.ndarray:
        """The device's tables, flat, with what the check has replaced."""
        tables = [cache.table.cpu().numpy().copy() for cache in self._slots.cache]
        for each in found:
            if each.kind == TABLE_ENTRY:
                tables[each.group][each.slot, each.entry] = each.found
        return np.concatenate([table.ravel() for table in tables])
