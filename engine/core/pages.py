"""Who holds which page: one pool of page numbers per KV group.

    free   nobody has it
    held   by one sequence or several
    idle   by none, but the prefix cache keeps it until a sequence needs a page

Page 0 is the null page: it is never handed out and every unused table entry names it.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from engine.geometry import KVGroup


class PagePool:
    """The page numbers 1..pages-1 of one group. Free pages are handed out last-in first-out; the order is deterministic."""

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
        """Pages that nobody has."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that a sequence could have: free, or given up by the prefix cache."""
        return self.free + self.idle

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self.total - self.available

    # -- sequences

    def take(self, count: int) -> list[int]:
        """`count` free pages, each with one holder; the caller has checked `free`."""
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Each of these pages, held or kept, has one more holder."""
        for page in pages:
            if not self.holders[page]:
                assert self._cached[page], page
                self.idle -= 1
            self.holders[page] += 1

    def give(self, pages: Iterable[int]) -> None:
        """Each page has one holder fewer; without holders it is idle if the cache keeps it, else free."""
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
        """The cache keeps these pages, which are held, or kept already."""
        for page in pages:
            assert self.holders[page] or self._cached[page], page
            self._cached[page] += 1

    def drop(self, pages: Iterable[int]) -> int:
        """The cache keeps each page once less; returns how many became free."""
        before = len(self._free)
        for page in pages:
            assert self._cached[page] > 0, page
            self._cached[page] -= 1
            if not self._cached[page] and not self.holders[page]:
                self.idle -= 1
                self._free.append(page)
        return len(self._free) - before

    def idle_in(self, pages: Iterable[int]) -> int:
        """How many of these kept pages no sequence holds."""
        return list(map(self.holders.__getitem__, pages)).count(0)

    # -- pages that may hold NaN

    def take_not_finite(self, pages: Iterable[int]) -> list[int]:
        """The pages among these that must be zeroed before use; from now on they count as clean."""
        dirty = [page for page in pages if page in self.not_finite]
        self.not_finite.difference_update(dirty)
        return dirty


class PageRun:
    """The pages of a pool that one sequence holds: table entries [first, first + len(pages)), in order."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.first = 0
        self.pages: list[int] = []

    @property
    def end(self) -> int:
        """Table index after the last held one."""
        return self.first + len(self.pages)

    def between(self, first: int, end: int) -> list[int]:
        """The pages of entries [first, end), which are held."""
        assert self.first <= first <= end <= self.end, (self.first, first, end, self.end)
        return self.pages[first - self.first : end - self.first]

    def drop_before(self, index: int) -> list[int]:
        """Forget and return the pages of entries before `index`, which is one of the run, or its end."""
        count = index - self.first
        dropped, self.pages = self.pages[:count], self.pages[count:]
        self.first = index
        return dropped


@dataclass(frozen=True)
class Hit:
    """What of a prefix the cache has: `count` pages need not be computed.

    full, tail  their pages of the full group; of the sliding group, the last ones that the window needs
    branch      up to which page the full group alone knows the prefix
    version     `PrefixCache.version` then: the hit is valid until it changes
    """

    count: int
    full: "array[int]"
    tail: "array[int]"
    branch: int
    version: int
