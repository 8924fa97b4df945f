"""How many prompt tokens a step computes, and of which prompts: bounded by rows and by time.

    rows    `prefill_budget` minus decode rows; a quarter is reserved for prompts
    time    a step with decode rows takes at most `longest_step_ms`; with `tpot_target_ms` such steps take that long on
            average: unused time is saved, excess is owed, and prompts get what is saved

The policies `arrival` and `fair`, and the shares, are in engine/core/README.md.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.lifeline import Points, StepTimes

OLDEST_EVERY = 4  # of this many steps with prompt tokens, or parts of their time, at least one is the oldest prompt's
MOST_PASSED = 15  # steps in a row with prompt tokens but none of the oldest's, however short
MIN_CHUNK_DIVISOR = 32  # a chunk below this fraction (1/32) of the budget is not worth a step
PROMPT_TIME_SHARE = 0.2  # part of the time that belongs to prompts, whatever the target
MAX_CREDIT = 1.0  # of the target: what a prompt may borrow to be finished; and what is saved at most, but for a chunk
MOST_DECODED = 128  # steps with decode rows that an encode waits for at most
PROMPTS_WAIT = 2.0  # what a ms of a step that prompts fill costs: those who decode wait, and those whose prompts it delays
AVERAGED_STEPS = 20  # steps over which `slowed` averages
MOST_SLOWED = 4.0  # bound of a step's time relative to the expected one: a single pause is no trend


class Prompt(NamedTuple):
    tokens: int
    context: int


class Policy(NamedTuple):
    """How prompts share a step."""

    shortest_first: bool  # short prompts first, else by precedence
    overtaking: int  # how many later requests may be admitted before a request
    long: int  # how many prompts longer than a step's budget are computed at a time

    def order(self, prompts: list[Prompt], turn: bool) -> list[int]:
        """Indices in order of service; the oldest first on its `turn`. `prompts`: running by
        precedence, then waiting."""
        return sorted(
            range(len(prompts)), key=lambda index: (turn and index > 0, self.shortest_first and prompts[index].tokens)
        )


POLICIES = {"fair": Policy(True, overtaking=64, long=2), "arrival": Policy(False, overtaking=0, long=1 << 30)}


class DecodeRows(NamedTuple):
    """Decode rows of a step."""

    rows: int = 0
    context: int = 0  # sum of lengths
    verified: int = 0  # drafts in all rows
    drafts: int = 0  # made for each sequence


class StepEstimate:
    """The time of a step while prompts are added.

    Rows cost whole tiles. Each chunk reads its context once, and each of its tokens attends to it.
    """

    def __init__(self, times: StepTimes, decodes: DecodeRows, slowed: float = 1.0) -> None:
        """`slowed`: factor of real times to `times`."""
        self._times = times
        self._rows = decodes.rows + decodes.verified
        self._chunks = 0
        self._slowed = slowed
        self._rest, self.decode_ms = 0.0, 0.0
        if decodes.rows:
            context_ms = times.context_ms * decodes.context
            self._rest = interpolate(times.mixed, decodes.rows) + context_ms + drafting_ms(times, decodes.rows, decodes.drafts)
            alone = {**dict(times.drafts), 0: times.decodes}.get(decodes.drafts, times.decodes)
            self.decode_ms = slowed * (interpolate(alone, decodes.rows) + context_ms)

    @property
    def ms(self) -> float:
        """Milliseconds of the step. Without prompts use `decode_ms`."""
        return self._slowed * self._measured_ms

    @property
    def _measured_ms(self) -> float:
        tile = self._times.tile
        return self._rest + interpolate(self._times.prefills, -(-self._rows // tile) * tile)

    def add(self, tokens: int, context: int) -> None:
        """Add a chunk of `tokens` after `context` others."""
        self._rows += tokens
        self._chunks += 1
        self._rest += self._times.read_ms * context + self._times.attend_ms * context * tokens

    def fitting(self, context: int, target_ms: float) -> int:
        """The most tokens with which the step takes at most `target_ms`."""
        times, token_ms = self._times, self._times.attend_ms * context
        target_ms = target_ms / self._slowed - times.read_ms * context
        ends = tuple((ms + (rows - self._rows) * token_ms, float(rows)) for rows, ms in times.prefills)
        whole = int(interpolate(ends, target_ms - self._rest) / times.tile + 1e-9) * times.tile - self._rows
        if whole > 0 or not self._chunks:
            return max(0, whole)
        begun, left = -self._rows % times.tile, target_ms - self._measured_ms  # the rest of a started tile
        return begun if left >= begun * token_ms else max(0, int(left / token_ms)) if token_ms else 0


def shares(
    prompts: list[Prompt],
    order: list[int],
    most: int,
    time: StepEstimate | None = None,
    target_ms: float = 0.0,
    whole_ms: float = 0.0,
) -> list[int]:
    """Tokens of each prompt, at most `most`. With `time` the step takes at most `target_ms`, or
    `whole_ms` while it finishes every prompt in it."""
    tokens = [0] * len(prompts)
    for index in order:
        length, context = prompts[index]
        share = min(length, most if time is None else min(most, time.fitting(context, target_ms)))
        if time is not None and share < length <= min(most, time.fitting(context, whole_ms)):
            share = length
        if share < length:
            whole_ms = 0.0
        if share > 0:
            tokens[index] = share
            most -= share
            if time is not None:
                time.add(share, context)
    return tokens


def interpolate(points: Points, x: float) -> float:
    """Linear interpolation, extrapolated beyond the points; constant for a single point."""
    if len(points) == 1:
        return points[0][1]
    after = min(max(bisect_right([known for known, _ in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return y0 + (x - x0) * (y1 - y0) / (x1 - x0)


def prompt_token_ms(times: StepTimes) -> float:
    """Mean cost of a prompt token; 0 if not measured."""
    if len(times.prefills) < 2:
        return 0.0
    (rows, ms), *_, (more_rows, more_ms) = times.prefills
    return (more_ms - ms) / (more_rows - rows)


def drafting_ms(times: StepTimes, sequences: int, drafts: int) -> float:
    """Time of making `drafts` drafts in a step with prompt tokens, beyond its rows."""
    if not (times.drafting and drafts):
        return 0.0
    return interpolate(times.drafting, sequences) * drafts / times.drafts[-1][0]


class Expected(NamedTuple):
    """Of a step with decode rows: allowed mean time and expected time."""

    prompts: bool
    may_take_ms: float
    step_ms: float


class StepBudget:
    """`target_ms`: mean time a decoded token. Without `times` only rows bound a step."""

    def __init__(
        self, policy: Policy, rows: int, times: StepTimes | None, longest_ms: float | None, target_ms: float | None
    ) -> None:
        self._policy, self._rows = policy, rows
        self._times = times if times is not None and times.prefills else None
        self._longest_ms = longest_ms or math.inf
        self._token_ms = target_ms or 0.0
        self._tokens = 1.0  # that a decode row gives in a step, on average
        self._passed, self._passed_ms = 0, 0.0  # steps since the oldest prompt had tokens in one, and their prompts' time
        self._slowed = 1.0  # what steps take relative to the times measured at boot
        self._saved_ms = 0.0  # by steps shorter than the target; below 0: owed
        self._saving = False  # the last step had no prompt tokens, to save time for a chunk
        self._decodes = DecodeRows()  # of the step that was shared last
        self._late_ms, self._decoded = 0.0, 0  # of steps with decode rows, against the target; how many since an encode began

    def prompt_tokens(self, decode_rows: int) -> int:
        return max(self._rows - decode_rows, self._rows // 4, 1)

    @property
    def _target_ms(self) -> float:
        """Mean ms of steps that meet the target, at most the longest step's."""
        return min(self._longest_ms, self._token_ms * self._tokens or math.inf)

    @property
    def _credit_ms(self) -> float:
        """How far a step may exceed the target on savings: by the target, within the longest step."""
        return min(MAX_CREDIT * self._target_ms, self._longest_ms - self._target_ms) if self._token_ms else 0.0

    def drafts_with_prompts(self, sequences: int, tokens: Sequence[float]) -> int:
        """0 unless the saving is PROMPTS_WAIT times the cost of making and verifying them.
        `tokens`: given with 0, 1, ... drafts."""
        times = self._times
        if times is None or not times.drafts:
            return len(tokens) - 1
        token_ms = min(interpolate(points, sequences) / tokens[drafts] for drafts, points in times.drafts)
        row_ms = prompt_token_ms(times)

        def gain(drafts: int) -> float:
            cost_ms = drafts * sequences * row_ms + drafting_ms(times, sequences, drafts)
            return (tokens[drafts] - 1) * token_ms - PROMPTS_WAIT * cost_ms

        return max((drafts for drafts, _ in times.drafts), key=gain)

    def most_tokens(self, decodes: DecodeRows) -> int:
        """The most tokens of new prompts with these decode rows."""
        self._decodes = decodes
        most = self.prompt_tokens(decodes.rows + decodes.verified)
        return min(most, self._estimate().fitting(0, self._may_take_ms)) if self._has_target else most

    @property
    def holds_encodes(self) -> bool:
        """Steps must make up an encoder's delay before the next encode."""
        return self._late_ms > 0 and self._decoded < MOST_DECODED

    def encodes(self) -> None:
        self._decoded = 0

    def forget_lateness(self) -> None:
        self._late_ms = 0.0

    def decoded(self, milliseconds: float, tokens: float) -> None:
        """The step ended `milliseconds` after the previous one and gave `tokens` a decode row."""
        self._tokens += (tokens - self._tokens) / AVERAGED_STEPS
        if self._token_ms:
            self._decoded += 1
            self._late_ms = max(-self._target_ms, self._late_ms + milliseconds - self._target_ms)

    def idle(self) -> None:
        """Without prompts, a step of decode rows reduces what is owed."""
        self._passed = 0
        self._passed_ms = 0.0
        self._saving = False
        if self._token_ms:
            self._save(PROMPT_TIME_SHARE * self._target_ms)

    def share(self, prompts: list[Prompt], most: int, decodes: DecodeRows) -> list[int]:
        """Prompts as in `Policy.order`. `share_rest` may add to it, and `planned` gets the outcome."""
        self._decodes = decodes
        order = self._policy.order(prompts, self._oldest_first(prompts[0], most))
        if self._has_target:
            tokens = self._within_target(prompts, order, most)
        else:
            tokens = shares(prompts, order, most)
        if tokens[0]:
            self._passed, self._passed_ms = 0, 0.0
        elif any(tokens):
            self._passed += 1
        return tokens

    def share_rest(self, prompts: list[Prompt], most: int, chunks: list[Prompt]) -> list[int]:
        """Further tokens, left by prompts that could not use theirs."""
        order = self._policy.order(prompts, False)
        if not self._has_target:
            return shares(prompts, order, most)
        return shares(prompts, order, most, self._estimate(chunks), self._may_take_ms)

    def planned(self, chunks: list[Prompt]) -> Expected | None:
        if not self._has_target:
            return None
        time = self._estimate(chunks)
        expected = Expected(bool(chunks), self._mean_ms(time.decode_ms), time.ms if chunks else time.decode_ms)
        self._save(expected.may_take_ms - expected.step_ms)
        if self._passed:
            self._passed_ms += expected.step_ms - time.decode_ms
        return expected

    def record(self, expected: Expected, milliseconds: float) -> None:
        milliseconds = min(milliseconds, MOST_SLOWED * expected.step_ms)
        self._slowed *= 1 + (milliseconds / expected.step_ms - 1) / AVERAGED_STEPS
        may_take_ms = expected.may_take_ms if expected.prompts else self._mean_ms(milliseconds)
        self._save(may_take_ms - milliseconds - (expected.may_take_ms - expected.step_ms))

    def _save(self, milliseconds: float) -> None:
        """Add to the savings. Above the credit they grow only for a chunk."""
        saved_ms = self._saved_ms + milliseconds
        if not self._saving:
            saved_ms = min(saved_ms, max(self._saved_ms, self._credit_ms))
        self._saved_ms = saved_ms if self._token_ms else max(0.0, saved_ms)

    def _oldest_first(self, oldest: Prompt, most: int) -> bool:
        """The oldest comes first once others have had three times the time of its next chunk."""
        if self._passed < OLDEST_EVERY - 1:
            return False
        if self._passed >= MOST_PASSED or not self._has_target:
            return True
        time = self._estimate([Prompt(self._enough(oldest, most), oldest.context)])
        return self._passed_ms >= (OLDEST_EVERY - 1) * (time.ms - time.decode_ms)

    def _within_target(self, prompts: list[Prompt], order: list[int], most: int) -> list[int]:
        """Serve the first prompt if its share is worth a step; otherwise save time for it, and
        serve prompts that end in this step."""
        first, may_take_ms = order[0], self._may_take_ms
        whole_ms = may_take_ms + self._credit_ms
        tokens = shares(prompts, order, most, self._estimate(), may_take_ms, whole_ms)
        self._saving = tokens[first] < self._enough(prompts[first], most)
        if not self._saving:
            return tokens
        if self._passed < MOST_PASSED:
            tokens = shares(prompts, order[1:], most, self._estimate(), may_take_ms, whole_ms)
            return [share if share == prompt.tokens else 0 for share, prompt in zip(tokens, prompts, strict=True)]
        return [0] * len(prompts)

    def _enough(self, prompt: Prompt, most: int) -> int:
        """Tokens worth a step: those that take twice the time of the fewest."""
        fewest = min(prompt.tokens, max(1, most // MIN_CHUNK_DIVISOR))
        time = self._estimate()
        least = self._estimate([Prompt(fewest, prompt.context)])
        return max(fewest, min(prompt.tokens, most, time.fitting(prompt.context, 2 * least.ms - time.decode_ms)))

    @property
    def _has_target(self) -> bool:
        """Without decode rows no target bounds the step."""
        return self._times is not None and self._decodes.rows > 0 and self._target_ms < math.inf

    def _mean_ms(self, decode_ms: float) -> float:
        return max(self._target_ms, decode_ms / (1 - PROMPT_TIME_SHARE))

    @property
    def _may_take_ms(self) -> float:
        return self._mean_ms(self._estimate().decode_ms) + self._saved_ms

    def _estimate(self, chunks: Iterable[Prompt] = ()) -> StepEstimate:
        assert self._times is not None
        time = StepEstimate(self._times, self._decodes, self._slowed)
        for chunk in chunks:
            time.add(*chunk)
        return time
