"""Grammars of random worlds: the real `Masks` over matchers whose mask says whose it is and behind which tokens; ranks that look.

A grammar's text is a number. Where it fails, where it is complete, and which of its masks are slow depends on that number and the
tokens consumed so far, and on nothing else, so that what each request must give is known beforehand.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from engine.core import results
from engine.core.loop import Intake
from engine.core.masks import SLOW_S, Masks
from engine.core.scheduler import Scheduler
from engine.errors import GenerationFailed
from engine.plan import ResultRow, StepPlan, StepResult
from engine.protocol import GenerateRequest
from tests.support.engine.draws import chance
from tests.support.engine.kvmachine import identity
from tests.support.engine.masked_ranks import MaskedRanks
from tests.support.engine.world_thoughts import VOCABULARY, forced_token

FAILED = "the grammar fails here in this world"


class Consumed(NamedTuple):
    """Tokens since a grammar began: how many, and their identity."""

    count: int = 0
    prefix: int = 0

    def then(self, token: int) -> "Consumed":
        return Consumed(self.count + 1, identity(self.prefix, token))


@dataclass(frozen=True)
class Grammars:
    """In place of `engine.matcher.Vocabulary`. `failing`, `complete`, `slow`: chances of each, behind any tokens."""

    seed: int
    failing: float
    complete: float
    slow: float
    size: int = VOCABULARY

    def fails(self, grammar: int, consumed: Consumed) -> bool:
        """No reply gets further."""
        return chance(self.failing, self.seed, grammar, *consumed, 3)

    def ends(self, grammar: int, consumed: Consumed) -> bool:
        """The grammar is complete, and has not failed."""
        return consumed.count > 0 and not self.fails(grammar, consumed) and chance(self.complete, self.seed, grammar, *consumed, 4)

    def matcher(self, text: str) -> "WorldMatcher":
        """Compiled. GenerationFailed: it cannot be."""
        matcher = WorldMatcher(self, int(text))
        matcher._fail_if(refusing=True)
        return matcher

    def masks(self, matchers: Sequence["WorldMatcher"], drafts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """int32 [n, 4] of each, as the real one's."""
        for matcher in matchers:
            matcher.mask_s = 2 * SLOW_S if chance(self.slow, self.seed, matcher.grammar, *matcher.consumed, 5) else 0.0
        return [np.stack(matcher.ahead(drafted)) for matcher, drafted in zip(matchers, drafts, strict=True)]


def mask_of(grammar: int, consumed: Consumed) -> np.ndarray:
    """int32 [4]: no two replies have the same, nor one reply at two tokens."""
    count, prefix = consumed
    return np.array([grammar + 1, count, prefix & 0x7FFFFFFF, prefix >> 31 & 0x7FFFFFFF], np.int32)


