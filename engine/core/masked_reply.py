"""A reply whose tokens need masks, and the rows of it that were planned before theirs were made."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from engine.core.sequence import Sequence
from engine.core.thought_limit import ThoughtLimit
from engine.matcher import Matcher

T = TypeVar("T")
Compiled = Future[tuple[Matcher, np.ndarray]]


@dataclass(eq=False)
class MaskedReply:
    """A request with a grammar, or with a thinking budget.

    compiled  a matcher at the grammar's start, which others may share, and its first mask; None: it has no grammar
    limit     of its thoughts
    ending    no grammar holds now: it is masked because its thought may have to end
    matcher   of the grammar that holds now; None: none does
    read      tokens of the sequence, prompt included, that were read
    mask      int32 [words] for the token at index `length`
    slow      tokens for which its masks still count as slow;   making: the slow mask that a thread makes
    """

    sequence: Sequence
    compiled: Compiled | None
    trigger: int | None
    limit: ThoughtLimit | None
    read: int
    ending: bool = False
    matcher: Matcher | None = None
    mask: np.ndarray | None = None
    length: int = 0
    slow: int = 0
    making: "Future[np.ndarray] | None" = None

    @property
    def constrained(self) -> bool:
        """Its next token is one of its grammar."""
        return self.sequence.masked and not self.ending

    @property
    def waits_for_thread(self) -> bool:
        """It cannot go on until a thread has compiled its grammar, or made its mask."""
        return self.constrained and (self.matcher is None or self.making is not None)

    @property
    def must_end(self) -> bool:
        """The budget of its thought is used up by the tokens that were read."""
        return self.limit is not None and self.limit.ends_at == self.read

    def cancel(self, *, compiling: bool) -> None:
        """It has ended: cancel what threads have not started for it; `compiling`: its grammar too."""
        for future in (self.compiled if compiling else None, self.making):
            if future is not None:
                future.cancel()


@dataclass(frozen=True)
class MaskedRow:
    """A planned row, of an admission, that gives the token at index `length`."""

    reply: MaskedReply
    number: int
    slot: int
    length: int

    @property
    def unmasked(self) -> bool:
        """It needs no mask: what it gives is dropped, the grammar is complete, or the thought need not end yet."""
        reply, sequence = self.reply, self.reply.sequence
        if sequence.number != self.number or not sequence.masked:
            return True
        return reply.ending and self.length < present(present(reply.limit).ends_at)

    @property
    def ready(self) -> bool:
        """The mask is there, or none is needed."""
        return self.unmasked or self.length == len(self.reply.sequence.tokens) == self.reply.length


def present(value: T | None) -> T:
    """The value, which is there."""
    assert value is not None
    return value
