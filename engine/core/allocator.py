"""Allocates pages, attaches cached prefixes, and writes both into plans.

Pages freed in step n are reused in a later plan. Ranks run plans in order on one stream, so late
writes of step n precede the new owner's.
"""

import bisect
from collections.abc import Iterable
from itertools import repeat

import numpy as np

from engine.core.pages import Hit, PagePool, PageRun
from engine.core.prefix import PrefixCache, equal_keys, extend_keys, root_key
from engine.core.sequence import Sequence
from engine.geometry import KVGroup
from engine.kv_events import CacheEvents
from engine.plan import StepPlan

_UNSALTED = root_key("")


class Allocator:
    """`pages`: of each group, null page included. `caches`: keep prefixes."""

    def __init__(
        self, groups: tuple[KVGroup, ...], pages: tuple[int, ...], *, caches: bool, events: CacheEvents | None = None
    ) -> None:
        self.pools = [PagePool(group, count) for group, count in zip(groups, pages, strict=True)]
        self.page = groups[0].page
        self._full = self.pools[-1]
        self._caches = caches
        self._events = events
        self.cache = PrefixCache(self._full, self.pools[0], events)

    def holds_span(self, length: int) -> bool:
        """Whether the empty pools of groups with bidirectional attention hold any chunk of `length`
        tokens."""
        return all(pool.group.span_pages(length) <= pool.total for pool in self.pools if pool.group.bidirectional)

    def fitting(self, sequence: Sequence, count: int, headroom: int = 0) -> int:
        """How many of the next `count` positions fit, leaving `headroom` pages."""
        pages = max(0, min(pool.available for pool in self.pools) - headroom)
        return min(count, sequence.pages.held + pages * self.page - sequence.planned)

    def hold(self, sequence: Sequence, end: int, plan: StepPlan) -> None:
        count = max(0, -(-(end - sequence.pages.held) // self.page))
        sequence.pages.held += count * self.page
        for run in sequence.pages.runs:
            pool = run.pool
            self.cache.make_free(pool, count)
            pages = pool.take(count)
            run.pages += pages
            self._append(sequence, run, pages, plan)
            plan.zeros.extend((pool.group.index, page) for page in pool.take_not_finite(pages))

    def _append(self, sequence: Sequence, run: PageRun, pages: list[int], plan: StepPlan) -> None:
        group = run.pool.group.index
        entries = range(run.end - len(pages), run.end)
        plan.appends.extend(zip(repeat(group), repeat(sequence.slot), entries, pages))

    def append_again(self, sequence: Sequence, plan: StepPlan) -> None:
        for run in sequence.pages.runs:
            self._append(sequence, run, run.pages, plan)

    def release(self, sequence: Sequence, plan: StepPlan) -> None:
        """Free the pages that no position from the start of `committed`'s page on sees."""
        for run in sequence.pages.runs:
            pool = run.pool
            first = run.first
            dropped = run.drop_before(first_page(pool.group, sequence.committed))
            if dropped:
                pool.give(dropped)
                plan.releases.append((pool.group.index, sequence.slot, first, len(dropped)))
        sequence.pages.release_at = (sequence.committed // self.page + 1) * self.page

    def give_all(self, sequence: Sequence) -> None:
        """Free all its pages. Dropped rows may have written non-finite values beyond `committed`."""
        if sequence.pages.not_finite:
            self.cache.discard(self._keys(sequence, sequence.committed // self.page))
        for run in sequence.pages.runs:
            pool = run.pool
            certain = self._finite_end(sequence, run)
            pool.not_finite.update(page for page in run.pages[max(0, certain - run.first) :] if pool.holders[page] == 1)
            pool.give(run.pages)

    def _finite_end(self, sequence: Sequence, run: PageRun) -> int:
        if sequence.pages.not_finite:
            return 0
        written = max(sequence.planned, sequence.pages.dropped)
        if written > sequence.committed:
            return sequence.committed // self.page
        return run.end

    # -- prefixes

    def find(self, sequence: Sequence) -> Hit:
        """The cached prefix for a waiting sequence, looked up again if the cache has changed.

        The first call, at queueing, hashes the prompt: at admission that would delay a step. No hit
        ends inside a span, since equal keys mean equal spans.
        """
        if not self._caches:
            return self.cache.find([])
        if sequence.pages.hit is None or sequence.pages.hit.version != self.cache.version:
            self._keys(sequence, (len(sequence.tokens) - 1) // self.page)
            pages = self._uncut_pages(sequence, sequence.reusable // self.page)
            sequence.pages.hit = self.cache.find(self._keys(sequence, pages))
        return sequence.pages.hit

    def _uncut_pages(self, sequence: Sequence, pages: int) -> int:
        while (end := sequence.media.last_end(pages * self.page)) < pages * self.page:
            pages = end // self.page
        return pages

    def attach(self, sequence: Sequence, hit: Hit, plan: StepPlan) -> None:
        self.cache.use(sequence.pages.keys, hit)
        for run in sequence.pages.runs:
            run.pages = list(hit.full if run.pool is self._full else hit.tail)
            run.first = hit.count - len(run.pages)
            run.pool.share(run.pages)
            self._append(sequence, run, run.pages, plan)
        found = hit.count * self.page
        sequence.committed = found
        sequence.planned = found
        sequence.pages.held = found
        if self._caches:
            points = {hit.branch, (sequence.prompt - 1) // self.page, *turn_ends(sequence, self.page)}
            points = {self._uncut_pages(sequence, point) for point in points}
            sequence.pages.cache_points = sorted(point for point in points if point > hit.count)

    def being_computed(self, sequence: Sequence, hit: Hit, prefills: Iterable[Sequence], gain: int) -> bool:
        """Whether a running prefill will compute at least `gain` more tokens of this prompt than
        the hit has. It will leave a tail there: a burst with one system prompt costs one
        prefill."""
        for other in prefills:
            equal = equal_keys(sequence.pages.keys, other.pages.keys)
            shared = self._uncut_pages(sequence, min(equal, sequence.reusable // self.page))
            if shared * self.page > other.committed and (shared - hit.count) * self.page >= gain:
                if shared not in other.pages.cache_points:
                    bisect.insort(other.pages.cache_points, shared)
                return True
        return False

    def cache_passed_points(self, sequence: Sequence) -> None:
        """The last point is the prompt's end."""
        while sequence.pages.cache_points and sequence.committed >= sequence.pages.cache_points[0] * self.page:
            point = sequence.pages.cache_points.pop(0)
            self._insert(sequence, point, supersedes=not sequence.pages.cache_points)

    def cache_computed(self, sequence: Sequence) -> None:
        pages = sequence.committed // self.page
        if self._caches and self._uncut_pages(sequence, pages) == pages:
            self._insert(sequence, pages)

    def _insert(self, sequence: Sequence, count: int, *, supersedes: bool = False) -> None:
        """The tail is still held, because pages are freed from `committed`'s page on."""
        *sliding, full = sequence.pages.runs
        tail = [page for run in sliding for page in run.between(first_page(run.pool.group, count * self.page), count)]
        keys = self._keys(sequence, count)
        known, new_tail = self.cache.insert(keys, full.between(0, count), tail, supersedes=supersedes)
        if self._events is not None:
            described = sequence.tokens, sequence.media.items, sequence.pages.root != _UNSALTED
            self._events.stored(self._full.group, keys, known, *described)
            if new_tail:
                self._events.stored(self.pools[0].group, keys, count - len(tail), *described)

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        if len(sequence.pages.keys) < count:
            extend_keys(sequence.pages.keys, sequence.pages.root, sequence.tokens, self.page, count, sequence.media.items)
        return sequence.pages.keys[:count]


def first_page(group: KVGroup, committed: int) -> int:
    """The first table index held. The window starts at `committed`'s page, so that whole pages can
    be shared."""
    return group.pages_for(committed - committed % group.page, committed + 1).start


def turn_ends(sequence: Sequence, page: int) -> set[int]:
    """Page counts at the ends of the prompt's first turn (the system prompt) and of its last but
    one."""
    tokens = np.frombuffer(sequence.tokens, np.int32, sequence.prompt)
    ends = np.flatnonzero(np.isin(tokens, tuple(sequence.params.stop_ids))) + 1
    if len(ends) > 1:
        return {int(ends[0]) // page, int(ends[-2]) // page}
    return set()
