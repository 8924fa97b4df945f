"""Keys of pages, and segments: the runs of pages that the prefix cache's tree is made of.

A page's key is sha256(key of the page before it, its token ids, the media items that stand in it), so equal keys mean equal
prefixes. Before the first page stands a root key made of the request's salt.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from struct import pack

from engine.protocol import MediaItem


def root_key(salt: str) -> bytes:
    """The key before the first page's: requests find only pages of their own salt."""
    return sha256(b"quartet prefix 2\0" + salt.encode()).digest()


def extend_keys(
    keys: list[bytes], root: bytes, tokens: "array[int]", page: int, count: int, media: Sequence[MediaItem] = ()
) -> None:
    """Append the keys of the next pages, up to `count` of them."""
    key = keys[-1] if keys else root
    size = page * tokens.itemsize
    data = tokens[len(keys) * page : count * page].tobytes()
    pictured = _media_by_page(media, page) if media else {}
    for at in range(0, len(data), size):
        content = data[at : at + size]
        if pictured:
            content += pictured.get(len(keys), b"")
        key = sha256(key + content).digest()
        keys.append(key)


def _media_by_page(media: Sequence[MediaItem], page: int) -> dict[int, bytes]:
    """Of each page in which media stand: where they do, and their digests."""
    found: dict[int, bytes] = {}
    for item in media:
        described = pack("<qq", item.first, item.length) + item.digest
        for at in range(item.first // page, -(-item.end // page)):
            found[at] = found.get(at, b"") + described
    return found


@dataclass(eq=False, slots=True)
class Segment:
    """Pages [start, start + len(keys)) of a path: one key and one full page each. `tail`: sliding pages before its end."""

    parent: "Segment | None"
    start: int
    keys: list[bytes]
    pages: "array[int]"
    tail: "array[int] | None" = None
    children: dict[bytes, "Segment"] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Pages from the root to its end."""
        return self.start + len(self.keys)

    def path(self) -> "Iterator[Segment]":
        """Itself and those above it, without the root."""
        segment: Segment | None = self
        while segment is not None and segment.parent is not None:
            yield segment
            segment = segment.parent


def common(segment: Segment, keys: list[bytes]) -> int:
    """How many of the segment's pages continue as `keys` do."""
    return equal_keys(segment.keys, keys, segment.start)


def equal_keys(keys: list[bytes], others: list[bytes], offset: int = 0) -> int:
    """How many leading `keys` equal `others` from `offset` on; by bisection, since equal keys mean equal prefixes."""
    low, high = 0, min(len(keys), len(others) - offset)
    if high > 0 and keys[high - 1] == others[offset + high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if keys[middle] == others[offset + middle]:
            low = middle + 1
        else:
            high = middle
    return low
