"""Who is admitted next, and how a step's prefill tokens are shared: pure functions, chosen by name.

    arrival   strictly in order: the oldest prompt takes what it can use, and a head of the queue that lacks pages blocks it
    fair      the oldest prompt gets a quarter of the budget at least, and the rest goes to all, those who wait for a slot among
              them, shortest first. Of long prompts two are computed at a time. A request may be overtaken so many times, then it
              blocks

The order is by `priority` (lower first, as vLLM has it), then by arrival; it is also the reverse order of preemption.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.core.allocator import Allocator
from engine.core.prefix import Hit
from engine.core.sequence import Sequence
from engine.lifeline import StepTimes

Shares = Callable[[list[int], int], list[int]]
LEAST = 4  # the oldest prompt has one in so many of the budget at least


@dataclass(frozen=True)
class Policy:
    """`shares(wanted, budget)`: tokens of each prompt in a step, of those that it wants; running ones in order, then waiting ones.

    overtaking  how many later ones may be admitted before a request that could not be
    long        how many prompts longer than a step's budget are computed side by side
    """

    shares: Shares
    overtaking: int
    long: int


def in_order(wanted: list[int], budget: int) -> list[int]:
    """To each what it can use, the first first."""
    shares = []
    for each in wanted:
        shares.append(min(each, budget))
        budget -= shares[-1]
    return shares


def shortest_beside_oldest(wanted: list[int], budget: int) -> list[int]:
    """A quarter to the first at least, so that it ends; the rest shortest first, so that short ones hardly notice long ones."""
    shares = [0] * len(wanted)
    if wanted:
        shares[0] = min(wanted[0], max(1, budget // LEAST))
        budget -= shares[0]
    for at in sorted(range(len(wanted)), key=wanted.__getitem__):
        more = min(wanted[at] - shares[at], budget)
        shares[at] += more
        budget -= more
    return shares


POLICIES = {"fair": Policy(shortest_beside_oldest, overtaking=64, long=2), "arrival": Policy(in_order, overtaking=0, long=1 << 30)}


def prefill_tokens(times: StepTimes, decodes: int, context: int, behind: int, target_ms: float, most: int) -> int:
    """The most prompt tokens, up to `most`, of a step that takes `target_ms` at the longest beside so many decode rows.

    `context`: tokens that those rows have behind them, together; `behind`: that a prompt token has, on average.

    The step's time is taken to be that of its decode rows, and what a prefill of all its rows takes more than one of so many
    rows. One token in 32 of `most` is always allowed: prompts must not stand still where decodes alone exceed the target.
    """
    prefills = tuple((rows, ms + rows * behind * times.behind_ms) for rows, ms in times.prefills)
    left = target_ms - _line(times.decodes, decodes) - times.context_ms * context + _line(prefills, decodes)
    rows = _line(tuple((ms, float(rows)) for rows, ms in prefills), left)
    tokens = int(rows / times.tile + 1e-9) * times.tile - decodes
    return max(most // 32, 1, min(most, tokens))


def _line(points: tuple[tuple[float, float], ...], at: float) -> float:
    """The value there, on straight lines between the points, and on the outer ones beyond them; one point: everywhere its own."""
    if len(points) == 1:
        return points[0][1]
    after = min(max(bisect_right([x for x, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return y0 + (at - x0) * (y1 - y0) / (x1 - x0)


class Room:
    """Pages that are free for newcomers: what running prefills still have to take is promised to them."""

    def __init__(self, running: Iterable[Sequence], allocator: Allocator) -> None:
        self._allocator = allocator
        self._running = 0
        self._promised = [0] * len(allocator.pools)
        for sequence in running:
            self.admitted(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """One more runs."""
        self._running += 1
        if sequence.high < sequence.target:
            for index in range(len(self._promised)):
                worst = self._allocator.worst_pages(index, sequence.target + 1)
                self._promised[index] += max(0, worst - len(sequence.runs[index].pages))

    def fits(self, sequence: Sequence, hit: Hit | None) -> bool:
        """All known tokens fit what is left, with a page to grow for everybody; anything fits empty pools.

        Pages of the hit need not be taken, but those that lie idle are no longer there for others.
        """
        if not self._running:
            return True
        for index, pool in enumerate(self._allocator.pools):
            need = self._allocator.worst_pages(index, len(sequence.tokens) + 1)
            if hit is not None and hit.count:
                cached = hit.full if pool.group.window is None else hit.tail
                need = max(0, need - len(cached)) + pool.idle_in(cached)
            if need + self._promised[index] + self._running > pool.available:
                return False
        return True
