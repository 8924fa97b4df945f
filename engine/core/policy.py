"""The order in which prompts share a step, their tokens in it, and the room for admissions; policies are chosen by name.

    arrival   strictly in order: the oldest prompt takes what it can use; if the head of the queue lacks pages, the queue waits
    fair      shortest first, waiting prompts included; a quarter of the prompts' steps, or of their time, is the oldest's. Two
              long prompts are computed at a time. A request may be overtaken a number of times, then the queue waits for it

Precedence is by `priority` (lower first, as in vLLM), then by arrival; preemption goes in the reverse order.
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
    """`order(wanted, turn)`: the indices of prompts in the order of service. `wanted`: tokens that each could use, running prompts
    by precedence, then waiting ones. `turn`: the first prompt is served first.

    overtaking  how many later requests may be admitted before one that could not be
    long        how many prompts longer than a step's budget are computed at a time
    """

    order: Callable[[list[int], bool], list[int]]
    overtaking: int
    long: int


def in_order(wanted: list[int], turn: bool) -> list[int]:  # noqa: ARG001 (a Policy's)
    """In order of precedence."""
    return list(range(len(wanted)))


def shortest_first(wanted: list[int], turn: bool) -> list[int]:
    """The first prompt on its turn, then the shortest: short ones hardly wait for long ones, and long ones finish."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    if turn and order:
        order.remove(0)
        order.insert(0, 0)
    return order


POLICIES = {"fair": Policy(shortest_first, overtaking=64, long=2), "arrival": Policy(in_order, overtaking=0, long=1 << 30)}


class Prompt(NamedTuple):
    """Tokens that could be computed now, and the length of the context before them."""

    wanted: int
    behind: int


class Corrections(NamedTuple):
    """The time of steps relative to what was measured at boot: of decode rows alone, and with prompt tokens."""

    decodes: float = 1.0
    prompts: float = 1.0


MEASURED = Corrections()


class StepEstimate:
    """How long a step takes, while prompts are added to it.

    All rows cost as much as prompt tokens, in whole tiles, and decode rows some more. Each chunk reads its context once, and each
    of its tokens attends to it.
    """

    def __init__(self, times: StepTimes, decodes: int, context: int, corrections: Corrections = MEASURED) -> None:
        """`decodes` decode rows, with `context` tokens of context in total."""
        self._times, self._rows, self._chunks, self._correction = times, decodes, 0, corrections.prompts
        self._rest = _interpolate(times.beside, decodes) + times.context_ms * context if decodes else 0.0
        alone = _interpolate(times.decodes, decodes) + times.context_ms * context if decodes else 0.0
        self.decode_ms = corrections.decodes * alone

    @property
    def ms(self) -> float:
        """With all that was added. Without prompts it is `decode_ms` instead."""
        return self._correction * self._measured_ms

    @property
    def _measured_ms(self) -> float:
        tile = self._times.tile
        return self._rest + _interpolate(self._times.prefills, -(-self._rows // tile) * tile)

    def add(self, tokens: int, behind: int) -> None:
        """Add a chunk of `tokens` behind `behind` others."""
        self._rows, self._chunks = self._rows + tokens, self._chunks + 1
        self._rest += self._times.read_ms * behind + self._times.behind_ms * behind * tokens

    def fitting(self, behind: int, target_ms: float) -> int:
        """The most tokens behind `behind` others that can be added while the step takes at most `target_ms`."""
        times, each = self._times, self._times.behind_ms * behind
        target_ms = target_ms / self._correction - times.read_ms * behind
        ends = tuple((ms + (rows - self._rows) * each, float(rows)) for rows, ms in times.prefills)
        whole = int(_interpolate(ends, target_ms - self._rest) / times.tile + 1e-9) * times.tile - self._rows
        if whole > 0 or not self._chunks:
            return max(0, whole)
        begun, left = -self._rows % times.tile, target_ms - self._measured_ms  # the rest of a started tile
        return begun if left >= begun * each else max(0, int(left / each)) if each else 0


def shares(
    prompts: list[Prompt],
    order: list[int],
    most: int,
    time: StepEstimate | None = None,
    target_ms: float = 0.0,
    whole_ms: float = 0.0,
) -> list[int]:
    """Tokens of each prompt in a step that computes at most `most`. With `time`, to which they are added, the step takes at most
    `target_ms`, or `whole_ms` as long as every prompt in it so far is finished by it."""
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
    """The value at `at`, linear between the points and extrapolated beyond them; constant for a single point."""
    if len(points) == 1:
        return points[0][1]
    after = min(max(bisect_right([x for x, _ in points], at), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return y0 + (at - x0) * (y1 - y0) / (x1 - x0)


class Room:
    """Pages that are free for admissions: those that running prefills still need are reserved for them."""

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
        """Whether all known tokens fit what is left, with a page to grow for every running sequence; always if none runs.

        Pages of the hit need not be taken, but idle ones among them are no longer available to others.
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
