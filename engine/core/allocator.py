"""Pages of sequences: how many fit, who holds which, and what plans are told about it.

One pool per KV group; a sequence holds a run of pages in each. Pages given back while step n runs are first named in a later plan;
ranks run plans in order on one stream, so whatever step n still writes there comes before the new owner's writes, and no lock is
needed.
"""

from engine.core.pages import PagePool, PageRun
from engine.core.sequence import Sequence
from engine.geometry import KVGroup
from engine.plan import PageAppend, PageRelease


class Allocator:
    """`pages` counts each group's pages with its null page; a decode row computes up to `width` positions (1 + drafts)."""

    def __init__(self, groups: tuple[KVGroup, ...], pages: tuple[int, ...], width: int = 1) -> None:
        self.pools = [PagePool(group, count) for group, count in zip(groups, pages, strict=True)]
        self.width = width

    def longest(self) -> int:
        """Tokens of the longest sequence that fits the empty pools; its last token needs no page."""
        whole = min(pool.total * pool.group.page for pool in self.pools if pool.group.window is None)
        return whole + 1 - (self.width - 1)

    def worst_pages(self, index: int, tokens: int) -> int:
        """Pages of pool `index` that a sequence of `tokens` tokens needs at once when it runs a row at a time."""
        group, drafts = self.pools[index].group, self.width - 1
        whole = -(-(tokens + drafts) // group.page)
        return whole if group.window is None else min(whole, group.worst_pages(tokens) + -(-drafts // group.page))

    def fitting(self, sequence: Sequence, wanted: int, headroom: int = 0) -> int:
        """How many of the next `wanted` positions the free pages allow; 0 when not even one fits."""
        room = wanted
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            held = (run.end + max(0, pool.free - headroom)) * pool.group.page
            room = min(room, held - sequence.high)
        return max(0, room)

    def hold(self, sequence: Sequence, end: int) -> list[PageAppend]:
        """Take the pages for positions up to `end`."""
        appends: list[PageAppend] = []
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            at, group = run.end, pool.group.index
            pages = pool.take(run.missing(-(-end // pool.group.page)))
            run.pages += pages
            appends.extend(PageAppend(group, sequence.slot, at + i, page) for i, page in enumerate(pages))
        self._watch(sequence)
        return appends

    def release(self, sequence: Sequence) -> list[PageRelease]:
        """Give back the pages that no position from the edge of `low`'s page on can see."""
        releases: list[PageRelease] = []
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            at = run.first
            dropped = run.drop_before(first_page(pool.group, sequence.low))
            if dropped:
                pool.give(dropped)
                releases.append(PageRelease(pool.group.index, sequence.slot, at, len(dropped)))
        self._watch(sequence)
        return releases

    def _watch(self, sequence: Sequence) -> None:
        """Note up to where nothing is to be taken, nor given back."""
        sequence.held = min(run.end * pool.group.page for pool, run in zip(self.pools, sequence.runs, strict=True))
        sequence.release_at = min(map(_release_at, self.pools, sequence.runs))

    def give_all(self, sequence: Sequence) -> None:
        """Give back every page of a sequence that leaves its slot."""
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            pool.give(run.pages)


def first_page(group: KVGroup, low: int) -> int:
    """The first table index that a sequence with `low` computed positions holds.

    It is counted from the edge of low's page: whole pages below `low` with the window before that edge can be shared, and
    the window's worst case is the same, because the page of `low` is held anyway.
    """
    return group.pages_for(low - low % group.page, low + 1).start


def _release_at(pool: PagePool, run: PageRun) -> int:
    """The least `low` at which the run's first page is no longer held."""
    group = pool.group
    if group.window is None:
        return 1 << 62
    seen = (run.first + 1) * group.page + group.window - 1
    return -(-seen // group.page) * group.page
