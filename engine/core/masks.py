"""Token masks of requests with a grammar or a thinking budget.

    step n's tokens committed --> consumed --> masks of step n + 1, whose forward runs meanwhile --> sent, all of a step at once

A row has a mask for its next token and one after each draft token. A missing mask (the grammar
forbids the draft, or time is up) ends the row. engine/README.md has the exceptions.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from engine.core.requests import Requests
from engine.core.sequence import Sequence
from engine.errors import GenerationFailed
from engine.matcher import Matcher, Vocabulary, compile_stack, threads
from engine.plan import DEPTH, StepPlan
from engine.protocol import ThoughtBudget
from engine.step_masks import allows, encode_masks, mask_words, only

T = TypeVar("T")
Compiled = Future[tuple[Matcher, np.ndarray]]
SLOW_S = 0.002  # CPU time of a mask above which others do not wait for it: half a forward of 31B on four H200
SLOW_TOKENS = 16  # tokens for which a grammar counts as slow after a slow mask
GRAMMARS = 64  # compiled grammars that are kept for requests to come


class ThoughtLimit:
    r"""The thinking budget of a reply. `read` takes every committed token, in order.

        <|channel> thought \n  So  the  sum  is  <channel|>
                   label         1   2    3    4   the token that must come with a budget of 4
    """

    def __init__(self, budget: ThoughtBudget, length: int) -> None:
        self._budget = budget
        self.end = budget.end
        self._ends = {budget.end, budget.begin_call}
        self._left = budget.tokens
        self._label = budget.open_label  # tokens of the label that are still to come; None: no thought is open
        self._length = length

    @property
    def ends_at(self) -> int | None:
        """Latest index of the token that ends the open thought, if one is open."""
        if self._label is None:
            return None
        return self._length + self._label + self._left

    @property
    def must_end(self) -> bool:
        return self.ends_at == self._length

    def read(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._length += 1
            if self._label is None:
                self._label = self._budget.label if token == self._budget.begin else None
            elif token in self._ends:
                self._label = None
            elif self._label:
                self._label -= 1
            else:
                self._left = max(0, self._left - 1)


@dataclass(eq=False)
class MaskState:
    """A request's masks; `_tell` reports them to its sequence.

    masked    its tokens need masks
    compiled  the matcher at the grammar's start, shared with other requests, and its first mask; None until a thread begins
    ending    masked only because the thought may have to end
    matcher   of the grammar in force, or None
    read      tokens read so far, prompt included
    masks     int32 [n, words] for the tokens from index `length` on
    """

    sequence: Sequence
    trigger: int | None
    limit: ThoughtLimit | None
    read: int
    compiled: Compiled | None = None
    masked: bool = False
    ending: bool = False
    matcher: Matcher | None = None
    masks: np.ndarray | None = None
    length: int = 0
    slow: int = 0  # tokens for which its masks still count as slow
    making: "Future[np.ndarray] | None" = None  # the slow mask that a thread makes

    @property
    def grammar(self) -> str:
        grammar = self.sequence.params.grammar
        if grammar is None:
            return ""
        return grammar.text

    @property
    def needs_grammar(self) -> bool:
        return self.compiled is None and self.sequence.params.grammar is not None

    @property
    def constrained(self) -> bool:
        return self.masked and not self.ending

    @property
    def late(self) -> bool:
        """Its rows are planned before their masks exist."""
        return self.ending or not self.slow

    def constrain(self, length: int) -> None:
        """If a row in flight gives the token at index `length`, all rows in flight are recomputed."""
        self.masked = True
        self._tell(waits=not self.ending, first=length)

    def unconstrain(self) -> None:
        self.masked = False
        self._tell(waits=False)

    def _tell(self, *, waits: bool, first: int | None = None) -> None:
        """No drafts while a thought may have to end, or masks are slow."""
        may_draft = not (self.masked and (self.ending or self.slow > 0))
        self.sequence.set_masks(masked=self.masked, waits=waits, may_draft=may_draft, first=first)

    def consume(self, tokens: "array[int]") -> "array[int]":
        """Feed the grammar; returns the free tokens after its end."""
        matcher = present(self.matcher)
        for count, token in enumerate(tokens, 1):
            matcher.consume(token)
            if matcher.frees and matcher.complete:
                return tokens[count:]
        return tokens[:0]

    def update_wait(self) -> None:
        """Unless masks are late, the next row waits for a mask that no row in flight uses."""
        sequence = self.sequence
        made = sequence.planned < self.length == len(sequence.tokens)
        self._tell(waits=not (self.late or made))


class MaskedRow(NamedTuple):
    """A planned row. `number`: its admission; `most`: upper bound of its first token's index."""

    state: MaskState
    number: int
    width: int
    most: int

    @property
    def length(self) -> int:
        return self.most - self.state.sequence.drafts.rejected

    @property
    def unmasked(self) -> bool:
        """The row is stale, the grammar is complete, or the thought need not end yet."""
        state = self.state
        sequence = self.state.sequence
        if sequence.number != self.number or not sequence.masked:
            return True
        return state.ending and self.length < present(present(state.limit).ends_at)

    @property
    def ready(self) -> bool:
        return self.unmasked or self.length == len(self.state.sequence.tokens) == self.state.length

    @property
    def masks(self) -> np.ndarray:
        """int32 [width, words]; a missing last mask is zeros."""
        masks = present(self.state.masks)[: self.width]
        if len(masks) == self.width:
            return masks
        return np.concatenate([masks, np.zeros_like(masks[:1])])


