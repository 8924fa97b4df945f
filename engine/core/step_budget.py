"""How many prompt tokens a step computes, and of which prompts, within bounds on rows and time. The
rules and the policies are in engine/core/README.md."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.lifeline import Points, StepTimes

OLDEST_EVERY = 4  # of this many steps with prompt tokens at least one has some of the oldest prompt's
MOST_PASSED = 31  # steps in a row with prompt tokens but none of the oldest's, while time is saved for it
MIN_CHUNK_DIVISOR = 32  # a chunk below this fraction (1/32) of the budget is not worth a step
MOST_MIXED = 6656  # rows of a step with decode rows: larger ones are no faster a token, and streams wait for them
PROMPT_TIME_SHARE = 0.2  # part of the time that belongs to prompts, whatever the target
MOST_DECODED = 128  # steps with decode rows that an encode waits for at most
PROMPTS_WAIT = 2.0  # what a ms of a step that prompts fill costs: those who decode wait, and those whose prompts it delays
AVERAGED_STEPS = 20  # steps over which measured times and tokens are averaged
MOST_SLOWED = 4.0  # bound of a step's time relative to the expected one: a single pause is no trend
_FREE = ((1, 0.0),)
UNMEASURED = StepTimes(_FREE, _FREE, _FREE, 0.0, 0.0, 0.0, 1)


class Prompt(NamedTuple):
    tokens: int
    context: int


class Policy(NamedTuple):
    """How prompts share a step."""

    shortest_first: bool  # short prompts first, else by precedence
    overtaking: int  # how many later requests may be admitted before a request
    long: int  # how many prompts longer than a step's budget are computed at a time

    def order(self, prompts: list[Prompt], turn: bool) -> list[int]:
        """Indices in order of service, the oldest first on its `turn`. `prompts`: running by
        precedence, then waiting."""
        return sorted(
            range(len(prompts)), key=lambda index: (turn and index > 0, self.shortest_first and prompts[index].tokens)
        )


POLICIES = {"fair": Policy(True, overtaking=64, long=2), "arrival": Policy(False, overtaking=0, long=1 << 30)}


class DecodeRows(NamedTuple):
    rows: int = 0
    context: int = 0  # sum of lengths
    verified: int = 0  # drafts in all rows
    drafts: int = 0  # made for each sequence


class StepEstimate:
    """The time of a step while chunks are added. Prompt tokens cost the padded size, all rows whole tiles.
    A chunk reads its context once; each of its tokens attends to it."""

    def __init__(self, times: StepTimes, decodes: DecodeRows, slowed: float = 1.0) -> None:
        """`slowed`: real times relative to `times`."""
        self._times = times
        self._slowed = slowed
        self._decodes = decodes.rows + decodes.verified
        self._tokens = 0
        self._rest_ms = 0.0
        self.decode_ms = 0.0  # without chunks
        if decodes.rows:
            context_ms = times.context_ms * decodes.context
            self._rest_ms = interpolate(times.mixed, decodes.rows) + context_ms + drafting_ms(times, decodes.rows, decodes.drafts)
            alone = {**dict(times.drafts), 0: times.decodes}.get(decodes.drafts, times.decodes)
            self.decode_ms = slowed * (interpolate(alone, decodes.rows) + context_ms)

    def ms(self, tokens: int = 0, context: int = 0) -> float:
        """Milliseconds with the chunks so far and one of `tokens`."""
        times = self._times
        rows = -(-(self._decodes + self._padded(self._tokens + tokens)) // times.tile) * times.tile
        chunk_ms = context * (times.read_ms + times.attend_ms * tokens)
        return self._slowed * (self._rest_ms + interpolate(times.prefills, rows) + chunk_ms)

    def _padded(self, tokens: int) -> int:
        at = bisect_left(self._times.sizes, tokens)
        if tokens and at < len(self._times.sizes):
            return self._times.sizes[at]
        return tokens

    def add(self, tokens: int, context: int) -> None:
        self._tokens += tokens
        self._rest_ms += context * (self._times.read_ms + self._times.attend_ms * tokens)

    def fitting(self, context: int, most: int, target_ms: float) -> int:
        """Most tokens of a chunk, in whole tiles, within `target_ms`."""
        if self.ms(most, context) <= target_ms:
            return most
        ends = range(-(self._decodes + self._tokens) % self._times.tile, most, self._times.tile)
        fits = bisect_right(ends, target_ms, key=lambda tokens: self.ms(tokens, context))
        if fits:
            return ends[fits - 1]
        return 0


def shares(prompts: list[Prompt], order: list[int], most: int, time: StepEstimate, target_ms: float, whole_ms: float) -> list[int]:
    """Tokens per prompt, together at most `most`. The step takes at most `target_ms`, or `whole_ms`
    while it finishes each prompt."""
    tokens = [0] * len(prompts)
    for index in order:
        length, context = prompts[index]
        wanted = min(length, most)
        share = time.fitting(context, wanted, whole_ms)
        if share < length:
            whole_ms = target_ms
            share = time.fitting(context, wanted, target_ms)
        if share:
            tokens[index] = share
            most -= share
            time.add(share, context)
        if not most:
            break
    return tokens


def interpolate(points: Points, x: float) -> float:
    """Linear, extrapolated beyond the points; constant for a single point."""
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
    """Time of `drafts` drafts in a step with prompt tokens, beyond its rows."""
    if not (times.drafting and drafts):
        return 0.0
    return interpolate(times.drafting, sequences) * drafts / times.drafts[-1][0]


class StepBudget:
    """`target_ms`: mean time per decoded token. Without `times` only rows bound a step."""

    def __init__(
        self, policy: Policy, rows: int, times: StepTimes | None, longest_ms: float | None, target_ms: float | None
    ) -> None:
        self._policy = policy
        self._rows = rows
        self._times = UNMEASURED
        self._longest_ms = math.inf
        if times is not None and times.prefills:
            self._times = times
            self._longest_ms = longest_ms or math.inf
        self._token_ms = target_ms or 0.0
        self._tokens = 1.0  # that a decode row gives in a step, on average
        self._slowed = 1.0  # what steps take relative to the times measured at boot
        self._passed = 0  # steps since the oldest prompt had tokens in one
        self._saved_ms = 0.0  # by steps shorter than the target; below 0: owed
        self.saving = False  # time is saved for a chunk
        self._decodes = DecodeRows()  # of the step that is planned
        self._late_ms = 0.0  # of steps with decode rows, against the target
        self._decoded = 0  # such steps since an encode began

    def prompt_tokens(self, decode_rows: int) -> int:
        if decode_rows:
            rows = min(self._rows, MOST_MIXED)
        else:
            rows = self._rows
        return max(rows - decode_rows, rows // 4, 1)

    def drafts_pay(self, sequences: int, drafts: int, tokens: Sequence[float]) -> bool:
        """Whether drafts save PROMPTS_WAIT times their cost in a step full of prompt tokens.
        `tokens`: per row with 0, 1, ... drafts."""
        times = self._times
        if not times.drafts:
            return True
        token_ms = min(interpolate(points, sequences) / tokens[count] for count, points in times.drafts)
        cost_ms = drafts * sequences * prompt_token_ms(times) + drafting_ms(times, sequences, drafts)
        return (tokens[drafts] - 1) * token_ms > PROMPTS_WAIT * cost_ms

    def share(self, prompts: list[Prompt], most: int, decodes: DecodeRows) -> list[int]:
        """Tokens per prompt. If the first in order gets too few for a step, its time is saved, and
        only prompts that end in this step run."""
        self._decodes = decodes
        order = self._policy.order(prompts, self._passed >= OLDEST_EVERY - 1)
        first = order[0]
        may_take_ms = self._may_take_ms
        whole_ms = may_take_ms + self._credit_ms
        tokens = shares(prompts, order, most, self._estimate(), may_take_ms, whole_ms)
        self.saving = tokens[first] < self._enough(prompts[first], most)
        if self.saving:
            if self._passed < MOST_PASSED:
                others = order[1:]
            else:
                others = []
            tokens = shares(prompts, others, most, self._estimate(), may_take_ms, whole_ms)
            tokens = [share * (share == prompt.tokens) for share, prompt in zip(tokens, prompts, strict=True)]
        if tokens[0]:
            self._passed = 0
        elif any(tokens):
            self._passed += 1
        return tokens

    def share_rest(self, prompts: list[Prompt], most: int, chunks: list[Prompt]) -> list[int]:
        """Further tokens, left by prompts that could not use theirs."""
        may_take_ms = self._may_take_ms
        return shares(prompts, self._policy.order(prompts, False), most, self._estimate(chunks), may_take_ms, may_take_ms)

    def planned(self, chunks: list[Prompt]) -> float:
        """The expected time of the step in ms; 0 if nothing bounds it."""
        if not self._bounded:
            return 0.0
        time = self._estimate(chunks)
        step_ms = time.ms() if chunks else time.decode_ms
        self._save(self._mean_ms(time.decode_ms) - step_ms)
        return step_ms

    def record(self, expected_ms: float, milliseconds: float, *, prompts: bool) -> None:
        milliseconds = min(milliseconds, MOST_SLOWED * expected_ms)
        self._slowed *= 1 + (milliseconds / expected_ms - 1) / AVERAGED_STEPS
        self._save(expected_ms - milliseconds)
        if not prompts:
            self._save(self._mean_ms(milliseconds) - self._mean_ms(expected_ms))

    def idle(self) -> None:
        """Without prompts, a step of decode rows reduces what is owed."""
        self._passed = 0
        self.saving = False
        if self._token_ms:
            self._save(PROMPT_TIME_SHARE * self._target_ms)

    def decoded(self, milliseconds: float, tokens: float) -> None:
        """The step ended `milliseconds` after the previous one, with `tokens` per decode row."""
        self._tokens += (tokens - self._tokens) / AVERAGED_STEPS
        if self._token_ms:
            self._decoded += 1
            self._late_ms = max(-self._target_ms, self._late_ms + milliseconds - self._target_ms)

    @property
    def holds_encodes(self) -> bool:
        """Steps must make up an encoder's delay before the next encode."""
        return self._late_ms > 0 and self._decoded < MOST_DECODED

    def encodes(self) -> None:
        self._decoded = 0

    def forget_lateness(self) -> None:
        self._late_ms = 0.0

    @property
    def _target_ms(self) -> float:
        """Mean ms of steps that meet the target, at most the longest step's."""
        return min(self._longest_ms, self._token_ms * self._tokens or math.inf)

    @property
    def _credit_ms(self) -> float:
        if self._token_ms:
            return min(self._target_ms, self._longest_ms - self._target_ms)
        return 0.0

    @property
    def _bounded(self) -> bool:
        return self._decodes.rows > 0 and self._target_ms < math.inf

    def _mean_ms(self, decode_ms: float) -> float:
        return max(self._target_ms, decode_ms / (1 - PROMPT_TIME_SHARE))

    @property
    def _may_take_ms(self) -> float:
        if self._bounded:
            return self._mean_ms(self._estimate().decode_ms) + self._saved_ms
        return math.inf

    def _save(self, milliseconds: float) -> None:
        """Above the credit, time is saved only for a chunk."""
        most_ms = math.inf if self.saving else self._credit_ms
        least_ms = -math.inf if self._token_ms else 0.0
        self._saved_ms = max(least_ms, min(self._saved_ms + milliseconds, most_ms))

    def _enough(self, prompt: Prompt, most: int) -> int:
        """Tokens worth a step: those that take twice the time of the fewest."""
        wanted = min(prompt.tokens, most)
        fewest = min(wanted, max(1, most // MIN_CHUNK_DIVISOR))
        time = self._estimate()
        return max(fewest, time.fitting(prompt.context, wanted, 2 * time.ms(fewest, prompt.context) - time.decode_ms))

    def _estimate(self, chunks: Iterable[Prompt] = ()) -> StepEstimate:
        time = StepEstimate(self._times, self._decodes, self._slowed)
        for chunk in chunks:
            time.add(*chunk)
        return time
