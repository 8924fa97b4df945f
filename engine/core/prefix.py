"""The prefix cache: pages of both KV groups, found again by what stands before them.

Segments are runs of pages in a tree, found by keys (core/segment.py):

    root -- S ----+-- A ---- A'        full pages    S S S S S S A A A A' A'      kept for the whole path
      system      |                    sliding         . . . s s . . a a  .  a'   a tail at the end of S, A, A', B:
      prompt      +-- B                                                           the window before it, and nothing else

A prefix can be taken up where a segment ends with its tail: there the full layers find all that is before, and the sliding layers
the window that the next position reads. Tails are left at the ends of prompts, of answers, and of the turns at which prompts are
likely to part (`turn_ends` in core/allocator.py): a second conversation finds the system prompt of the first. Whoever finds more
full pages than tails allow has found another branch point: it computes them, and leaves a tail there. Tails are dear (a window of
all sliding layers), so those that a conversation has grown past go first.

Both groups are evicted together: a segment that leads to no tail is worth nothing, and goes. The order is least recently used,
leaves first: using a segment also uses the path to it, so the first in order is never above another that is cached. Of the ends of
conversations every other is spared until its next turn, at random: where more of them take turns than there is room for, strict
order would evict each just before it is asked for.
"""

import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.core.pages import PagePool
from engine.core.segment import Segment, common

SPARED = 0.5


@dataclass(frozen=True)
class Hit:
    """Of a prefix: pages that need not be computed, by group, and up to which page full attention knows it (`branch`).

    idle_full   how many of the full pages nobody holds
    version     `PrefixCache.version` up to whose next change all of this is so
    """

    count: int
    full: "array[int]"
    tail: "array[int]"
    branch: int
    idle_full: int
    version: int


