"""Page ownership: one pool of page numbers per KV group.

    free   unused
    held   by one sequence or several
    idle   only in the prefix cache, which evicts it when a sequence needs a page

Page 0 is the null page: it is never allocated, and every unused table entry names it.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from engine.geometry import KVGroup


class PagePool:
    """Page numbers 1..pages-1 of one group, allocated last-in first-out."""

    def __init__(self, group: KVGroup, pages: int) -> None:
        self.group = group
        self.total = pages - 1
        self.idle = 0
        self._free = list(range(pages - 1, 0, -1))
        self.holders = [0] * pages  # sequences that hold each page
        self._cached = [0] * pages  # how often the prefix cache keeps each page
        self.not_finite: set[int] = set()  # that may hold NaN, which masking does not contain: 0 x NaN is NaN

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages free, or idle in the prefix cache."""
        return self.free + self.idle

    @property
    def used(self) -> int:
        return self.total - self.available

    # -- sequences

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages; the caller has checked `free`."""
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self.holders[page]:
                assert self._cached[page], page
                self.idle -= 1
            self.holders[page] += 1

    def give(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page; the last leaves it idle if cached, else free."""
        for page in pages:
            assert self.holders[page] > 0, page
            self.holders[page] -= 1
            if not self.holders[page]:
                if self._cached[page]:
                    self.idle += 1
                else:
                    self._free.append(page)

    # -- the prefix cache

    def keep(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self.holders[page] or self._cached[page], page
            self._cached[page] += 1

    def drop(self, pages: Iterable[int]) -> int:
        """Returns how many became free."""
        before = len(self._free)
        for page in pages:
            assert self._cached[page] > 0, page
            self._cached[page] -= 1
            if not self._cached[page] and not self.holders[page]:
                self.idle -= 1
                self._free.append(page)
        return len(self._free) - before

    def idle_in(self, pages: Iterable[int]) -> int:
        return list(map(self.holders.__getitem__, pages)).count(0)

    # -- pages that may hold NaN

    def take_not_finite(self, pages: Iterable[int]) -> list[int]:
        """Those pages that must be zeroed before use; they then count as clean."""
        dirty = [page for page in pages if page in self.not_finite]
        self.not_finite.difference_update(dirty)
        return dirty


class PageRun:
    """A sequence's pages of one pool: table entries [first, first + len(pages))."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.first = 0
        self.pages: list[int] = []

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def between(self, first: int, end: int) -> list[int]:
        assert self.first <= first <= end <= self.end, (self.first, first, end, self.end)
        return self.pages[first - self.first : end - self.first]

    def drop_before(self, index: int) -> list[int]:
        count = index - self.first
        dropped = self.pages[:count]
        self.pages = self.pages[count:]
        self.first = index
        return dropped


@dataclass(frozen=True)
class Hit:
    """A cached prefix of `count` pages."""

    count: int
    full: "array[int]"  # pages of the full group
    tail: "array[int]"  # the last pages of the sliding group that the window needs
    branch: int  # page up to which only the full group has the prefix
    version: int  # the hit is valid while `PrefixCache.version` is this