@dataclass
class WorldMatcher:
    """In place of `engine.matcher.Matcher`; of two that fail one refuses what it consumes, and one can make no mask."""

    grammars: Grammars
    grammar: int
    consumed: Consumed = field(default_factory=Consumed)
    mask_s: float = 0.0
    frees: bool = False

    @property
    def complete(self) -> bool:
        return self.grammars.ends(self.grammar, self.consumed)

    def fresh(self, *, frees: bool = False) -> "WorldMatcher":
        assert not self.consumed.count
        return WorldMatcher(self.grammars, self.grammar, frees=frees)

    def ahead(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """The masks of the next token, and behind each draft, up to where it fails, or now and then there is no time."""
        grammars, consumed = self.grammars, self.consumed
        masks = [mask_of(self.grammar, consumed)]
        for token in drafts:
            consumed = consumed.then(token)
            if grammars.fails(self.grammar, consumed) or chance(0.1, self.grammar, *consumed, 8):
                break
            if (masks[-1] == -1).all() or (self.frees and grammars.ends(self.grammar, consumed)):
                masks.append(np.full_like(masks[0], -1))
            else:
                masks.append(mask_of(self.grammar, consumed))
        return masks

    def consume(self, token: int) -> None:
        self.consumed = self.consumed.then(token)
        self._fail_if(refusing=True)

    def mask(self) -> np.ndarray:
        ((bits,),) = self.grammars.masks([self], [()])
        self.check(bits)
        return bits

    def check(self, bits: np.ndarray) -> None:
        assert bits.tolist() == mask_of(self.grammar, self.consumed).tolist()
        self._fail_if(refusing=False)

    def _fail_if(self, *, refusing: bool) -> None:
        if self.grammars.fails(self.grammar, self.consumed) and chance(0.5, self.grammar, *self.consumed) == refusing:
            raise GenerationFailed(FAILED)


class Threads(Executor):
    """In place of a pool of threads: what is submitted is done when `work` comes to it, in any order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        future = Future()
        self._waiting.append((future, lambda: work(*args, **options)))
        return future

    def work(self) -> int:
        """Do some of it, each with a chance of one half; how much was done."""
        done = [each for each in self._waiting if self._rng.random() < 0.5]
        self._waiting = [each for each in self._waiting if each not in done]
        for future, work in done:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except GenerationFailed as error:
                future.set_exception(error)
        return len(done)


class WorldRanks(MaskedRanks):
    """Looks at the mask of every row that gives a token, by the machine's own position of it.

    `wanted(request, position)` is what it must be, None: none. A row whose result will count has it; any other has it, or none.
    `seen` counts masks: all, those that came behind their plans, and those of rows whose result was dropped; and masks that end a
    thought.
    """

    wanted: Callable[[int, int], np.ndarray | None]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: Counter[str] = Counter()
        self._admitted: deque[dict[int, tuple[Any, int]]] = deque()  # of each plan: by slot, its sequence and admission number

    def submit_masks(self, masks: bytes) -> None:
        """As the executor's."""
        super().submit_masks(masks)
        late = any(plan.step == self._masks[-1].step for plan in self.queue)
        self.seen["late_masks"] += late * len(self._masks[-1].slots)

    def submit_of(self, scheduler: Scheduler, plan: StepPlan) -> None:
        """Queue a plan that the scheduler has just made."""
        self._admitted.append({sequence.slot: (sequence, sequence.number) for sequence in scheduler.requests.running})
        self.submit(plan)

    def result(self) -> StepResult:
        """Run the oldest plan."""
        found = super().result()
        self._admitted.popleft()
        return found

    def _sample(self, slot: int, position: int, drafts: list[int]) -> ResultRow:
        row = super()._sample(slot, position, drafts)
        sequence, number = self._admitted[0][slot]
        for count in range(max(1, len(row.tokens))):
            if count and (sequence.number != number or self._cut(sequence, row.tokens[:count])):
                break
            self._check(sequence, slot, position + count, dropped=sequence.number != number)
            self.seen["draft_masks"] += count > 0 and self.mask(slot, position + count) is not None
        return row

    def _cut(self, sequence: Any, tokens: tuple[int, ...]) -> bool:
        """Whether what comes behind these tokens is dropped."""
        self.seen["cut_rows"] += tokens[-1] in sequence.cut_ids
        return tokens[-1] in sequence.cut_ids or results._cut(sequence, tokens)[1] is not None

    def _check(self, sequence: Any, slot: int, position: int, *, dropped: bool) -> None:
        """The token there has its own mask, or none."""
        wanted, mask = self.wanted(sequence.id, position), self.mask(slot, position)
        if mask is None:
            assert wanted is None or dropped, f"{sequence} has no mask of the token at {position}"
        else:
            assert wanted is not None, f"{sequence} has a mask of the token at {position}, which is free"
            assert wanted.tolist() == mask.tolist(), f"{sequence} has another mask of the token at {position} than its own"
        masked, ends = mask is not None, forced_token(mask) is not None
        self.seen.update(masks=masked, dropped_masks=masked and dropped, forced_ends=ends, dropped_ends=ends and dropped)

    def _token(self, slot: int, prefix: int, position: int) -> int:
        forced = forced_token(self.mask(slot, position))
        return super()._token(slot, prefix, position) if forced is None else forced


@dataclass
class Host:
    """What the core's loop does with masks."""

    scheduler: Scheduler
    ranks: WorldRanks
    grammars: Grammars
    rng: random.Random
    masks: Masks = field(init=False)

    def __post_init__(self) -> None:
        self.compiler, self.slow = Threads(self.rng), Threads(self.rng)
        self.masks = Masks(self.scheduler.requests, self.grammars, self.scheduler.config.widest)  # type: ignore[arg-type]
        self.masks._compiler._threads, self.masks._slow = self.compiler, self.slow  # type: ignore[assignment]
        self.masks._compiler._most = 2  # whatever the machine has

    def add(self, request: GenerateRequest) -> None:
        """A request comes."""
        Intake(self.scheduler.requests, self.masks).add(request)

    def work(self) -> bool:
        """Threads go on; whether there is anything new."""
        compiled, made = self.compiler.work(), self.slow.work()
        self.ranks.seen.update(compiled=compiled, slow_masks=made)
        return bool(compiled or made)

    def before_plans(self) -> None:
        """Threads may have made something that plans wait for."""
        if self.masks.making:
            self._advance()

    def planned(self, plan: StepPlan) -> None:
        """A plan was made."""
        if plan.masked:
            self.masks.planned(plan)
            self._send()
        self.ranks.submit_of(self.scheduler, plan)

    def committed(self) -> None:
        """A result was."""
        self._advance()
        waiting = [state for state in self.masks._states if state.ending and "mask" in state.sequence.waits]
        assert not waiting, f"{waiting} wait for the end of a thought"

    def close(self) -> None:
        """All requests have ended, and nothing of them is kept."""
        self.masks.advance()
        assert not self.masks._states
        assert not self.masks._planned

    def _advance(self) -> None:
        self.masks.advance()
        self._send()

    def _send(self) -> None:
        for masks in self.masks.due():
            self.ranks.submit_masks(masks)