class PrefixCache:
    """Segments of both pools; `sliding` None: a model without sliding layers. `share`: of each pool, what may lie idle.

    evicted_pages   given up since boot
    """

    def __init__(self, full: PagePool, sliding: PagePool | None, share: float = 1.0) -> None:
        self.evicted_pages = 0
        self._full = full
        self._sliding = sliding
        self._share = share
        self._changes = 0  # of what can be found
        self._root = Segment(None, 0, [], array("i"), array("i"))
        self._order: OrderedDict[Segment, None] = OrderedDict()
        self._tails: OrderedDict[Segment, None] = OrderedDict()
        self._random = random.Random(0)  # noqa: S311 - no secret; the same requests leave the same cache

    def __iter__(self) -> Iterator[Segment]:
        """Every segment, the next to be evicted first."""
        return iter(self._order)

    @property
    def version(self) -> int:
        """Grows with each change of what can be found, and of which full pages are idle."""
        return self._changes + self._full.idle_changes

    # -- find

    def find(self, keys: list[bytes]) -> Hit:
        """The longest prefix of `keys` whose pages are here; nothing is taken yet."""
        last, known = self._walk(keys)
        while last.tail is None:
            assert last.parent is not None
            last = last.parent
        full = array("i")
        for segment in reversed(list(last.path())):
            full.extend(segment.pages)
        return Hit(last.end, full, last.tail, known, self._full.idle_in(full), self.version)

    def _walk(self, keys: list[bytes]) -> tuple[Segment, int]:
        """(the last segment that is wholly a prefix of `keys`, pages that full attention knows)."""
        segment = self._root
        while segment.end < len(keys):
            child = segment.children.get(keys[segment.end])
            if child is None:
                break
            equal = common(child, keys)
            if equal < len(child.keys):
                return segment, child.start + equal
            segment = child
        return segment, segment.end

    def use(self, keys: list[bytes], hit: Hit) -> None:
        """A sequence takes a hit up: its path is the most recently used."""
        segment, _ = self._walk(keys[: hit.count])
        self._touch(segment)

    def _touch(self, segment: Segment) -> None:
        for each in segment.path():
            self._order.move_to_end(each)
        if segment in self._tails:
            self._tails.move_to_end(segment)

    # -- insert

    def insert(self, keys: list[bytes], full: list[int], tail: list[int], *, supersedes: bool = False) -> None:
        """Keep the prefix of all `keys`: a full page each, and the sliding pages before its end. What is here already stays.

        `supersedes`: a conversation has grown to here; the tails on its way that no other branch uses go first from now on.
        """
        segment = self._grow(keys, full)
        if segment is self._root:
            return
        if segment.tail is None:
            segment.tail = array("i", tail)
            self._tails[segment] = None
            self._changes += 1
            if self._sliding is not None:
                self._sliding.keep(tail)
        self._touch(segment)
        if supersedes:
            self._supersede(segment)
        self.trim()

    def _grow(self, keys: list[bytes], full: list[int]) -> Segment:
        """The segment that ends where `keys` do, made of what is missing."""
        segment = self._root
        while segment.end < len(keys):
            child = segment.children.get(keys[segment.end])
            if child is None:
                return self._add(segment, keys[segment.end :], full[segment.end :])
            equal = common(child, keys)
            segment = child if equal == len(child.keys) else self._split(child, equal)
        return segment

    def _add(self, parent: Segment, keys: list[bytes], pages: list[int]) -> Segment:
        self._changes += 1
        self._full.keep(pages)
        segment = Segment(parent, parent.end, keys, array("i", pages))
        parent.children[keys[0]] = segment
        self._order[segment] = None
        return segment

    def _split(self, segment: Segment, at: int) -> Segment:
        """Cut off its first `at` pages as a segment of their own, above it."""
        parent = segment.parent
        assert parent is not None
        upper = Segment(parent, segment.start, segment.keys[:at], segment.pages[:at])
        parent.children[upper.keys[0]] = upper
        segment.parent, segment.start = upper, segment.start + at
        segment.keys, segment.pages = segment.keys[at:], segment.pages[at:]
        upper.children[segment.keys[0]] = segment
        self._order[upper] = None
        return upper

    def _supersede(self, segment: Segment) -> None:
        for above in segment.path():
            if above is not segment and len(above.children) == 1 and above in self._tails:
                self._tails.move_to_end(above, last=False)

    # -- evict

    def make_free(self, pool: PagePool, count: int) -> None:
        """Evict until `count` pages of `pool` are free; the caller has checked `available`."""
        while pool.free < count:
            self._evict(pool)

    def trim(self) -> None:
        """Evict what exceeds the share of each pool that may lie idle."""
        for pool in (self._full, self._sliding):
            while pool is not None and pool.idle > self._share * pool.total:
                self._evict(pool)

    def discard(self, keys: list[bytes]) -> None:
        """Forget the longest prefix of `keys` that is here, and all that follows it: what was computed behind it was not finite.

        What is above it gave finite values to others. If it is at fault after all, the next one to say so takes it away too.
        """
        segment, _ = self._walk(keys)
        if segment is not self._root:
            self._remove_subtree(segment)

    def _evict(self, pool: PagePool) -> None:
        """Give up the least recently used that has an idle page in `pool`.

        Of full pages, where no leaf is idle: what is above one, whose holders have computed pages of their own below it.
        """
        if pool is self._full:
            self._remove_subtree(self._oldest(self._order, lambda each: pool.has_idle(each.pages), self._touch))
            return
        segment = self._oldest(self._tails, lambda each: pool.has_idle(each.tail or ()), self._tails.move_to_end)
        self._drop_tail(segment)
        self._prune(segment)

    def _oldest(
        self, order: "OrderedDict[Segment, None]", idle: Callable[[Segment], bool], renew: Callable[[Segment], None]
    ) -> Segment:
        """The least recently used that has an idle page, but for those that are spared; what is in use is not the oldest."""
        for _ in range(2 * len(order)):
            segment = next(iter(order))
            if idle(segment) and (segment.children or self._random.random() >= SPARED):
                return segment
            renew(segment)
        return next(segment for segment in order if idle(segment))

    def _prune(self, segment: Segment | None) -> None:
        """Remove a segment that leads to no tail, and those above it that lead to none then."""
        while segment is not None and segment.parent is not None and not segment.children and segment.tail is None:
            self._remove(segment)
            segment = segment.parent

    def _remove_subtree(self, segment: Segment) -> None:
        stack, found = [segment], []
        while stack:
            each = stack.pop()
            found.append(each)
            stack.extend(each.children.values())
        for each in reversed(found):
            self._remove(each)
        self._prune(segment.parent)

    def _remove(self, segment: Segment) -> None:
        assert segment.parent is not None
        assert not segment.children
        self._changes += 1
        if segment.tail is not None:
            self._drop_tail(segment)
        self.evicted_pages += self._full.drop(segment.pages)
        del segment.parent.children[segment.keys[0]]
        del self._order[segment]

    def _drop_tail(self, segment: Segment) -> None:
        assert segment.tail is not None
        self._changes += 1
        if self._sliding is not None:
            self.evicted_pages += self._sliding.drop(segment.tail)
        segment.tail = None
        del self._tails[segment]
