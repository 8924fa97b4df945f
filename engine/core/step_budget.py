"""How many prompt tokens a step computes, and whose: by the rows that it may have, and by how long it may take.

    rows    what decode rows leave of `prefill_budget`; a quarter of it is always the prompts'
    time    with `tpot_target_ms`, so many that steps beside decode rows take that long on average: by what ranks measured at boot,
            corrected by what the last steps took; time that a step took longer than expected is made up for

A prompt that ends with a step may make it longer, by a target at most; steps with fewer prompt tokens, or none, make up for it. So
a short prompt is computed at once, where cut to what fits each step it would take several. Other prompts have what fits. Where that
is not worth a step (a long prefix must be read; what is launched kernel by kernel takes longer than a captured step), time is saved
first, in steps of decode rows alone, which a short prompt may use that comes meanwhile.

A fifth of the time is always the prompts': a target that decode rows alone miss, or nearly, would hold prompts up without being
met, while their requests keep coming. There the mean step takes a quarter longer than its decode rows do. Of the prompts' time a
quarter is the oldest's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.policy import Corrections, Policy, Prompt, StepEstimate, shares
from engine.lifeline import StepTimes

OLDEST_EVERY = 4  # of so many steps with prompt tokens, or of so much of their time, one part at least is the oldest prompt's
MOST_PASSED = 15  # steps with prompt tokens without the oldest's, however little time they take
SMALLEST_PART = 32  # a chunk below one part in so many of the budget is too small to be worth its step
PROMPTS_TIME = 0.2  # part of the time that is the prompts' whatever the target is
BORROWED = 1.0  # of the target: by how much steps may be late for prompts that end with them
SAVED = 0.5  # of the target: what shorter steps have left of it and a longer one may use, beside what is saved for a chunk
MOST_SKIPPED = 31  # steps without prompt tokens, one after the other: prompts must not stand still
REMEMBERED = 20  # steps by which times are corrected
MOST_SLOWED = 4.0  # a step counts as so many times what was measured, at most: one pause is not how long steps take


class DecodeRows(NamedTuple):
    """Of a step: how many, and the tokens that they have behind them, together."""

    rows: int = 0
    context: int = 0


@dataclass(slots=True)
class Correction:
    """What steps of a kind take, in parts of what was measured at boot; old ones count less and less."""

    took_ms: float
    measured_ms: float

    @classmethod
    def begin(cls, milliseconds: float) -> "Correction":
        """As if the remembered steps had each taken so many, as measured."""
        return cls(REMEMBERED * milliseconds, REMEMBERED * milliseconds)

    @property
    def factor(self) -> float:
        return max(0.1, self.took_ms / self.measured_ms)

    def add(self, took_ms: float, measured_ms: float) -> None:
        """One more step."""
        kept = 1 - 1 / REMEMBERED
        self.took_ms, self.measured_ms = kept * self.took_ms + took_ms, kept * self.measured_ms + measured_ms


class Expected(NamedTuple):
    """A step beside decode rows: whether it has prompt tokens, its time as measured at boot, and as counted when it was planned."""

    prompts: bool
    measured_ms: float
    counted_ms: float


class StepBudget:
    """Of a scheduler, `rows` a step with prompt tokens; `times` and `target_ms` as in SchedulerConfig, None: rows alone count."""

    def __init__(self, policy: Policy, rows: int, times: StepTimes | None, target_ms: float | None) -> None:
        self._policy, self._rows = policy, rows
        self._times, self._target_ms = times, target_ms or 0.0
        self._passed, self._passed_ms = 0, 0.0  # steps since the last one with tokens of the first prompt, and their prompts' time
        self._skipped, self._saving = 0, False  # steps without prompt tokens, one after the other; whether the last was one
        self._may_take_ms = 0.0  # the last step
        first = times.decodes[0][1] if times else 1.0
        self._alone, self._mixed = Correction.begin(first), Correction.begin(first)  # of decode rows alone; beside prompt tokens
        self._late_ms = 0.0  # by which steps have exceeded the target, and that has not been made up for; below 0: saved

    def prompt_tokens(self, decode_rows: int) -> int:
        """Prompt tokens beside so many decode rows."""
        return max(self._rows - decode_rows, self._rows // 4, 1)

    def idle(self) -> None:
        """There are no prompts: steps of decode rows alone make up for what was late."""
        self._passed, self._passed_ms, self._skipped = 0, 0.0, 0
        self._late_ms = max(0.0, self._late_ms - PROMPTS_TIME * self._target_ms)

    def share(self, prompts: list[Prompt], most: int, decodes: DecodeRows) -> list[int]:
        """Tokens of each prompt in the next step, of `most` together; prompts as in `Policy.order`. What came of it: `planned`."""
        order = self._order(prompts, self._turn(prompts[0], most, decodes))
        if self._has_target(decodes):
            found = self._within_target(prompts, order, most, decodes)
        else:
            found = shares(prompts, order, most)
        if found[0]:
            self._passed, self._passed_ms = 0, 0.0
        elif any(found):
            self._passed += 1
        return found

    def share_rest(self, prompts: list[Prompt], most: int, decodes: DecodeRows, chunks: list[Prompt]) -> list[int]:
        """Tokens more for a step that has `chunks` already, in place of what others could not use."""
        order = self._order(prompts, turn=False)
        if not self._has_target(decodes):
            return shares(prompts, order, most)
        return shares(prompts, order, most, self._estimate(decodes, chunks), self._may_take_ms)

    def planned(self, chunks: list[Prompt], decodes: DecodeRows) -> Expected | None:
        """The step that was shared has these chunks; with a target, what `took` is to be told of it."""
        if not self._has_target(decodes):
            return None
        time, target_ms = self._estimate(decodes, chunks), self._target(decodes)
        step_ms = time.ms if chunks else time.decode_ms
        late_ms = self._late_ms + step_ms - target_ms
        self._late_ms = late_ms if self._saving else max(late_ms, min(self._late_ms, -SAVED * target_ms))
        if self._passed:
            self._passed_ms += step_ms - time.decode_ms
        return Expected(bool(chunks), step_ms / (self._mixed if chunks else self._alone).factor, step_ms)

    def took(self, expected: Expected, milliseconds: float) -> None:
        """A planned step has ended, so long after the one before it."""
        milliseconds = min(milliseconds, MOST_SLOWED * expected.measured_ms)
        (self._mixed if expected.prompts else self._alone).add(milliseconds, expected.measured_ms)
        self._late_ms += milliseconds - expected.counted_ms

    def _turn(self, oldest: Prompt, most: int, decodes: DecodeRows) -> bool:
        """Whether the oldest comes first: others have had thrice the time of its next chunk."""
        if self._passed < OLDEST_EVERY - 1:
            return False
        if self._passed >= MOST_PASSED or not self._has_target(decodes):
            return True
        time = self._estimate(decodes, [Prompt(self._enough(oldest, most, decodes), oldest.behind)])
        return self._passed_ms >= (OLDEST_EVERY - 1) * (time.ms - time.decode_ms)

    def _within_target(self, prompts: list[Prompt], order: list[int], most: int, decodes: DecodeRows) -> list[int]:
        """The first in order has enough, and others what is left. Else time is saved for it; prompts that end with the step are
        served meanwhile, unless they have passed it too often."""
        target_ms, first = self._target(decodes), order[0]
        self._may_take_ms, enough = target_ms - self._late_ms, self._enough(prompts[first], most, decodes)
        whole_ms = self._may_take_ms + BORROWED * target_ms
        found = shares(prompts, order, most, self._estimate(decodes), self._may_take_ms, whole_ms)
        if found[first] < enough and self._passed < MOST_PASSED:
            found = shares(prompts, order[1:], most, self._estimate(decodes), self._may_take_ms, whole_ms)
            found = [share if share == prompt.wanted else 0 for share, prompt in zip(found, prompts, strict=True)]
            enough = 0 if any(found) else enough
        self._saving = found[first] < enough and self._skipped < MOST_SKIPPED
        self._skipped = self._skipped + 1 if self._saving else 0
        if found[first] < enough:
            found = [0] * len(prompts)
            found[first] = 0 if self._saving else enough
        return found

    def _enough(self, prompt: Prompt, most: int, decodes: DecodeRows) -> int:
        """Tokens that are worth a step: as many as take twice as long as the fewest."""
        fewest, time = min(prompt.wanted, max(1, most // SMALLEST_PART)), self._estimate(decodes)
        least = self._estimate(decodes, [Prompt(fewest, prompt.behind)])
        return max(fewest, min(prompt.wanted, most, time.fitting(prompt.behind, 2 * least.ms - time.decode_ms)))

    def _has_target(self, decodes: DecodeRows) -> bool:
        """Where nothing streams there is no time to keep to."""
        return bool(self._times is not None and self._target_ms and decodes.rows)

    def _target(self, decodes: DecodeRows) -> float:
        """Milliseconds that a step beside these rows may take on average."""
        return max(self._target_ms, self._estimate(decodes).decode_ms / (1 - PROMPTS_TIME))

    def _estimate(self, decodes: DecodeRows, chunks: Iterable[Prompt] = ()) -> StepEstimate:
        assert self._times is not None
        time = StepEstimate(self._times, *decodes, Corrections(self._alone.factor, self._mixed.factor))
        for chunk in chunks:
            time.add(*chunk)
        return time

    def _order(self, prompts: list[Prompt], turn: bool) -> list[int]:
        return self._policy.order([prompt.wanted for prompt in prompts], turn)
