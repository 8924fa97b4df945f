"""The allocator's records compared with what sequences and the prefix cache hold.

Each page of a pool is free, held or idle, and in one list only; its holder count is the number of sequences that hold it; two hold
it only at the same entry, where both have computed the whole page.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from engine.core.pages import PagePool
from engine.core.prefix import PrefixCache
from engine.core.requests import Requests
from engine.core.sequence import Sequence as Running


def complaints(requests: Requests) -> Iterator[str]:
    """What is wrong, a sentence each."""
    kept = _kept(requests.allocator.pools, requests.allocator.cache)
    for index, pool in enumerate(requests.allocator.pools):
        held = Counter(page for sequence in requests.running for page in sequence.runs[index].pages)
        for sentence in _pool(pool, held, kept[index]):
            yield f"group {pool.group.name}: {sentence}"
        for sentence in _sequences(pool, index, held, requests.running):
            yield f"group {pool.group.name}: {sentence}"


def _kept(pools: Sequence[PagePool], cache: PrefixCache) -> list[set[int]]:
    """The pages of each pool that the prefix cache names."""
    kept: list[set[int]] = [set() for _ in pools]
    for segment in cache:
        kept[-1].update(segment.pages)
        kept[0].update(segment.tail or ())
    return kept


def _pool(pool: PagePool, held: Counter[int], kept: set[int]) -> Iterator[str]:
    free = Counter(pool._free)
    idle = kept - held.keys()
    for page in sorted({page for page, count in free.items() if count > 1}):
        yield f"page {page} is {free[page]} times among the free pages"
    for page in sorted(free.keys() & (held.keys() | kept)):
        yield f"page {page} is free, and {'held' if page in held else 'cached'}"
    for page, count in held.items():
        if not 0 < page <= pool.total:
            yield f"page {page} is held, of a pool of {pool.total + 1}"
        elif pool.holders[page] != count:
            yield f"page {page} has {pool.holders[page]} holders counted, and {count} sequences hold it"
    if len(free) + len(held) + len(idle) != pool.total or len(idle) != pool.idle:
        yield f"{len(free)} free, {len(held)} held and {len(idle)} idle pages ({pool.idle} idle counted) of {pool.total}"


def _sequences(pool: PagePool, index: int, held: Counter[int], running: Sequence[Running]) -> Iterator[str]:
    size = pool.group.page
    first: dict[int, tuple[int, int]] = {}
    for sequence in running:
        run = sequence.runs[index]
        if run.end * size < sequence.high:
            yield f"slot {sequence.slot} has pages up to position {run.end * size}, and is planned up to {sequence.high}"
        for entry, page in enumerate(run.pages, run.first):
            if held[page] > 1:
                other, first_entry = first.setdefault(page, (sequence.slot, entry))
                if first_entry != entry:
                    yield f"page {page} is slot {other}'s entry {first_entry} and slot {sequence.slot}'s entry {entry}"
                elif (entry + 1) * size > sequence.low:
                    yield f"page {page}, entry {entry}, is shared and slot {sequence.slot} still writes to it"
