"""How many prompt tokens a step computes, and of which prompts: bounded by its rows, and by its time.

    rows    what decode rows leave of `prefill_budget`; a quarter of it always belongs to prompts
    time    with `tpot_target_ms`, steps beside decode rows take that long on average, by the times that ranks measured at boot,
            corrected by what the last steps took; a step that took longer than expected is made up for

A step may exceed the target, by a target at most, to finish a prompt; steps with fewer prompt tokens, or none, make up for it. So a
short prompt is computed at once, and not in slices over several steps. Other prompts get what fits. Where that is not worth a step
(a long context must be read; kernels launched one by one take longer than a captured step), time is saved first in steps of decode
rows alone, which a short prompt that comes meanwhile may use.

A fifth of the time always belongs to prompts: a target that decode rows alone miss, or nearly, would hold prompts up and still not
be met. There the mean step takes a quarter longer than its decode rows. Of the prompts' time a quarter is the oldest's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.policy import Policy
from engine.core.step_estimate import Corrections, Prompt, StepEstimate, shares
from engine.lifeline import StepTimes

OLDEST_EVERY = 4  # of this many steps with prompt tokens, or parts of their time, at least one is the oldest prompt's
MOST_PASSED = 15  # steps in a row with prompt tokens but none of the oldest's, however short
SMALLEST_PART = 32  # a chunk below this fraction (1/32) of the budget is not worth a step
PROMPTS_TIME = 0.2  # part of the time that belongs to prompts, whatever the target
BORROWED = 1.0  # of the target: how late steps may be to finish prompts
SAVED = 0.5  # of the target: how much time short steps may leave to a longer one, beside what is saved for a chunk
MOST_SKIPPED = 31  # steps in a row without prompt tokens: prompts must not stand still
REMEMBERED = 20  # steps over which corrections average
MOST_SLOWED = 4.0  # bound of a step's time relative to the measured one: a single pause is no trend


class DecodeRows(NamedTuple):
    """Of a step: how many, and the tokens of their contexts in total."""

    rows: int = 0
    context: int = 0


@dataclass(slots=True)
class Correction:
    """The time of steps of a kind relative to what was measured at boot, with exponential decay."""

    took_ms: float
    measured_ms: float

    @classmethod
    def begin(cls, milliseconds: float) -> "Correction":
        """As if each of the remembered steps had taken `milliseconds`, as measured."""
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
    """`rows`: of a step with prompt tokens. `times` and `target_ms` as in SchedulerConfig; None: only rows bound a step."""

    def __init__(self, policy: Policy, rows: int, times: StepTimes | None, target_ms: float | None) -> None:
        self._policy, self._rows = policy, rows
        self._times, self._target_ms = times, target_ms or 0.0
        self._passed, self._passed_ms = 0, 0.0  # steps since the oldest prompt had tokens in one, and their prompts' time
        self._skipped, self._saving = 0, False  # steps in a row without prompt tokens; whether the last was one
        self._may_take_ms = 0.0  # bound of the last step
        first = times.decodes[0][1] if times else 1.0
        self._alone, self._mixed = Correction.begin(first), Correction.begin(first)  # of decode rows alone; beside prompt tokens
        self._late_ms = 0.0  # by which steps have exceeded the target, not yet made up for; below 0: saved

    def prompt_tokens(self, decode_rows: int) -> int:
        """Prompt tokens that a step may have beside `decode_rows`."""
        return max(self._rows - decode_rows, self._rows // 4, 1)

    def idle(self) -> None:
        """There are no prompts: a step of decode rows alone makes up for lateness."""
        self._passed, self._passed_ms, self._skipped = 0, 0.0, 0
        self._late_ms = max(0.0, self._late_ms - PROMPTS_TIME * self._target_ms)

    def share(self, prompts: list[Prompt], most: int, decodes: DecodeRows) -> list[int]:
        """Tokens of each prompt in the next step, `most` in total; prompts as in `Policy.order`. `planned` gets the outcome."""
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
        """Further tokens for a step that has `chunks` already, in place of what other prompts could not use."""
        order = self._order(prompts, turn=False)
        if not self._has_target(decodes):
            return shares(prompts, order, most)
        return shares(prompts, order, most, self._estimate(decodes, chunks), self._may_take_ms)

    def planned(self, chunks: list[Prompt], decodes: DecodeRows) -> Expected | None:
        """The shared step got these chunks. With a target: what to pass to `took`."""
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
        """A planned step has ended, `milliseconds` after the one before it."""
        milliseconds = min(milliseconds, MOST_SLOWED * expected.measured_ms)
        (self._mixed if expected.prompts else self._alone).add(milliseconds, expected.measured_ms)
        self._late_ms += milliseconds - expected.counted_ms

    def _turn(self, oldest: Prompt, most: int, decodes: DecodeRows) -> bool:
        """Whether the oldest prompt comes first: others have had three times the time of its next chunk."""
        if self._passed < OLDEST_EVERY - 1:
            return False
        if self._passed >= MOST_PASSED or not self._has_target(decodes):
            return True
        time = self._estimate(decodes, [Prompt(self._enough(oldest, most, decodes), oldest.behind)])
        return self._passed_ms >= (OLDEST_EVERY - 1) * (time.ms - time.decode_ms)

    def _within_target(self, prompts: list[Prompt], order: list[int], most: int, decodes: DecodeRows) -> list[int]:
        """The first prompt in order gets enough for a step, and others what is left. Otherwise time is saved for it; meanwhile
        prompts that the step finishes are served, unless they have passed it too often."""
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
        """Tokens that are worth a step: as many as take twice the prompt time of the fewest."""
        fewest, time = min(prompt.wanted, max(1, most // SMALLEST_PART)), self._estimate(decodes)
        least = self._estimate(decodes, [Prompt(fewest, prompt.behind)])
        return max(fewest, min(prompt.wanted, most, time.fitting(prompt.behind, 2 * least.ms - time.decode_ms)))

    def _has_target(self, decodes: DecodeRows) -> bool:
        """Whether a target bounds the step: without decode rows nothing streams."""
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
