"""The prefix cache: pages of both KV groups, found by the tokens up to their ends.

    root -- S ----+-- A ---- A'        full pages    S S S S S S A A A A' A'      kept for the whole path
      system      |                    sliding         . . . s s . . a a  .  a'   a tail at the end of S, A, A', B:
      prompt      +-- B                                                           only the window before it

A page's key is sha256(key of the page before, its token ids, its media items), so equal keys mean
equal prefixes. A sequence can start where a segment ends with a tail. engine/README.md tells where
tails are left, engine/core/README.md what is evicted.
"""

import random
import struct
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import cast

import msgspec

from engine.adapters import NO_ADAPTER
from engine.core.pages import Hit, PagePool
from engine.kv_events import CacheEvents
from engine.protocol import MediaItem

SPARED = 0.5


def root_key(salt: str, adapter: int = NO_ADAPTER) -> bytes:
    """The key before the first page; requests share pages only with equal salt and adapter."""
    return sha256(b"quartet prefix 3\0" + struct.pack("<i", adapter) + salt.encode()).digest()


def extend_keys(
    keys: list[bytes], root: bytes, tokens: "array[int]", page: int, count: int, media: Sequence[MediaItem] = ()
) -> None:
    key = keys[-1] if keys else root
    size = page * tokens.itemsize
    data = tokens[len(keys) * page : count * page].tobytes()
    described = _media_by_page(media, page)
    for offset in range(0, len(data), size):
        key = sha256(key + data[offset : offset + size] + described.get(len(keys), b"")).digest()
        keys.append(key)


