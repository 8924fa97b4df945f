"""Who holds which page: one pool of page numbers per KV group, with reference counts.

Page 0 is the null page: it is never handed out and every unused table entry names it.
"""

from engine.geometry import KVGroup


class PagePool:
    """The page numbers 1..pages-1 of one group. Free pages are handed out last-in first-out; the order is deterministic."""

    def __init__(self, group: KVGroup, pages: int) -> None:
        self.group = group
        self.total = pages - 1
        self._free = list(range(pages - 1, 0, -1))
        self._references = [0] * pages

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages somebody holds."""
        return self.total - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, each with one reference; the caller has checked `free`."""
        assert count <= len(self._free), (count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One more holder of a held page."""
        assert self._references[page] > 0, page
        self._references[page] += 1

    def give(self, pages: list[int]) -> None:
        """One holder fewer of each page; a page without holders is free."""
        for page in pages:
            assert self._references[page] > 0, page
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)


class PageRun:
    """The pages one sequence holds in one group: table entries [first, first + len(pages)), in order."""

    def __init__(self) -> None:
        self.first = 0
        self.pages: list[int] = []

    @property
    def end(self) -> int:
        """Table index after the last held one."""
        return self.first + len(self.pages)

    def missing(self, end: int) -> int:
        """Pages to append so that entries up to `end` are held."""
        return max(0, end - self.end)

    def drop_before(self, index: int) -> list[int]:
        """Forget and return the pages of entries before `index`."""
        count = max(0, min(index, self.end) - self.first)
        dropped, self.pages = self.pages[:count], self.pages[count:]
        self.first += count
        return dropped
