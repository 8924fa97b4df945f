"""Which tokens may come next in requests with a grammar: a matcher for each, a mask after each of its tokens.

    step n's tokens committed --> consumed --> masks of step n + 1, whose forward runs meanwhile --> sent, all of a step at once

A row is planned before its mask is made, so that it runs in every step (`late_masks`), with two exceptions: the first one waits for
its grammar, which is compiled in a thread; and since ranks sample a step when all its masks are there, a grammar whose last masks
were slow has them made in a thread of their own, and its rows planned behind them. Every masked step gets its record: a row
whose sequence has ended, was preempted or needs no mask any more is left out of it.

With a trigger tokens are free until that id comes; what is in flight behind it is dropped, and once what follows is complete
tokens are free again. A grammar that fails, or lets no token come, ends its own request.
"""

import os
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.errors import GenerationFailed
from engine.matcher import Matcher, Vocabulary
from engine.plan import StepPlan
from engine.protocol import GenerateRequest
from engine.step_masks import StepMasks, encode_masks, mask_words

SLOW_S = 0.002  # CPU time of a mask that others shall not wait for: half of a forward of 31B on four H200
SLOW_TOKENS = 16  # for which a grammar counts as slow after its last slow mask
_UNAVAILABLE = "grammars are not available: the checkpoint has no tokenizer that they can be made for"

T = TypeVar("T")


@dataclass(eq=False)
class _Reply:
    """A request with a grammar.

    compiled  a matcher at the grammar's beginning, and its mask there
    matcher   of what is being written; None: nothing is
    read      tokens of the sequence, prompt included, that were looked at
    mask      int32 [words] for the token at index `length`
    slow      tokens for which its masks are still taken for slow;   making: the slow mask that a thread makes
    """

    sequence: Sequence
    compiled: "Future[tuple[Matcher, np.ndarray]]"
    trigger: int | None
    read: int
    matcher: Matcher | None = None
    mask: np.ndarray | None = None
    length: int = 0
    slow: int = 0
    making: "Future[np.ndarray] | None" = None


@dataclass(frozen=True)
class _Row:
    """A planned row, of an admission, that gives the token at index `length`."""

    reply: _Reply
    number: int
    slot: int
    length: int

    @property
    def free(self) -> bool:
        """It needs no mask: what it gives is dropped, or the grammar is complete."""
        return self.reply.sequence.number != self.number or not self.reply.sequence.masked

    @property
    def ready(self) -> bool:
        """The mask is there, or none is needed."""
        return self.free or self.length == len(self.reply.sequence.tokens) == self.reply.length