def _media_by_page(media: Sequence[MediaItem], page: int) -> dict[int, bytes]:
    by_page: dict[int, bytes] = {}
    for item in media:
        described = repr((item.first, item.length, item.spans)).encode() + item.digest
        for index in range(item.first // page, -(-item.end // page)):
            by_page[index] = by_page.get(index, b"") + described
    return by_page


class Segment(msgspec.Struct, eq=False):
    """Pages [start, start + len(keys)) of a path. `tail`: sliding pages before its end. The root is
    its own parent."""

    parent: "Segment"
    start: int
    keys: list[bytes]
    pages: "array[int]"
    tail: "array[int] | None" = None
    children: dict[bytes, "Segment"] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    def path(self) -> "Iterator[Segment]":
        """The segment and its ancestors without the root."""
        segment = self
        while segment.parent is not segment:
            yield segment
            segment = segment.parent

    @property
    def tail_keys(self) -> list[bytes]:
        keys: list[bytes] = []
        path = self.path()
        count = len(self.tail or ())
        while len(keys) < count:
            keys[:0] = next(path).keys
        return keys[len(keys) - count :]


def equal_keys(keys: list[bytes], others: list[bytes], offset: int = 0) -> int:
    """How many leading `keys` equal `others` from `offset` on. Bisects, since equal keys mean equal
    prefixes."""
    most = min(len(keys), len(others) - offset)
    return bisect_left(range(most), True, key=lambda index: keys[index] != others[offset + index])


class PrefixCache:
    """Segments of both pools, which are one without sliding layers."""

    def __init__(self, full: PagePool, sliding: PagePool, events: CacheEvents | None = None) -> None:
        self.evicted_pages = 0
        self._events = events
        self._full = full
        self._sliding = sliding
        self.version = 0  # changes with each tail, and so with what can be found
        self._root = Segment(cast("Segment", None), 0, [], array("i"), array("i"))
        self._root.parent = self._root
        self._order: OrderedDict[Segment, None] = OrderedDict()
        self._tails: OrderedDict[Segment, None] = OrderedDict()
        self._random = random.Random(0)  # noqa: S311 - no secret; the same requests leave the same cache

    # -- find

    def find(self, keys: list[bytes]) -> Hit:
        """The longest cached prefix of `keys`. Does not allocate."""
        last, known = self._walk(keys)
        while last.tail is None:
            last = last.parent
        full = array("i")
        for segment in reversed(list(last.path())):
            full.extend(segment.pages)
        return Hit(last.end, full, last.tail, known, self.version)

    def _walk(self, keys: list[bytes]) -> tuple[Segment, int]:
        """(last segment wholly on the path of `keys`, known full pages of that path)."""
        segment = self._root
        while segment.end < len(keys):
            child = segment.children.get(keys[segment.end])
            if child is None:
                break
            equal = equal_keys(child.keys, keys, child.start)
            if equal < len(child.keys):
                return segment, child.start + equal
            segment = child
        return segment, segment.end

    def use(self, keys: list[bytes], hit: Hit) -> None:
        self._touch(self._walk(keys[: hit.count])[0])

    def _touch(self, segment: Segment) -> None:
        for ancestor in segment.path():
            self._order.move_to_end(ancestor)
        if segment in self._tails:
            self._tails.move_to_end(segment)

    # -- insert

    def insert(self, keys: list[bytes], full: list[int], tail: list[int], *, supersedes: bool = False) -> tuple[int, bool]:
        """Cache the prefix of all `keys`: a full page each, and the sliding pages before its end.

        Returns (full pages cached before, whether the tail was new). `supersedes`: evict earlier
        tails of this conversation first.
        """
        segment, known = self._grow(keys, full)
        new_tail = segment.tail is None
        if new_tail:
            segment.tail = array("i", tail)
            self._tails[segment] = None
            self.version += 1
            self._sliding.keep(tail)
        self._touch(segment)
        if supersedes:
            self._supersede(segment)
        return known, new_tail

    def _grow(self, keys: list[bytes], full: list[int]) -> tuple[Segment, int]:
        """(segment that ends where `keys` do, pages known before)."""
        segment, known = self._walk(keys)
        if segment.end < known:
            segment = self._split(segment.children[keys[segment.end]], known - segment.end)
        if known < len(keys):
            segment = self._add(segment, keys[known:], full[known:])
        return segment, known

    def _add(self, parent: Segment, keys: list[bytes], pages: list[int]) -> Segment:
        self._full.keep(pages)
        segment = Segment(parent, parent.end, keys, array("i", pages))
        parent.children[keys[0]] = segment
        self._order[segment] = None
        return segment

    def _split(self, segment: Segment, count: int) -> Segment:
        parent = segment.parent
        upper = Segment(parent, segment.start, segment.keys[:count], segment.pages[:count])
        parent.children[upper.keys[0]] = upper
        segment.parent = upper
        segment.start = segment.start + count
        segment.keys = segment.keys[count:]
        segment.pages = segment.pages[count:]
        upper.children[segment.keys[0]] = segment
        self._order[upper] = None
        return upper

    def _supersede(self, segment: Segment) -> None:
        for above in segment.path():
            if above is not segment and len(above.children) == 1 and above in self._tails:
                self._tails.move_to_end(above, last=False)

    # -- evict

    def make_free(self, pool: PagePool, count: int) -> None:
        """Evict until `count` pages of `pool` are free. The caller has checked `available`."""
        while pool.free < count:
            if pool is self._full:
                self._remove_subtree(self._oldest(self._order, lambda candidate: pool.idle_in(candidate.pages), self._touch))
            else:
                segment = self._oldest(self._tails, lambda candidate: pool.idle_in(candidate.tail or ()), self._tails.move_to_end)
                self._drop_tail(segment)
                self._prune(segment)

    def discard(self, keys: list[bytes]) -> None:
        """Remove the last segment on the path and its descendants: values after it were not finite.
        If an ancestor is at fault, the next failure removes it."""
        segment, _ = self._walk(keys)
        if segment is not self._root:
            self._remove_subtree(segment)

    def _oldest(
        self, order: "OrderedDict[Segment, None]", idle: Callable[[Segment], int], renew: Callable[[Segment], None]
    ) -> Segment:
        """The least recently used with an idle page that is not spared. Skipped ones become newest."""
        for _ in range(2 * len(order)):
            segment = next(iter(order))
            if idle(segment) and (segment.children or self._random.random() >= SPARED):
                return segment
            renew(segment)
        return next(segment for segment in order if idle(segment))

    def _prune(self, segment: Segment) -> None:
        """Remove a segment that leads to no tail, and such ancestors."""
        while segment is not self._root and not segment.children and segment.tail is None:
            self._remove(segment)
            segment = segment.parent

    def _remove_subtree(self, segment: Segment) -> None:
        stack = [segment]
        subtree = []
        while stack:
            member = stack.pop()
            subtree.append(member)
            stack.extend(member.children.values())
        for member in reversed(subtree):
            self._remove(member)
        self._prune(segment.parent)

    def _remove(self, segment: Segment) -> None:
        assert not segment.children
        if segment.tail is not None:
            self._drop_tail(segment)
        self.evicted_pages += self._full.drop(segment.pages)
        if self._events is not None:
            self._events.removed(self._full.group, segment.keys)
        del segment.parent.children[segment.keys[0]]
        del self._order[segment]

    def _drop_tail(self, segment: Segment) -> None:
        assert segment.tail is not None
        if self._events is not None and segment.tail:
            self._events.removed(self._sliding.group, segment.tail_keys)
        self.version += 1
        self.evicted_pages += self._sliding.drop(segment.tail)
        segment.tail = None
        del self._tails[segment]
