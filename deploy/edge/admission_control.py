"""Who is let in: every request has a place from its head to its end, and none is promised what is not there.

    enter() -------- settle(choices, tokens) -------- submitted() ------------------ leave()
      |-- one answer ---|-- so many choices, tokens -----|-- the engine counts them ----|     leave() at any point gives all back

At its head a request is refused when every choice is taken. What it costs is known when it has been read, and is taken then, all or
nothing: requests that each held a part would shut each other out. A choice is counted here until the engine has it, and by the
engine until its last token is made: a client that reads slowly holds none once the engine has done its part. What waits for its
prefill waits in the core's queue, in order, and is bounded by tokens as well: one long prompt may always wait alone.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import Overloaded
from engine.front.client import Clock
from engine.front.generation import Engine

FULL = "Too many requests are running or waiting; please try again shortly."


@dataclass
class AdmissionControl:
    """The places of one engine.

    choices    that may run or wait at once
    tokens     of prompts that may wait for their prefill at once
    answers    choices whose answers may be under way, those included that only wait for their reader
    """

    engine: Engine
    choices: int
    tokens: int
    answers: int
    _reserved: int = 0
    _open_answers: int = 0
    _waiting: deque["Place"] = field(default_factory=deque)

    @property
    def taken(self) -> int:
        """Choices that hold a place."""
        return self.engine.open + self._reserved

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that wait for their prefill, or for their submission."""
        while self._waiting and not self._waiting[0].waits:
            self._waiting.popleft()
        return sum(place.tokens for place in self._waiting if place.waits)

    def enter(self) -> "Place":
        """A place for one answer. Overloaded: every choice is taken."""
        if self.taken >= self.choices:
            raise Overloaded(FULL)
        self._claim(0, 1)
        return Place(self)

    def _claim(self, choices: int, answers: int) -> None:
        if self.taken + choices > self.choices or self._open_answers + answers > self.answers:
            raise Overloaded(FULL)
        self._reserved += choices
        self._open_answers += answers

    def _queue(self, place: "Place", tokens: int, choices: int, answers: int) -> None:
        waiting = self.waiting_tokens
        if waiting and waiting + tokens > self.tokens:
            raise Overloaded(f"{waiting} tokens of prompts are waiting already; please try again shortly.")
        self._claim(choices, answers)
        self._waiting.append(place)

    def _give_back(self, reserved: int, answers: int) -> None:
        self._reserved -= reserved
        self._open_answers -= answers


class Place:
    """One request's."""

    def __init__(self, admission: AdmissionControl) -> None:
        self.tokens = 0
        self._admission = admission
        self._reserved, self._answers = 0, 1
        self._clocks: Sequence[Clock | None] = ()
        self._left = False

    @property
    def waits(self) -> bool:
        """Whether its prompt has yet to be computed."""
        if self._left:
            return False
        return bool(self._reserved) or any(clock is not None and clock.scheduled is None for clock in self._clocks)

    def settle(self, choices: int, tokens: int) -> None:
        """What it costs, once: `tokens` of prompts, all choices together. Overloaded: it does not fit, and nothing is taken."""
        assert not self._reserved, "it has been settled"
        self._admission._queue(self, tokens, choices, choices - self._answers)
        self._reserved = self._answers = choices
        self.tokens = tokens

    def submitted(self, clocks: Sequence[Clock | None]) -> None:
        """The engine has its choices now, and counts them."""
        self._clocks = clocks
        self._admission._give_back(self._reserved, 0)
        self._reserved = 0

    def leave(self) -> None:
        """It has ended, whichever way. Idempotent."""
        if not self._left:
            self._left = True
            self._admission._give_back(self._reserved, self._answers)