class Masks:
    """Of the requests of one scheduler. `vocabulary` None: the checkpoint has none, and grammars are refused.

    compiler, slow  where grammars are compiled, and slow masks made; by default threads of its own
    """

    def __init__(
        self,
        scheduler: Scheduler,
        vocabulary: Vocabulary | None,
        compiler: Executor | None = None,
        slow: Executor | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._vocabulary = vocabulary
        self._replies: list[_Reply] = []
        self._planned: deque[tuple[int, list[_Row]]] = deque()  # steps whose masks have not gone out
        self._compiler = compiler or ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 4)), thread_name_prefix="grammar")
        self._slow = slow or ThreadPoolExecutor(1, thread_name_prefix="slow-mask")

    def __bool__(self) -> bool:
        """Whether there are requests with a grammar, or ranks wait for masks."""
        return bool(self._replies or self._planned)

    @property
    def making(self) -> bool:
        """Whether a request waits for a thread, of whose end nobody is told."""
        return any(reply.sequence.masked and (reply.matcher is None or reply.making is not None) for reply in self._replies)

    def add(self, client: int, request: GenerateRequest) -> None:
        """Queue a request with a grammar, which is compiled meanwhile; or refuse it."""
        grammar, known = request.params.grammar, self._scheduler.find(client, request.id)
        assert grammar is not None, request
        if self._vocabulary is None:
            self._scheduler.refuse(client, request.id, _UNAVAILABLE)
            return
        self._scheduler.add(client, request, masked=grammar.trigger is None)
        sequence = self._scheduler.find(client, request.id)
        if sequence is not None and known is None:
            compiled = self._compiler.submit(self._compile, grammar.text)
            self._replies.append(_Reply(sequence, compiled, grammar.trigger, len(sequence.tokens)))

    def advance(self) -> None:
        """Look at what was committed; to be called after each commit, and while something is `making`."""
        self._replies = [reply for reply in self._replies if not reply.sequence.ended]
        wanted = [reply for reply in self._replies if self._follow(reply)]
        if wanted:
            self._make(wanted)

    def planned(self, plan: StepPlan) -> None:
        """A masked plan was just made: `due` gives its masks."""
        slots = set(plan.result_slots)
        sequences = ((reply, reply.sequence) for reply in self._replies if reply.sequence.masked)
        rows = [_Row(reply, each.number, each.slot, each.high) for reply, each in sequences if each.slot in slots]
        assert rows, plan
        self._planned.append((plan.step, rows))

    def due(self) -> Iterator[bytes]:
        """The masks of planned steps, in order, as far as all of a step are there."""
        while self._planned and all(row.ready for row in self._planned[0][1]):
            step, rows = self._planned.popleft()
            yield self._encoded(step, sorted((row for row in rows if not row.free), key=lambda row: row.slot))

    def discard(self) -> Iterator[bytes]:
        """The planned steps without a mask, so that ranks can end them: nobody wants what they give."""
        while self._planned:
            yield self._encoded(self._planned.popleft()[0], [])

    def _encoded(self, step: int, rows: list[_Row]) -> bytes:
        bits = np.zeros((len(rows), mask_words(_present(self._vocabulary).size)), np.int32)
        for to, row in zip(bits, rows, strict=True):
            to[:] = _present(row.reply.mask)
        return encode_masks(StepMasks(step, np.array([row.slot for row in rows], np.int32), bits))

    def _follow(self, reply: _Reply) -> bool:
        """Read a sequence's new tokens; whether it needs a mask that is to be made now."""
        if reply.making is not None and not self._take_slow(reply, reply.making):
            return False
        sequence = reply.sequence
        tokens, reply.read = sequence.tokens[reply.read :], len(sequence.tokens)
        try:
            if not sequence.masked:
                self._begin_at_trigger(reply, tokens)
                return False
            if reply.matcher is None:
                self._begin(reply)
                return False
            reply.matcher.consume(tokens)
        except GenerationFailed as error:
            self._scheduler.fail(sequence, str(error))
            return False
        if reply.trigger is not None and reply.matcher.complete:
            reply.matcher = None
            self._scheduler.release(sequence)
            return False
        if reply.length == len(sequence.tokens):
            return False
        if reply.slow:
            reply.making = self._slow.submit(self._mask_of, reply.matcher)
        return not reply.slow

    def _begin_at_trigger(self, reply: _Reply, tokens: "array[int]") -> None:
        """Tokens are free: where the last of them is the trigger the grammar begins."""
        if reply.trigger in tokens:
            assert tokens[-1] == reply.trigger, (tokens, reply.trigger)
            self._scheduler.constrain(reply.sequence)
            self._begin(reply)

    def _begin(self, reply: _Reply) -> None:
        """The first mask, once the grammar is compiled; GenerationFailed: it cannot be."""
        if reply.compiled.done():
            matcher, bits = reply.compiled.result()
            reply.matcher = matcher.fresh()
            self._made(reply, bits)

    def _compile(self, grammar: str) -> tuple[Matcher, np.ndarray]:
        """In a thread: a matcher at the grammar's beginning, and its mask there. GenerationFailed where there is none."""
        matcher = _present(self._vocabulary).matcher(grammar)
        return matcher, self._mask_of(matcher)

    def _mask_of(self, matcher: Matcher) -> np.ndarray:
        """In a thread: the mask of the matcher's next token; GenerationFailed as `Matcher.check`."""
        bits: np.ndarray = _present(self._vocabulary).masks([matcher])[0]
        matcher.check(bits)
        return bits

    def _make(self, wanted: list[_Reply]) -> None:
        """The mask of each one's next token."""
        matchers = [_present(reply.matcher) for reply in wanted]
        for reply, matcher, bits in zip(wanted, matchers, _present(self._vocabulary).masks(matchers), strict=True):
            try:
                matcher.check(bits)
            except GenerationFailed as error:
                self._scheduler.fail(reply.sequence, str(error))
            else:
                self._timed(reply, matcher)
                self._made(reply, bits)

    def _take_slow(self, reply: _Reply, making: "Future[np.ndarray]") -> bool:
        """A slow mask, if it is there; whether it is, and the request goes on."""
        if not making.done():
            return False
        reply.making = None
        try:
            bits = making.result()
        except GenerationFailed as error:
            self._scheduler.fail(reply.sequence, str(error))
            return False
        self._timed(reply, _present(reply.matcher))
        self._made(reply, bits)
        return True

    def _timed(self, reply: _Reply, matcher: Matcher) -> None:
        """Whether its next masks are taken for slow."""
        reply.slow = SLOW_TOKENS if matcher.mask_s > SLOW_S else max(0, reply.slow - 1)

    def _made(self, reply: _Reply, bits: np.ndarray) -> None:
        """The mask of the token behind those that were read is there."""
        reply.mask, reply.length = bits, reply.read
        self._scheduler.mask_ready(*reply.sequence.key, reply.length, late=not reply.slow)


def _present(value: T | None) -> T:
    assert value is not None
    return value
