"""Who is admitted next, in which order prompts share a step, and how much of each it takes: pure functions, chosen by name.

    arrival   strictly in order: the oldest prompt takes what it can use, and a head of the queue that lacks pages blocks it
    fair      shortest first, those who wait for a slot among them; a quarter of the prompts' steps, or of their time, is the
              oldest's. Of long prompts two are computed at a time. A request may be overtaken so many times, then it blocks

The order is by `priority` (lower first, as vLLM has it), then by arrival; it is also the reverse order of preemption.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.allocator import Allocator
from engine.core.prefix import Hit
from engine.core.sequence import Sequence
from engine.lifeline import StepTimes

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Policy:
    """`order(wanted, turn)`: the order in which prompts are served, of the tokens that each wants; running ones come in order of
    precedence, then waiting ones. `turn`: it is the first one's turn.

    overtaking  how many later ones may be admitted before a request that could not be
    long        how many prompts longer than a step's budget are computed side by side
    """

    order: Callable[[list[int], bool], list[int]]
    overtaking: int
    long: int


def in_order(wanted: list[int], turn: bool) -> list[int]:  # noqa: ARG001 (a Policy's)
    """The first first."""
    return list(range(len(wanted)))


def shortest_first(wanted: list[int], turn: bool) -> list[int]:
    """The shortest first, behind the first one when it is its turn: so short ones hardly notice long ones, and long ones end."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    if turn and order:
        order.remove(0)
        order.insert(0, 0)
    return order


POLICIES = {"fair": Policy(shortest_first, overtaking=64, long=2), "arrival": Policy(in_order, overtaking=0, long=1 << 30)}


class Prompt(NamedTuple):
    """Tokens that could be computed now, and how many stand before them."""

    wanted: int
    behind: int


class Corrections(NamedTuple):
    """What steps take in parts of what was measured at boot: those of decode rows alone, and those with prompt tokens."""

    decodes: float = 1.0
    prompts: float = 1.0


MEASURED = Corrections()


class StepEstimate:
    """How long a step takes, while prompts are added to it.

    Its rows cost what as many prompt tokens do, by whole tiles, and what its decode rows take more; beyond that it reads what is
    behind each chunk, and each of a chunk's tokens is multiplied with it.
    """

    def __init__(self, times: StepTimes, decodes: int, context: int, corrections: Corrections = MEASURED) -> None:
        """Decode rows with `context` tokens behind them, together."""
        self._times, self._rows, self._chunks, self._correction = times, decodes, 0, corrections.prompts
        self._rest = _interpolate(times.beside, decodes) + times.context_ms * context if decodes else 0.0
        alone = _interpolate(times.decodes, decodes) + times.context_ms * context if decodes else 0.0
        self.decode_ms = corrections.decodes * alone

    @property
    def ms(self) -> float:
        """Of all that has been added; of decode rows alone it is `decode_ms`."""
        return self._correction * self._measured_ms

    @property
    def _measured_ms(self) -> float:
        tile = self._times.tile
        return self._rest + _interpolate(self._times.prefills, -(-self._rows // tile) * tile)

    def add(self, tokens: int, behind: int) -> None:
        """A chunk of `tokens` behind so many others."""
        self._rows, self._chunks = self._rows + tokens, self._chunks + 1
        self._rest += self._times.read_ms * behind + self._times.behind_ms * behind * tokens

    def fitting(self, behind: int, target_ms: float) -> int:
        """The most tokens behind so many others that may be added, so that the step takes `target_ms` at most."""
        times, each = self._times, self._times.behind_ms * behind
        target_ms = target_ms / self._correction - times.read_ms * behind
        ends = tuple((ms + (rows - self._rows) * each, float(rows)) for rows, ms in times.prefills)
        whole = int(_interpolate(ends, target_ms - self._rest) / times.tile + 1e-9) * times.tile - self._rows
        if whole > 0 or not self._chunks:
            return max(0, whole)
        begun, left = -self._rows % times.tile, target_ms - self._measured_ms  # the rest of a tile that others have begun
        return begun if left >= begun * each else max(0, int(left / each)) if each else 0


def shares(
    prompts: list[Prompt],
    order: list[int],
    most: int,
    time: StepEstimate | None = None,
    target_ms: float = 0.0,
    whole_ms: float = 0.0,
) -> list[int]:
    """Tokens of each prompt in a step that computes `most` of them. With `time`, to which they are added, it takes `target_ms`;
    `whole_ms` while all prompts so far end with it."""
    found = [0] * len(prompts)
    for at in order:
        wanted, behind = prompts[at]
        share = min(wanted, most if time is None else min(most, time.fitting(behind, target_ms)))
        if time is not None and share < wanted <= min(most, time.fitting(behind, whole_ms)):
            share = wanted
        if share < wanted:
            whole_ms = 0.0
        if share > 0:
            found[at] = share
            most -= share
            if time is not None:
                time.add(share, behind)
    return found


def _interpolate(points: Points, at: float) -> float:
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
        for index, pool in reversed(list(enumerate(self._allocator.pools))):  # full pages, of which long ones need most, first
            need = self._allocator.worst_pages(index, len(sequence.tokens) + 1)
            if hit is not None and hit.count:
                if pool.group.window is None:
                    need = max(0, need - len(hit.full)) + hit.idle_full
                else:
                    need = max(0, need - len(hit.tail)) + pool.idle_in(hit.tail)
            if need + self._promised[index] + self._running > pool.available:
                return False
        return True
