"""How many drafts a step has: the number that takes the fewest seconds a token, by what steps took and how many drafts were right.

    seconds a token = ms of a step of its rows with n drafts  /  tokens that its rows give: one each, and where a sequence may
                      + ms of the prompt tokens beside them      draft the chance that its first draft is right, its first two, ...

Steps are told apart by their rows, padded as ranks pad them, and by whether they have prompt tokens, beside which drafts may cost
more; a number is in force for both kinds, since what one step drafts the next one verifies. The times that ranks measured at boot
say where to begin. What changes while a number is in force (contexts grow) changes the times of all; what tells them apart is
measured in trials of a few steps. A trial is of a number that may be better than the one in force by the most that is not known to
be wrong, and trials together may lose half a hundredth of the time. The number in force gives way when what it has lost against a
measured one comes to a fifth of so many steps: a clear loss soon, a small one late, noise never.

Which drafts were right is forgotten over some hundred steps, some thousand without drafts, and an optimistic guess takes its place:
so no number, and no drafter, is given up for good.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, starmap
from statistics import median_low

import numpy as np

from engine.core.step_budget import interpolate
from engine.lifeline import Points
from engine.protocol import DraftPosition

REVIEW_INTERVAL = 8  # steps between two reviews of the number in force
MIN_TRIAL_STEPS, MAX_TRIAL_STEPS = 8, 64  # steps of a trial: the latter while drafts, or a kind of steps, are too few
TRIAL_TIME_SHARE, INITIAL_TRIAL_STEPS = 0.005, 16  # part of the time that trials may lose; at first, in steps by number of rows
STALE_AFTER = 1024  # steps after which a measured time is measured again, if a fifth less would change anything
ACCEPTANCE_WINDOW = 256  # steps over which acceptance is averaged; STALE_AFTER without drafts
TIME_WINDOW, PROMPT_WINDOW = 16, 64  # steps over which times are averaged, and the share of prompts
MAX_PAIRS, MIN_TOKEN_DIFFERENCE = 32, 256  # pairs of steps that tell what a prompt token adds; tokens they differ in, together
MIN_STEP_SHARE = 0.05  # share of steps with, or without, prompt tokens below which these do not count
MIN_SAMPLES = 24.0  # rows that drafted at a position, in the window, below which its acceptance is a guess
PRIOR_ACCEPTANCE, PRIOR_ROWS = 0.75, 2.0  # chance of a draft behind a right one, and as how many rows it counts
SWITCH_THRESHOLD = 0.2 * 32  # in steps: what the number in force may lose before it gives way
MIN_GAIN = 0.01  # what another number must gain to count
DISCOUNT = 0.9  # part of its expected time that a number may take, and of what drafts promise that they are taken to give


@dataclass
class Option:
    """A number of drafts at a number of rows. `ms` of its steps without and with prompt tokens, but for what each of these adds, 0:
    not known; `expected` of those without, by the times at boot; `step` at which it was measured."""

    drafts: int
    ms: list[float]
    expected: float
    step: int = -STALE_AFTER


class PromptTime:
    """ms that a prompt token adds to a step that has any: the middle of what pairs of such steps tell, one behind the other, that
    differ in nothing else. A pair counts by the tokens that it differs in."""

    def __init__(self) -> None:
        self._last: tuple[object, int, float] = None, 0, 0.0
        self._pairs: deque[tuple[float, int]] = deque(maxlen=MAX_PAIRS)
        self.token_ms = 0.0

    def add(self, kind: object, tokens: int, ms: float) -> None:
        """Add a step of so many tokens that took `ms`. `kind`: equal of steps that differ in prompt tokens alone."""
        before, last_tokens, last_ms = self._last
        if kind == before and (more := tokens - last_tokens):
            self._pairs.append(((ms - last_ms) / more, abs(more)))
            pairs, middle = sorted(self._pairs), sum(weight for _, weight in self._pairs) / 2
            sums = accumulate(weight for _, weight in pairs)
            if 2 * middle >= MIN_TOKEN_DIFFERENCE:
                self.token_ms = max(0.0, next(slope for (slope, _), sum_ in zip(pairs, sums, strict=True) if sum_ >= middle))
        self._last = kind, tokens, ms


@dataclass
class Trial:
    """A trial of an option: `ms` and prompt tokens of its steps so far, by kind as there; `verified` rows had that many drafts
    before."""

    option: Option
    verified: int
    ms: tuple[list[tuple[float, int]], ...]


@dataclass
class RowStats:
    """Statistics of the steps of one number of rows.

    chosen    of the options, the one in force;    loss  what it has lost against a better one, in steps
    trial     the option that is tried now
    drafting  share of rows that may draft;        prompts    share of steps that have prompt tokens
    prompt_ms of prompt tokens, a step on average; steps      so far
    """

    options: list[Option]
    chosen: Option
    trial: Trial | None
    loss: float = 0.0
    drafting: float = 1.0
    prompts: float = 0.0
    prompt_ms: float = 0.0
    steps: int = 0

    def ms(self, option: Option) -> float:
        """Mean ms of the option's steps, at today's share of prompts. A kind that is not measured relates to the other as at the
        number in force."""
        ratio = self.chosen.ms[1] / self.chosen.ms[0] if all(self.chosen.ms) else 1.0
        alone = option.ms[0] or option.ms[1] / ratio
        return alone + self.prompts * ((option.ms[1] or alone * ratio) - alone)


class DraftPolicy:
    """Chooses each step's drafts among `options`, ascending; a single one is always chosen. `sizes`: what rows are padded to.
    `times`: (rows, ms of a step) of each option; none: they are not known."""

    def __init__(self, options: Sequence[int], sizes: Sequence[int], times: Sequence[Points]) -> None:
        self._options, self._sizes = options, sizes
        self._times = times or [((1, 1.0),)] * len(options)
        self._by_rows: dict[int, RowStats] = {}
        self.drafts = self._options[len(self._options) // 2]  # of the last step
        self.switches = dict.fromkeys(("trial", "better", "off", "on") if len(self._options) > 1 else (), 0)  # by cause
        most = self._options[-1] + 1
        self._verified, self._right = [0] * most, [0] * most  # rows by their drafts, and by how many of these were right
        self._read = np.zeros((2, most), int)  # of both, what the remembered ones have
        self._remembered = np.zeros((2, most))  # rows with so many or more
        self._size, self._fewer = 0, 0  # rows of the last step, and steps in a row that had fewer
        self._prompts = PromptTime()
        self._step = 0
        self._credit_ms = 0.0  # that trials may lose

    def verified(self, drafts: int, right: int) -> None:
        """Counts a row that had so many drafts, of which the first `right` were right."""
        self._verified[drafts] += 1
        self._right[right] += 1

    @property
    def positions(self) -> list[DraftPosition]:
        """Counts, since boot, the drafts at each position that were verified, and accepted with all before them."""
        return list(map(DraftPosition, range(len(self._right)), _at_least(self._verified), _at_least(self._right)))

    def choose(self, rows: int) -> tuple[int, int]:
        """Chooses the next step's drafts, by its decode rows; (drafts, index in `sizes` of the rows that they are chosen for). Rows
        that were more a few steps ago count as many still: the number does not change from step to step where two sizes meet."""
        if len(self._options) > 1:
            size = bisect_left(self._sizes, rows)
            self._fewer = self._fewer + 1 if size < self._size else 0
            if size > self._size or self._fewer > REVIEW_INTERVAL:
                self._size, self._fewer = size, 0
            stats = self._stats(self._size)
            self.drafts = (stats.trial.option if stats.trial else stats.chosen).drafts
        return self.drafts, self._size

    def record(self, size: int, drafting: float, drafts: int, prompt_tokens: int, ms: float) -> None:
        """Records a step with decode rows that took `ms`. `size`: as `choose` gave it; `drafting`: share of rows that may draft."""
        self._step += 1
        if len(self._options) == 1:
            self._remember() if self._step % REVIEW_INTERVAL == 0 else None
            return
        if prompt_tokens:
            known = self._prompts.token_ms
            self._prompts.add((size, drafts), prompt_tokens, ms)
            if self._prompts.token_ms and not known:
                self._by_rows.clear()  # its times have what the tokens added
        stats = self._stats(size)
        stats.drafting += (drafting - stats.drafting) / TIME_WINDOW
        stats.steps += 1
        stats.prompt_ms += (self._prompts.token_ms * prompt_tokens - stats.prompt_ms) / min(stats.steps, PROMPT_WINDOW)
        stats.prompts += (bool(prompt_tokens) - stats.prompts) / min(stats.steps, PROMPT_WINDOW)
        self._credit_ms += TRIAL_TIME_SHARE * ms
        self._note_time(stats, drafts, ms, prompt_tokens)
        if self._step % REVIEW_INTERVAL == 0:
            self._remember()
        if stats.steps % REVIEW_INTERVAL == 0:
            self._look(stats)

    def _stats(self, size: int) -> RowStats:
        """Returns the statistics of steps of so many rows. Until some are measured the number in force is the best by the times at
        boot."""
        stats = self._by_rows.get(size)
        if stats is None or not any(stats.chosen.ms):
            known = zip(self._options, self._times, strict=True)
            rows = self._sizes[size]  # the last of the times at boot is of its whole bucket
            options = [Option(count, [0.0, 0.0], interpolate(points, min(rows, points[-1][0]))) for count, points in known]
            tokens = self._tokens(1.0)
            chosen = max(options, key=lambda option: (DISCOUNT if option.drafts else 1.0) * tokens[option.drafts] / option.expected)
            if stats is None or stats.chosen.drafts != chosen.drafts:
                stats = self._by_rows[size] = RowStats(options, chosen, self._trial(chosen))
        return stats

    def _trial(self, option: Option) -> Trial:
        return Trial(option, sum(self._verified[option.drafts :]), ([], []))

    def _note_time(self, stats: RowStats, drafts: int, ms: float, prompt_tokens: int) -> None:
        chosen, trial = stats.chosen, stats.trial
        kind = bool(prompt_tokens)
        if trial is not None and drafts == trial.option.drafts:
            trial.ms[kind].append((ms, prompt_tokens))
            counts = list(map(len, trial.ms))
            few = drafts not in (0, chosen.drafts) and sum(self._verified[drafts:]) - trial.verified < MIN_SAMPLES
            if sum(counts) >= (MAX_TRIAL_STEPS if few or not _in_all(stats, [count > 1 for count in counts]) else MIN_TRIAL_STEPS):
                self._end_trial(stats, trial)
        elif drafts == chosen.drafts and chosen.ms[kind]:
            chosen.step = self._step
            change = (min(self._alone(ms, prompt_tokens), 1.5 * chosen.ms[kind]) - chosen.ms[kind]) / TIME_WINDOW  # bounds a pause
            for option in stats.options:
                option.ms[kind] = max(option.ms[kind] + change, 0.1 * option.ms[kind]) if option.ms[kind] else 0.0

    def _alone(self, ms: float, prompt_tokens: int) -> float:
        """ms of a step without what its prompt tokens added."""
        return max(ms - self._prompts.token_ms * prompt_tokens, 0.1 * ms)

    def _end_trial(self, stats: RowStats, trial: Trial) -> None:
        """The middle of its times is the option's; what it lost is taken from the credit."""
        self._remember()
        option, steps = trial.option, sum(map(len, trial.ms))
        for kind, times in enumerate(trial.ms):
            option.ms[kind] = median_low(starmap(self._alone, times)) if times else option.ms[kind]
        option.step, ms = self._step, stats.ms(option)
        if option is stats.chosen:
            self._credit_ms += INITIAL_TRIAL_STEPS * ms
        lost = 1 - self._gain(stats, option, ms)
        self._credit_ms -= max(0.0, lost) * (ms + stats.prompt_ms) * steps
        stats.trial = None

    def _look(self, stats: RowStats) -> None:
        """Give way to a better number, or begin a trial."""
        chosen = stats.chosen
        if stats.trial is not None:
            return
        if not _in_all(stats, chosen.ms):
            stats.trial = self._trial(chosen)
            return
        sure = [option for option in stats.options if self._is_sure(stats, option)]
        best = max(sure, key=lambda option: self._gain(stats, option, stats.ms(option)), default=chosen)
        stats.loss = max(0.0, stats.loss + REVIEW_INTERVAL * (self._gain(stats, best, stats.ms(best)) - 1 - MIN_GAIN))
        if stats.loss >= SWITCH_THRESHOLD:
            self.switches["off" if not best.drafts else "on" if not chosen.drafts else "better"] += 1
            stats.chosen, stats.loss = best, 0.0
            return
        self._try(stats)

    def _try(self, stats: RowStats) -> None:
        """Begin a trial, if there is credit and a number that is not sure may be the best."""
        if self._credit_ms <= 0:
            return
        gains = {option.drafts: self._gain(stats, option, self._least_ms(stats, option)) for option in stats.options}
        better = [option for option in stats.options if gains[option.drafts] > 1 + MIN_GAIN and not self._is_sure(stats, option)]
        if better:
            if not stats.chosen.drafts or not better[0].drafts:
                better = better[:1]  # the cheapest to learn from: what the first draft wins, or drafts cost, bounds all others
            stats.trial = self._trial(max(better, key=lambda option: gains[option.drafts]))
            self.switches["trial"] += 1

    def _is_sure(self, stats: RowStats, option: Option) -> bool:
        """Whether the option's time is measured, and the chance of its last draft."""
        fresh = self._step - option.step < STALE_AFTER and _in_all(stats, option.ms)
        return fresh and (not option.drafts or self._remembered[0, option.drafts] >= MIN_SAMPLES)

    def _least_ms(self, stats: RowStats, option: Option) -> float:
        """What its steps may take at least: a fifth less than long ago; with fewer drafts, in proportion; with more, as much, and
        half of what drafts have added so far; and at first, without prompt tokens, a tenth less than expected."""
        if any(option.ms):
            return stats.ms(option) * (1.0 if self._step - option.step < STALE_AFTER else 0.8)
        measured = [(other.drafts, stats.ms(other)) for other in stats.options if any(other.ms)]
        fewer = [other for other in measured if other[0] < option.drafts]
        least = [ms for _, ms in fewer]
        if len(fewer) > 1:
            (first, first_ms), (last, last_ms) = fewer[0], fewer[-1]
            least.append(last_ms + 0.5 * max(0.0, (last_ms - first_ms) / (last - first)) * (option.drafts - last))
        least += [ms * (1 + option.drafts) / (1 + drafts) for drafts, ms in measured if drafts > option.drafts]
        most = max(least)
        alone = DISCOUNT * stats.chosen.ms[0] * option.expected / stats.chosen.expected if stats.steps < STALE_AFTER else 0.0
        return most + (1 - stats.prompts) * max(0.0, alone - most)

    def _gain(self, stats: RowStats, option: Option, ms: float) -> float:
        """Tokens a second of the option, if its steps take `ms`, relative to the number in force."""
        chosen, tokens = stats.chosen, self._tokens(stats.drafting)
        return tokens[option.drafts] / tokens[chosen.drafts] * (stats.ms(chosen) + stats.prompt_ms) / (ms + stats.prompt_ms)

    @property
    def tokens(self) -> list[float]:
        """Tokens that a sequence gives on average in a step with 0, 1, ... drafts."""
        return self._tokens(1.0)

    def _tokens(self, drafting: float) -> list[float]:
        """Tokens that a row gives on average with 0, 1, ... drafts, if such a share of rows may draft."""
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
        """Take the rows since the last time, and forget some of those before: fewer where none had a draft."""
        new = np.array((self._verified, self._right)) - self._read
        self._read += new
        self._remembered *= 1 - REVIEW_INTERVAL / (ACCEPTANCE_WINDOW if new[0, 1:].any() else STALE_AFTER)
        self._remembered += new[:, ::-1].cumsum(1)[:, ::-1]


def _in_all(stats: RowStats, by_kind: Sequence[float]) -> bool:
    """Whether there is something for each kind of steps that is not rare."""
    return all(amount or share < MIN_STEP_SHARE for amount, share in zip(by_kind, (1 - stats.prompts, stats.prompts), strict=True))


def _at_least(counts: Sequence[int]) -> list[int]:
    """How many had 1 or more, 2 or more, ..., if `counts[n]` had n."""
    return list(accumulate(reversed(counts[1:])))[::-1]
