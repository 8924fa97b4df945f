"""Which tokens may come next in requests with a grammar: a matcher for each, a mask after each of its tokens.

    add --> compiled in a thread --> mask --> row planned --> token committed --> consumed --> mask --> ...

With a trigger tokens are free until that id comes; what is in flight behind it is dropped, and once what follows is complete
tokens are free again. A grammar that fails, or lets no token come, ends its own request.
"""

from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.errors import GenerationFailed
from engine.matcher import Matcher, Vocabulary
from engine.plan import StepPlan
from engine.protocol import GenerateRequest
from engine.step_masks import StepMasks, encode_masks

_UNAVAILABLE = "grammars are not available: the checkpoint has no tokenizer that they can be made for"

T = TypeVar("T")


@dataclass(eq=False)
class _Reply:
    """A request with a grammar.

    compiled  a matcher at the grammar's beginning
    matcher   of what is being written; None: nothing is
    read      tokens of the sequence, prompt included, that were looked at
    mask      int32 [words] for the token at index `length`
    """

    sequence: Sequence
    compiled: "Future[Matcher]"
    trigger: int | None
    read: int
    matcher: Matcher | None = None
    mask: np.ndarray | None = None
    length: int = 0


class Masks:
    """Of the requests of one scheduler. `vocabulary` None: the checkpoint has none, and grammars are refused."""

    def __init__(self, scheduler: Scheduler, vocabulary: Vocabulary | None) -> None:
        self._scheduler = scheduler
        self._vocabulary = vocabulary
        self._replies: list[_Reply] = []
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def __bool__(self) -> bool:
        """Whether there are requests with a grammar."""
        return bool(self._replies)

    @property
    def compiling(self) -> bool:
        """Whether a request waits for its grammar alone, of whose end nobody is told."""
        return any(reply.sequence.masked and reply.matcher is None for reply in self._replies)

    def add(self, client: int, request: GenerateRequest) -> None:
        """Queue a request with a grammar, which is compiled meanwhile; or refuse it."""
        grammar, vocabulary, known = request.params.grammar, self._vocabulary, self._scheduler.find(client, request.id)
        assert grammar is not None, request
        if vocabulary is None:
            self._scheduler.refuse(client, request.id, _UNAVAILABLE)
            return
        self._scheduler.add(client, request, masked=grammar.trigger is None)
        sequence = self._scheduler.find(client, request.id)
        if sequence is not None and known is None:
            compiled = self._compiler.submit(vocabulary.matcher, grammar.text)
            self._replies.append(_Reply(sequence, compiled, grammar.trigger, len(sequence.tokens)))

    def advance(self) -> None:
        """Look at what was committed; to be called after each commit, and while grammars are compiled."""
        self._replies = [reply for reply in self._replies if not reply.sequence.ended]
        wanted = [reply for reply in self._replies if self._follow(reply)]
        if wanted:
            self._make(wanted)

    def of_step(self, plan: StepPlan) -> bytes:
        """The masks of a plan that was just made."""
        slots = set(plan.result_slots)
        rows = {reply.sequence.slot: reply for reply in self._replies if reply.sequence.masked and reply.sequence.slot in slots}
        assert all(reply.length == len(reply.sequence.tokens) for reply in rows.values()), rows
        bits = np.stack([_present(rows[slot].mask) for slot in sorted(rows)])
        return encode_masks(StepMasks(plan.step, np.array(sorted(rows), np.int32), bits))

    def _follow(self, reply: _Reply) -> bool:
        """Read a sequence's new tokens; whether it needs a mask that can be made now."""
        sequence = reply.sequence
        tokens, reply.read = sequence.tokens[reply.read :], len(sequence.tokens)
        try:
            if not sequence.masked:
                return self._begun(reply, tokens)
            if reply.matcher is None:
                return self._compiled(reply)
            reply.matcher.consume(tokens)
        except GenerationFailed as error:
            self._scheduler.fail(sequence, str(error))
            return False
        if reply.trigger is not None and reply.matcher.complete:
            reply.matcher = None
            self._scheduler.release(sequence)
            return False
        return reply.length != len(sequence.tokens)

    def _begun(self, reply: _Reply, tokens: "array[int]") -> bool:
        """Tokens are free: whether the last of them was the trigger, and the first mask can be made."""
        if reply.trigger not in tokens:
            return False
        assert tokens[-1] == reply.trigger, (tokens, reply.trigger)
        self._scheduler.constrain(reply.sequence)
        return self._compiled(reply)

    def _compiled(self, reply: _Reply) -> bool:
        """Whether the grammar is there; GenerationFailed: it cannot be compiled."""
        if reply.compiled.done():
            reply.matcher = reply.compiled.result().fresh()
        return reply.matcher is not None

    def _make(self, wanted: list[_Reply]) -> None:
        """The mask of each one's next token."""
        assert self._vocabulary is not None
        matchers = [_present(reply.matcher) for reply in wanted]
        for reply, matcher, bits in zip(wanted, matchers, self._vocabulary.masks(matchers), strict=True):
            try:
                matcher.check(bits)
            except GenerationFailed as error:
                self._scheduler.fail(reply.sequence, str(error))
                continue
            reply.mask, reply.length = bits, len(reply.sequence.tokens)
            self._scheduler.mask_ready(*reply.sequence.key, reply.length)


def _present(value: T | None) -> T:
    assert value is not None
    return value
