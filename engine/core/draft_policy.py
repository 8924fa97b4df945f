"""Chooses the draft length with the fewest milliseconds per token, from measured times and
acceptance. The rules are in engine/core/README.md."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from statistics import median_low

import numpy as np

from engine.core.step_budget import interpolate
from engine.lifeline import Points
from engine.protocol import DraftPosition

REVIEW_INTERVAL, MEASURED = 8, 4  # steps between two reviews of the number in force, and those that measure a new one
ACCEPTANCE_WINDOW, IDLE_WINDOW = 256, 1024  # steps over which acceptance is averaged, and those without drafts
IDLE_ROWS = 64.0  # as how many rows what is known counts at most once there are no drafts
TIME_WINDOW, PROMPT_WINDOW = 16, 64  # steps over which times are averaged, and the share of prompts
PRIOR_ACCEPTANCE, PRIOR_ROWS = 0.75, 2.0  # chance of a draft after a right one, and as how many rows it counts
SWITCH_THRESHOLD = 0.2 * 32  # in steps: what the number in force may lose before it gives way
MIN_GAIN = 0.01  # what another number must gain to count
DISCOUNT = 0.9  # of what drafts promise before any was verified


class RowTimes:
    """Step times at one padded number of rows. Lists are by option."""

    def __init__(self, expected: list[float], chosen: int) -> None:
        self.expected = expected  # ms of a step, by the times at boot
        self.ms = np.zeros((2, len(expected)))  # of steps without and with prompt tokens, their own time excluded; 0: not measured
        self.drafting = 1.0  # share of rows that may draft
        self.prompts = 0.0  # share of steps with prompt tokens
        self.prompt_ms = 0.0  # of prompt tokens, a step on average
        self.steps = 0
        self.begin(chosen)

    def begin(self, chosen: int) -> None:
        self.chosen = chosen
        self.samples: tuple[list[float], list[float]] = ([], [])  # ms, as in `ms`, of the chosen option
        self.loss = 0.0  # accumulated, in steps

    def add(self, ms: float, prompt_ms: float) -> None:
        kind = int(prompt_ms > 0)
        alone = max(ms - prompt_ms, 0.1 * ms)
        samples = self.samples[kind]
        samples.append(alone)
        known = self.ms[kind]
        if len(samples) <= REVIEW_INTERVAL:
            known[self.chosen] = median_low(samples)
        else:
            samples.pop()
            change = (min(alone, 1.5 * known[self.chosen]) - known[self.chosen]) / TIME_WINDOW  # bounds a pause
            known[known > 0] = np.maximum(known + change, 0.1 * known)[known > 0]

    @property
    def measured(self) -> bool:
        return sum(map(len, self.samples)) >= MEASURED

    def times(self) -> np.ndarray:
        """Mean ms per option. An unmeasured option keeps its difference at boot to the chosen one."""
        alone, mixed = self.ms
        shift = np.array(self.expected) - self.expected[self.chosen]
        alone = np.where(alone > 0, alone, (alone[self.chosen] or self.expected[self.chosen]) + shift)
        usual = (mixed[self.chosen] or alone[self.chosen]) + shift
        fewer = np.arange(len(shift)) < self.chosen
        mixed = np.where(mixed > 0, mixed, np.where(fewer, np.minimum(usual, alone), usual))
        return alone + self.prompts * (mixed - alone) + self.prompt_ms


class DraftPolicy:
    """`options`: draft lengths, ascending. `sizes`: padded rows. `times`: (rows, ms) per option,
    empty if unknown."""

    def __init__(self, options: Sequence[int], sizes: Sequence[int], times: Sequence[Points], token_ms: float = 0.0) -> None:
        self._options = options
        self._sizes = sizes
        self._times = times or [((1, 1.0),)] * len(options)
        self._token_ms = token_ms
        self._by_rows: dict[int, RowTimes] = {}
        self.drafts = self._options[len(self._options) // 2]  # of the last step
        self.switches = dict.fromkeys(("better", "off", "on") if len(self._options) > 1 else (), 0)  # by cause
        most = self._options[-1] + 1
        self._verified, self._right = [0] * most, [0] * most  # rows by their drafts, and by how many of these were right
        self._read = np.zeros((2, most), int)  # of both, what the remembered ones have
        self._remembered = np.zeros((2, most))  # rows with so many or more
        self._size, self._fewer = 0, 0  # rows of the last step, and steps in a row that had fewer
        self._step = 0

    def verified(self, drafts: int, right: int) -> None:
        self._verified[drafts] += 1
        self._right[right] += 1

    @property
    def positions(self) -> list[DraftPosition]:
        return list(map(DraftPosition, range(len(self._right)), _at_least(self._verified), _at_least(self._right)))

    def choose(self, rows: int) -> tuple[int, int]:
        """(drafts, index in `sizes`). A larger size holds for REVIEW_INTERVAL steps, so that the
        length does not flip."""
        if len(self._options) > 1:
            size = bisect_left(self._sizes, rows)
            if size < self._size:
                self._fewer = self._fewer + 1
            else:
                self._fewer = 0
            if size > self._size or self._fewer > REVIEW_INTERVAL:
                self._size = size
                self._fewer = 0
            self.drafts = self._options[self._rows(self._size).chosen]
        return self.drafts, self._size

    def record(self, size: int, drafting: float, drafts: int, prompt_tokens: int, ms: float) -> None:
        self._step += 1
        if self._step % REVIEW_INTERVAL == 0:
            self._remember()
        if len(self._options) == 1:
            return
        rows = self._rows(size)
        rows.steps += 1
        rows.drafting += (drafting - rows.drafting) / TIME_WINDOW
        prompt_ms = self._token_ms * prompt_tokens
        rows.prompt_ms += (prompt_ms - rows.prompt_ms) / min(rows.steps, PROMPT_WINDOW)
        rows.prompts += (bool(prompt_tokens) - rows.prompts) / min(rows.steps, PROMPT_WINDOW)
        if drafts == self._options[rows.chosen]:
            rows.add(ms, prompt_ms if self._token_ms else 1e-9 * prompt_tokens)
        if rows.steps % REVIEW_INTERVAL == 0 and rows.measured:
            self._review(rows)

    def _rows(self, size: int) -> RowTimes:
        """Until MEASURED steps, the chosen length is the best by the times at boot."""
        rows = self._by_rows.get(size)
        if rows is None or rows.steps < MEASURED:
            count = self._sizes[size]  # the last of the times at boot is of its whole bucket
            expected = [interpolate(points, min(count, points[-1][0])) for points in self._times]
            rates = self._rates(1.0, np.array(expected))
            if not self._remembered.any():
                rates[1:] *= DISCOUNT
            best = int(rates.argmax())
            if rows is None or rows.chosen != best:
                rows = self._by_rows[size] = RowTimes(expected, best)
        return rows

    def _review(self, rows: RowTimes) -> None:
        rates = self._rates(rows.drafting, rows.times())
        best = int(rates.argmax())
        if not self._options[rows.chosen]:
            best = int((rates > rates[0] * (1 + MIN_GAIN)).argmax())  # the fewest that may be better: they cost least to learn from
        gain = rates[best] / rates[rows.chosen] - 1 - MIN_GAIN
        rows.loss = max(0.0, rows.loss + REVIEW_INTERVAL * gain)
        first = rows.steps == REVIEW_INTERVAL  # of these rows: the number was a guess
        if gain > 0 and (first or rows.loss >= SWITCH_THRESHOLD):
            self.switches["off" if not self._options[best] else "on" if not self._options[rows.chosen] else "better"] += 1
            rows.begin(best)

    def _rates(self, drafting: float, ms: np.ndarray) -> np.ndarray:
        tokens = self._tokens(drafting)
        gives: np.ndarray = np.array([tokens[drafts] for drafts in self._options])
        rates: np.ndarray = gives / ms
        return rates

    @property
    def tokens(self) -> list[float]:
        """Mean tokens of a sequence's step with 0, 1, ... drafts."""
        return self._tokens(1.0)

    def _tokens(self, drafting: float) -> list[float]:
        right = 1.0
        last = PRIOR_ACCEPTANCE
        tokens = [1.0]
        for had, were in self._remembered[:, 1:].T.tolist():
            after = (were + PRIOR_ROWS * right * last) / (had + PRIOR_ROWS)
            last = min(1.0, after / right) if right else 0.0
            right = after
            tokens.append(tokens[-1] + drafting * right)
        return tokens

    def _remember(self) -> None:
        """Add new rows and decay old ones, more slowly without drafts."""
        new = np.array((self._verified, self._right)) - self._read
        self._read += new
        window = ACCEPTANCE_WINDOW
        if not new[0, 1:].any():
            window = IDLE_WINDOW
            self._remembered *= np.minimum(1.0, IDLE_ROWS / np.maximum(self._remembered[0], 1.0))
        self._remembered *= 1 - REVIEW_INTERVAL / window
        self._remembered += new[:, ::-1].cumsum(1)[:, ::-1]


def _at_least(counts: Sequence[int]) -> list[int]:
    return list(accumulate(reversed(counts[1:])))[::-1]
