"""Admission: each request holds a ticket until its last byte, and capacity is never oversubscribed.

    enter() -------- settle(choices, tokens) -------- submitted() ------------------ leave()
      |-- one answer ---|-- its choices and tokens -----|-- the engine counts them ----|

A request is refused at its head if all choices are taken. Its cost, known once it is read, is taken
all or nothing: requests that each held a part would block each other. A choice counts here until it
is submitted, then in the engine until its last token. Waiting prompts are bounded by tokens, but
one may always wait alone.

Clients take turns: a client's next choice comes after its own, level with the first of the others'.
If all is taken, the last waiting choice of the client with most is refused. Choices that other
replicas began for a client delay its next one, by at most AHEAD_MOST.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import Overloaded
from engine.front.client import EngineClient
from engine.front.stream import Clock

FULL = "Too many requests are running or waiting; please try again shortly."
GIVE_WAY_S = 1.0  # for the engine to end what gives way: a step of it
_POLL_S = 0.005
AHEAD_MOST = 512
ANSWERS_PER_CHOICE = 4  # answers under way, those included that only wait for their readers


@dataclass
class AdmissionControl:
    engine: EngineClient
    choices: int  # running or waiting at once
    tokens: int  # of prompts waiting for prefill
    bytes: int  # of media waiting with them
    _reserved: int = 0
    _open_answers: int = 0
    _turn: int = 0  # the latest
    _begun: Counter[str] = field(default_factory=Counter)  # choices since they were last asked for, by client
    _ahead: dict[str, int] = field(default_factory=dict)  # choices begun elsewhere that no turn has counted, by client
    _tickets: list["AdmissionTicket"] = field(default_factory=list)

    @property
    def taken(self) -> int:
        return self.engine.open + self._reserved

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that wait for prefill or submission."""
        return sum(ticket.tokens for ticket in self._waiting())

    def _waiting(self) -> list["AdmissionTicket"]:
        for ticket in self._tickets:
            ticket.note_begun()
        self._tickets = [ticket for ticket in self._tickets if ticket.waits]
        return self._tickets

    def begun(self) -> Counter[str]:
        """Choices begun since the last call, by client."""
        self._waiting()
        begun = self._begun
        self._begun = Counter()
        return begun

    def note_elsewhere(self, choices: Mapping[str, int]) -> None:
        """`choices` that other replicas began since the last call, by client."""
        waiting = {ticket.client for ticket in self._waiting()}
        self._ahead = {client: ahead for client, ahead in self._ahead.items() if client in waiting}
        for client, more in choices.items():
            self._ahead[client] = self._ahead.get(client, 0) + more

    def enter(self, client: str) -> "AdmissionTicket":
        """Overloaded if every choice is taken and none can be reclaimed."""
        if self.taken >= self.choices and self._last_of_greediest(client, 1) is None:
            raise Overloaded(FULL)
        self._claim(0, 1)
        return AdmissionTicket(self, client)

    async def make_room(self, client: str, choices: int, tokens: int, media: int) -> None:
        """Refuse other clients' waiting requests until there is room, none is left, or GIVE_WAY_S
        have passed."""
        ends = time.monotonic() + GIVE_WAY_S
        while self._refusal(choices, tokens, media) and (ticket := self._last_of_greediest(client, choices)) is not None:
            before = self.taken
            ticket.give_way()
            while self.taken >= before and time.monotonic() < ends:  # noqa: ASYNC110 - the core has no event for it
                await asyncio.sleep(_POLL_S)
            if time.monotonic() >= ends:
                return

    def _last_of_greediest(self, client: str, choices: int) -> "AdmissionTicket | None":
        """The last waiting ticket of the client with most waiting choices, if more than `client`
        would have."""
        waiting = self._waiting()
        held = Counter[str]()
        for ticket in waiting:
            held[ticket.client] += ticket.choices
        greediest = max(held, key=held.__getitem__, default=client)
        if held[greediest] <= held[client] + choices:
            return None
        return next((ticket for ticket in reversed(waiting) if ticket.client == greediest and ticket.may_give_way), None)

    def _refusal(self, choices: int, tokens: int, media: int) -> str | None:
        waiting = self.waiting_tokens
        held = sum(ticket.bytes for ticket in self._waiting())
        if waiting and waiting + tokens > self.tokens:
            return f"{waiting} tokens of prompts are waiting already; please try again shortly."
        if media and held and held + media > self.bytes:
            return f"{held} bytes of images and videos are waiting already; please try again shortly."
        if self.taken + choices > self.choices:
            return FULL
        return None

    def _claim(self, choices: int, answers: int) -> None:
        """Negative numbers give back. Overloaded: too many answers."""
        if self._open_answers + answers > ANSWERS_PER_CHOICE * self.choices:
            raise Overloaded(FULL)
        self._reserved += choices
        self._open_answers += answers

    def _queue(self, ticket: "AdmissionTicket") -> None:
        """After the client's own waiting tickets, else level with the first that waits, else at the
        latest turn; later by choices begun elsewhere."""
        waiting = self._waiting()
        own = [other.turn + other.choices for other in waiting if other.client == ticket.client]
        first = min((other.turn for other in waiting), default=self._turn)
        turn = max(own) if own else first
        ahead = self._ahead.pop(ticket.client, 0)
        ticket.turn = max(turn, min(turn + ahead, first + AHEAD_MOST))
        self._turn = max(self._turn, ticket.turn)
        self._tickets.append(ticket)


@dataclass(eq=False)
class AdmissionTicket:
    """Lower turns go first."""

    admission: AdmissionControl
    client: str
    tokens: int = 0
    bytes: int = 0
    choices: int = 0
    turn: int = 0
    _reserved: int = 0
    _answers: int = 1
    _clocks: Sequence[Clock] = ()
    _refuse: Callable[[], None] | None = None
    _begun: int = 0

    @property
    def waits(self) -> bool:
        """Whether its prompt is still to be computed."""
        return self._reserved > 0 or any(clock.scheduled is None for clock in self._clocks)

    @property
    def may_give_way(self) -> bool:
        """Whether the engine has it and has started no choice of it."""
        return self._refuse is not None and all(clock.scheduled is None for clock in self._clocks)

    def note_begun(self) -> None:
        begun = sum(clock.scheduled is not None for clock in self._clocks)
        self.admission._begun[self.client] += begun - self._begun
        self._begun = begun

    def settle(self, choices: int, tokens: int, media: int = 0) -> None:
        """Take the cost of all choices, once. Overloaded takes nothing."""
        assert not self._reserved, "it has been settled"
        if refusal := self.admission._refusal(choices, tokens, media):
            raise Overloaded(refusal)
        self.admission._claim(choices, choices - self._answers)
        self._reserved = self._answers = self.choices = choices
        self.tokens = tokens
        self.bytes = media
        self.admission._queue(self)

    def submitted(self, clocks: Sequence[Clock], refuse: Callable[[], None]) -> None:
        """From now on the engine counts its choices."""
        self._clocks = clocks
        self._refuse = refuse
        self.admission._claim(-self._reserved, 0)
        self._reserved = 0

    def give_way(self) -> None:
        refuse = self._refuse
        self._refuse = None
        assert refuse is not None
        refuse()

    def leave(self) -> None:
        """Idempotent."""
        if self._clocks:
            self.note_begun()
        self.admission._claim(-self._reserved, -self._answers)
        self._reserved = self._answers = 0
        self._clocks = ()
