"""Who is admitted next: pure functions of what waits, what runs and what is free."""

from collections.abc import Sequence as Several

from engine.core.pages import PagePool
from engine.core.sequence import Sequence


def fits(sequence: Sequence, running: Several[Sequence], pools: Several[PagePool]) -> bool:
    """All known tokens fit what running prefills leave, with a page to grow for everybody; anything fits empty pools."""
    if not running:
        return True
    for index, pool in enumerate(pools):
        promised = sum(_outstanding(other, index, pool) for other in running)
        need = pool.group.worst_pages(len(sequence.tokens) + 1)
        if need + promised + len(running) > pool.free:
            return False
    return True


def _outstanding(sequence: Sequence, index: int, pool: PagePool) -> int:
    """Pages a running prefill still has to take in pool `index`."""
    if not sequence.prefilling:
        return 0
    return max(0, pool.group.worst_pages(sequence.target + 1) - len(sequence.runs[index].pages))
