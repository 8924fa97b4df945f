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
    """`pages` counts each group's pages with its null page."""

    def __init__(self, groups: tuple[KVGroup, ...], pages: tuple[int, ...]) -> None:
        self.pools = [PagePool(group, count) for group, count in zip(groups, pages, strict=True)]

    def longest(self) -> int:
        """Tokens of the longest sequence that fits the empty pools; its last token needs no page."""
        return min(pool.total * pool.group.page for pool in self.pools if pool.group.window is None) + 1

    def fitting(self, sequence: Sequence, wanted: int, headroom: int = 0) -> int:
        """The largest chunk up to `wanted` that the free pages allow; 0 when not even one token fits."""
        start = sequence.scheduled
        room = wanted
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            held = (run.end + max(0, pool.free - headroom)) * pool.group.page
            room = min(room, held - start)
        return max(0, room)

    def hold(self, sequence: Sequence, end: int) -> list[PageAppend]:
        """Take the pages for positions up to `end`."""
        appends: list[PageAppend] = []
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            if not run.pages:
                run.first = pool.group.pages_for(sequence.scheduled, end).start
            at = run.end
            pages = pool.take(run.missing(-(-end // pool.group.page)))
            run.pages += pages
            group = pool.group.index
            appends.extend(PageAppend(group, sequence.slot, at + i, page) for i, page in enumerate(pages))
        return appends

    def hold_next(self, sequence: Sequence) -> list[PageAppend]:
        """Take the pages for the next position, and note up to where nothing is to be taken or given back."""
        appends = self.hold(sequence, sequence.scheduled + 1)
        sequence.quiet = min(map(_quiet_before, self.pools, sequence.runs))
        return appends

    def release_dead(self, sequence: Sequence) -> list[PageRelease]:
        """Give back the pages before the window of the next position to run."""
        if sequence.exhausted:
            return []
        releases: list[PageRelease] = []
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            first = pool.group.pages_for(sequence.scheduled, sequence.scheduled + 1).start
            at = run.first
            dropped = run.drop_before(first)
            if dropped:
                pool.give(dropped)
                releases.append(PageRelease(pool.group.index, sequence.slot, at, len(dropped)))
        return releases

    def give_all(self, sequence: Sequence) -> None:
        """Give back every page of a sequence that leaves its slot."""
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            pool.give(run.pages)


def _quiet_before(pool: PagePool, run: PageRun) -> int:
    """The first position that needs another page of this group, or no longer needs the first one held."""
    group = pool.group
    full = run.end * group.page
    return full if group.window is None else min(full, (run.first + 1) * group.page + group.window - 1)