def present(value: T | None) -> T:
    assert value is not None
    return value


class GrammarCompiler:
    """Compiles grammars in threads, each once for all requests; keeps the last GRAMMARS used.

    Clients take turns: the client whose last compilation began longest ago is next.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._most = threads(4)  # compilations at a time
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="grammar")
        self._running: list[Compiled] = []
        self._grammars: OrderedDict[str, Compiled] = OrderedDict()  # by text, the last one used at the end
        self._turns: dict[str, int] = {}  # the number of the last compilation of each client that has open requests
        self._begun = 0

    def begin(self, states: Iterable[MaskState]) -> None:
        """Give requests known grammars, and free threads the next ones. `states`: all open
        requests."""
        waiting = [state for state in states if state.needs_grammar and not self._find(state)]
        self._running = [compiled for compiled in self._running if not compiled.done()]
        while waiting and len(self._running) < self._most:
            first = min(waiting, key=self._place)
            self._begun += 1
            self._turns[first.sequence.client] = self._begun
            self._compile(first.grammar)
            waiting = [state for state in waiting if not self._find(state)]

    def keep_turns(self, states: Iterable[MaskState]) -> None:
        clients = {state.sequence.client for state in states}
        self._turns = {client: turn for client, turn in self._turns.items() if client in clients}

    def forget(self, compiled: Compiled | None) -> None:
        """Later requests compile it anew, since matchers share its compiled state."""
        self._grammars = OrderedDict(item for item in self._grammars.items() if item[1] is not compiled)

    def _place(self, state: MaskState) -> tuple[int, tuple[int, int]]:
        return self._turns.get(state.sequence.client, 0), state.sequence.precedence

    def _find(self, state: MaskState) -> bool:
        state.compiled = self._grammars.get(state.grammar)
        if state.compiled is None:
            return False
        self._grammars.move_to_end(state.grammar)
        return True

    def _compile(self, grammar: str) -> None:
        if len(self._grammars) == GRAMMARS:
            self._grammars.popitem(last=False)
        with compile_stack():  # the executor starts a thread here while it has fewer than it may
            self._grammars[grammar] = self._threads.submit(self._compiled, grammar)
        self._running.append(self._grammars[grammar])

    def _compiled(self, grammar: str) -> tuple[Matcher, np.ndarray]:
        """In a thread: a matcher at the grammar's start, and its mask. GenerationFailed if
        impossible."""
        matcher = present(self._vocabulary).matcher(grammar)
        return matcher, matcher.mask()


class Masks:
    """`vocabulary` None: grammars are refused. `widest`: as in EngineConfig. Threads make slow
    masks."""

    def __init__(self, requests: Requests, vocabulary: Vocabulary | None, widest: int) -> None:
        self._requests = requests
        self._widest = widest
        self._vocabulary = vocabulary
        self._size = vocabulary.size if vocabulary else 0
        self._states: list[MaskState] = []
        self._planned: deque[tuple[int, list[MaskedRow]]] = deque()  # steps whose masks have not gone out
        self._compiler = GrammarCompiler(vocabulary)
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="slow-mask")

    @property
    def making(self) -> bool:
        """Whether a thread works on a grammar or mask; then keep calling `advance`."""
        return any(state.constrained and (state.matcher is None or state.making is not None) for state in self._states)

    @property
    def available(self) -> bool:
        return self._vocabulary is not None

    def add(self, sequence: Sequence) -> None:
        grammar = sequence.params.grammar
        thought = sequence.params.thought
        if grammar is None and thought is None:
            return
        length = len(sequence.tokens)
        limit = None if thought is None else ThoughtLimit(thought, length)
        state = MaskState(sequence, None if grammar is None else grammar.trigger, limit, length)
        self._states.append(state)
        self._compiler.begin(self._states)
        if grammar is not None and grammar.trigger is None:
            state.constrain(length)
        else:
            self._end_thought_in_time(state)  # the prompt may leave a thought open

    def advance(self) -> None:
        if ended := [state for state in self._states if state.sequence.ended]:
            self._states = [state for state in self._states if not state.sequence.ended]
            self._compiler.keep_turns(self._states)
            for state in ended:
                if state.making is not None:
                    state.making.cancel()  # if no thread has begun with it
        self._compiler.begin(self._states)
        states = [state for state in self._states if self._read_tokens(state)]
        if states:
            self._make_masks(states)

    def planned(self, plan: StepPlan) -> None:
        """Register a masked plan; `due` gives its masks."""
        widths = dict.fromkeys(plan.result_slots, 1) | {slot: width for slot, width, _ in plan.rows}
        rows = []
        for state in self._states:
            sequence = state.sequence
            if sequence.masked and (width := widths.get(sequence.slot)):
                rows.append(MaskedRow(state, sequence.number, width, sequence.planned - width + 1 + sequence.drafts.rejected))
                state.update_wait()
        assert rows, plan
        self._planned.append((plan.step, rows))

    def due(self) -> Iterator[bytes]:
        """The masks of planned steps, in order, up to the first that lacks one."""
        while self._planned and all(row.ready for row in self._planned[0][1]):
            step, rows = self._planned.popleft()
            yield self._encoded(step, {row.state.sequence.slot: row.masks for row in rows if not row.unmasked})

    def discard(self) -> Iterator[bytes]:
        """Empty records, so that ranks can finish the planned steps."""
        while self._planned:
            yield self._encoded(self._planned.popleft()[0], {})

    def _encoded(self, step: int, masks: Mapping[int, np.ndarray]) -> bytes:
        return encode_masks(step, masks, mask_words(self._size))

    def _read_tokens(self, state: MaskState) -> bool:
        """Returns whether the sequence needs a mask now."""
        making = state.making
        sequence = state.sequence
        if making is not None and not making.done():
            return False
        try:
            if making is not None:
                state.making = None
                self._take_masks(state, making.result()[None])
            tokens = sequence.tokens[state.read :]
            state.read = len(sequence.tokens)
            if state.limit is not None:
                state.limit.read(tokens)
            if not state.constrained:
                self._read_free_tokens(state, tokens)
                return False
            if state.matcher is None:
                self._start_grammar(state)
                return False
            tokens = state.consume(tokens)
        except GenerationFailed as error:
            self._fail(state, error)
            return False
        if state.matcher.frees and state.matcher.complete:
            state.matcher = None
            state.unconstrain()
            self._read_free_tokens(state, tokens)
            return False
        if state.length == len(sequence.tokens):
            state.update_wait()  # its row in flight may have gone with a preemption
            return False
        if state.slow:
            state.making = self._slow.submit(state.matcher.mask)
        return not state.slow

    def _read_free_tokens(self, state: MaskState, tokens: "array[int]") -> None:
        """Outside a grammar: the trigger, as the last token, starts it with the next `advance`."""
        if state.trigger in tokens:
            assert tokens[-1] == state.trigger, (tokens, state.trigger)
            state.ending = False
            state.constrain(len(state.sequence.tokens))
        else:
            self._end_thought_in_time(state)

    def _end_thought_in_time(self, state: MaskState) -> None:
        """Outside a grammar: mask the rows if the thought may have to end before the next commit."""
        if (limit := state.limit) is None:
            return
        sequence = state.sequence
        end = limit.ends_at
        ending = state.ending
        state.ending = end is not None and end < len(sequence.tokens) + DEPTH * self._widest
        if end is not None and state.ending and not ending:
            state.constrain(end)
        elif ending and not state.ending:
            state.unconstrain()
        if limit.must_end:
            self._set_masks(state, only(limit.end, self._size)[None])

    def _start_grammar(self, state: MaskState) -> None:
        if state.compiled is not None and state.compiled.done():
            matcher, bits = state.compiled.result()
            state.matcher = matcher.fresh(frees=state.trigger is not None)
            self._set_masks(state, bits[None])

    def _fail(self, state: MaskState, error: GenerationFailed) -> None:
        self._compiler.forget(state.compiled)
        self._requests.fail(state.sequence, str(error))

    def _make_masks(self, states: list[MaskState]) -> None:
        matchers = [present(state.matcher) for state in states]
        drafts = [state.sequence.drafts.tokens for state in states]
        for state, matcher, masks in zip(states, matchers, present(self._vocabulary).masks(matchers, drafts), strict=True):
            try:
                matcher.check(masks[0])
            except GenerationFailed as error:
                self._fail(state, error)
            else:
                self._take_masks(state, masks)

    def _take_masks(self, state: MaskState, masks: np.ndarray) -> None:
        if present(state.matcher).mask_s > SLOW_S:
            state.slow = SLOW_TOKENS
        else:
            state.slow = max(0, state.slow - 1)
        self._set_masks(state, masks)

    def _set_masks(self, state: MaskState, masks: np.ndarray) -> None:
        """`masks`: int32 [n, words] from the next unread token on. A used-up budget allows only the
        end marker."""
        if state.limit is not None:
            limit = copy(state.limit)
            masks = masks.copy()
            for index, bits in enumerate(masks):
                if limit.must_end and allows(bits, limit.end):
                    bits[:] = only(limit.end, self._size)
                limit.read(state.sequence.drafts.tokens[index : index + 1])
        state.masks = masks
        state.length = state.read
        state.update_wait()
