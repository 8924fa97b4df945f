"""Keys of pages, and segments: the runs of pages that the prefix cache's tree is made of.

A page's key is sha256(key of the page before it, its token ids), so equal keys mean equal prefixes. Before the first page stands a
root key made of the adapter and the request's salt.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256


def root_key(adapter: int, salt: str) -> bytes:
    """The key before the first page's: requests find only pages of their own salt."""
    return sha256(b"quartet prefix 1\0%d\0" % adapter + salt.encode()).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: "array[int]", page: int, count: int) -> None:
    """Append the keys of the next pages, up to `count` of them."""
    key = keys[-1] if keys else root
    size = page * tokens.itemsize
    data = tokens[len(keys) * page : count * page].tobytes()
    for at in range(0, len(data), size):
        key = sha256(key + data[at : at + size]).digest()
        keys.append(key)


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
