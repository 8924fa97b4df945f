"""Who is admitted next: pure functions of what waits, what runs and what is free."""

from collections.abc import Sequence as Several

from engine.core.allocator import Allocator
from engine.core.prefix import Hit
from engine.core.sequence import Sequence


def fits(sequence: Sequence, hit: Hit | None, running: Several[Sequence], allocator: Allocator) -> bool:
    """All known tokens fit what running prefills leave, with a page to grow for everybody; anything fits empty pools.

    Pages of the hit need not be taken, but those that lie idle are no longer there for others.
    """
    if not running:
        return True
    for index, pool in enumerate(allocator.pools):
        promised = sum(_outstanding(other, index, allocator) for other in running)
        need = allocator.worst_pages(index, len(sequence.tokens) + 1)
        if hit is not None and hit.count:
            cached = hit.full if pool.group.window is None else hit.tail
            need = max(0, need - len(cached)) + pool.idle_in(cached)
        if need + promised + len(running) > pool.available:
            return False
    return True


def _outstanding(sequence: Sequence, index: int, allocator: Allocator) -> int:
    """Pages a running prefill still has to take in pool `index`."""
    if not sequence.prefilling:
        return 0
    return max(0, allocator.worst_pages(index, sequence.target + 1) - len(sequence.runs[index].pages))
