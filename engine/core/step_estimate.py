"""How long a step takes by the times that ranks measured at boot, and each prompt's tokens in a step of bounded rows and time."""

from bisect import bisect_right
from typing import NamedTuple

from engine.lifeline import StepTimes

Points = tuple[tuple[float, float], ...]


class Prompt(NamedTuple):
    """Tokens that could be computed now, and the length of the context before them."""

    wanted: int
    behind: int


class StepEstimate:
    """How long a step takes, while prompts are added to it.

    All rows cost as much as prompt tokens, in whole tiles, and decode rows some more. Each chunk reads its context once, and each
    of its tokens attends to it.
    """

    def __init__(self, times: StepTimes, decodes: int, context: int, slowed: float = 1.0) -> None:
        """`decodes` decode rows, with `context` tokens of context in total. `slowed`: what steps take relative to `times`."""
        self._times, self._rows, self._chunks, self._slowed = times, decodes, 0, slowed
        self._rest = _interpolate(times.beside, decodes) + times.context_ms * context if decodes else 0.0
        self.decode_ms = slowed * (_interpolate(times.decodes, decodes) + times.context_ms * context) if decodes else 0.0

    @property
    def ms(self) -> float:
        """With all that was added. Without prompts it is `decode_ms` instead."""
        return self._slowed * self._measured_ms

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
        target_ms = target_ms / self._slowed - times.read_ms * behind
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
