"""How many prompt tokens a step computes, and whose: by the rows that it may have, and by how long it may take.

    rows    what decode rows leave of `prefill_budget`; a quarter of it is always the prompts'
    time    with `tpot_target_ms`, so many that a step beside decode rows takes that long at most

Where even a few tokens take longer (a long prefix must be read; what is launched kernel by kernel takes longer than a captured
step), a step exceeds the target, and steps of decode rows alone make up for it: the streams' mean time a token keeps to it, and
prompts advance faster than by a few tokens in every step. What a step leaves of its time the next one may use.

A fifth of the time is always the prompts': a target that decode rows alone miss, or nearly, would hold prompts up without being
met, while their requests keep coming. There the mean step takes a quarter longer than its decode rows do.
"""

from typing import NamedTuple

from engine.core.policy import Policy, Prompt, StepEstimate, shares
from engine.lifeline import StepTimes

OLDEST_EVERY = 4  # of so many steps with prompt tokens one at least serves the oldest prompt first
SMALLEST_PART = 32  # a chunk below one part in so many of the budget is too small to be worth its step
PROMPTS_TIME = 0.2  # part of the time that is the prompts' whatever the target is
SAVED = 0.5  # of the target: what shorter steps have left of it and a longer one may use
MOST_SKIPPED = 15  # steps without prompt tokens, one after the other: prompts must not stand still


class DecodeRows(NamedTuple):
    """Of a step: how many, and the tokens that they have behind them, together."""

    rows: int = 0
    context: int = 0


class StepBudget:
    """Of a scheduler, `rows` a step with prompt tokens; `times` and `target_ms` as in SchedulerConfig, None: rows alone count."""

    def __init__(self, policy: Policy, rows: int, times: StepTimes | None, target_ms: float | None) -> None:
        self._policy, self._rows = policy, rows
        self._times, self._target_ms = times, target_ms or 0.0
        self._passed = 0  # steps since the last one with tokens of the first prompt
        self._skipped = 0
        self._late_ms = 0.0  # by which steps have exceeded the target, and that has not been made up for; below 0: saved

    def prompt_tokens(self, decode_rows: int) -> int:
        """Prompt tokens beside so many decode rows."""
        return max(self._rows - decode_rows, self._rows // 4, 1)

    def idle(self) -> None:
        """There are no prompts."""
        self._passed = self._skipped = 0
        self._late_ms = 0.0

    def share(self, prompts: list[Prompt], most: int, decodes: DecodeRows) -> list[int]:
        """Tokens of each prompt in the next step, of `most` together; prompts as in `Policy.order`."""
        turn = self._passed >= OLDEST_EVERY - 1
        if self._timed(decodes):
            found = self._within_target(prompts, most, decodes, turn)
        else:
            found = shares(prompts, self._order(prompts, turn), most)
        if any(found):
            self._passed = 0 if found[0] else self._passed + 1
        return found

    def share_rest(self, prompts: list[Prompt], most: int, decodes: DecodeRows, chunks: list[Prompt]) -> list[int]:
        """Tokens more for a step that has `chunks` already, in place of what others could not use."""
        order = self._order(prompts, turn=False)
        if not self._timed(decodes):
            return shares(prompts, order, most)
        time = self._time(decodes)
        for chunk in chunks:
            time.add(*chunk)
        return shares(prompts, order, most, time, self._target(decodes))

    def _within_target(self, prompts: list[Prompt], most: int, decodes: DecodeRows, turn: bool) -> list[int]:
        fewest, target_ms = max(1, most // SMALLEST_PART), self._target(decodes)
        for first in (True, False) if turn else (False,):
            order, time = self._order(prompts, first), self._time(decodes)
            found = shares(prompts, order, most, time, target_ms - min(0.0, self._late_ms))
            if found[order[0]] >= min(prompts[order[0]].wanted, fewest):
                self._late_ms = max(-SAVED * target_ms, self._late_ms + time.ms - target_ms)
                self._skipped = 0
                return found
        return self._beyond_target(prompts, most, decodes, self._order(prompts, turn)[0])

    def _beyond_target(self, prompts: list[Prompt], most: int, decodes: DecodeRows, at: int) -> list[int]:
        """Nobody's tokens fit: none, while the target has been exceeded of late; else the prompt `at` has as many as take twice as
        long as the fewest."""
        time, least, target_ms = self._time(decodes), self._time(decodes), self._target(decodes)
        if self._late_ms > 0 and self._skipped < MOST_SKIPPED:
            self._skipped += 1
            self._late_ms -= target_ms - time.decode_ms
            return [0] * len(prompts)
        wanted, behind = prompts[at]
        fewest = min(wanted, max(1, most // SMALLEST_PART))
        least.add(fewest, behind)
        found = [0] * len(prompts)
        found[at] = max(fewest, min(wanted, most, time.fitting(behind, 2 * least.ms - time.decode_ms)))
        time.add(found[at], behind)
        self._late_ms += time.ms - target_ms
        self._skipped = 0
        return found

    def _timed(self, decodes: DecodeRows) -> bool:
        """Where nothing streams there is no time to keep to."""
        return bool(self._times is not None and self._target_ms and decodes.rows)

    def _target(self, decodes: DecodeRows) -> float:
        """Milliseconds that a step beside these rows may take on average."""
        return max(self._target_ms, self._time(decodes).decode_ms / (1 - PROMPTS_TIME))

    def _time(self, decodes: DecodeRows) -> StepEstimate:
        assert self._times is not None
        return StepEstimate(self._times, *decodes)

    def _order(self, prompts: list[Prompt], turn: bool) -> list[int]:
        return self._policy.order([prompt.wanted for prompt in prompts], turn)
