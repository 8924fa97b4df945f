"""Who is let in: every request has a ticket from its head to its end, and none is promised what is not there.

    enter() -------- settle(choices, tokens) -------- submitted() ------------------ leave()
      |-- one answer ---|-- so many choices, tokens -----|-- the engine counts them ----|     leave() at any point gives all back

At its head a request is refused when every choice is taken. What it costs is known when it has been read, and is taken then, all or
nothing: requests that each held a part would shut each other out. A choice is counted here until the engine has it, and by the
engine until its last token is made: a client that reads slowly holds none once the engine has done its part. What waits for its
prefill waits in the core's queue, in order, and is bounded by tokens as well: one long prompt may always wait alone.

Clients share alike. Alone a client may have everything. Of several each has its turn: a client's next choice waits behind its own,
and beside the first of the others'. Where all is taken, the last that waits of the client with most gives way to one with fewer.

A client has one share of all replicas: what other replicas began for it counts as if it had begun here. So its next choice waits
longer, for AHEAD_MOST choices of others at most.
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
    """The tickets of one engine.

    choices    that may run or wait at once
    tokens     of prompts that may wait for their prefill at once
    bytes      of media that may wait with them
    """

    engine: EngineClient
    choices: int
    tokens: int
    bytes: int
    _reserved: int = 0
    _open_answers: int = 0
    _turn: int = 0  # the latest
    _begun: Counter[str] = field(default_factory=Counter)  # choices since they were last asked for, by client
    _ahead: dict[str, int] = field(default_factory=dict)  # choices begun elsewhere that no turn has counted, by client
    _tickets: list["AdmissionTicket"] = field(default_factory=list)

    @property
    def taken(self) -> int:
        """Choices that hold a ticket."""
        return self.engine.open + self._reserved

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that wait for their prefill, or for their submission."""
        return sum(ticket.tokens for ticket in self._waiting())

    def _waiting(self) -> list["AdmissionTicket"]:
        """The tickets that wait; one that has begun waits no more."""
        for ticket in self._tickets:
            ticket.note_begun()
        self._tickets = [ticket for ticket in self._tickets if ticket.waits]
        return self._tickets

    def begun(self) -> Counter[str]:
        """Choices that the engine has begun since the last call, by client."""
        self._waiting()
        begun = self._begun
        self._begun = Counter()
        return begun

    def note_elsewhere(self, choices: Mapping[str, int]) -> None:
        """Counts choices that other replicas began since the last call, by client."""
        waiting = {ticket.client for ticket in self._waiting()}
        self._ahead = {client: ahead for client, ahead in self._ahead.items() if client in waiting}
        for client, more in choices.items():
            self._ahead[client] = self._ahead.get(client, 0) + more

    def enter(self, client: str) -> "AdmissionTicket":
        """A ticket for one answer. Overloaded: every choice is taken, and nobody would give way."""
        if self.taken >= self.choices and self._last_of_greediest(client, 1) is None:
            raise Overloaded(FULL)
        self._claim(0, 1)
        return AdmissionTicket(self, client)

    async def make_room(self, client: str, choices: int, tokens: int, media: int) -> None:
        """Have others give way, one by one, until there is room, nobody has more, or GIVE_WAY_S are over."""
        ends = time.monotonic() + GIVE_WAY_S
        while self._refusal(choices, tokens, media) and (ticket := self._last_of_greediest(client, choices)) is not None:
            before = self.taken
            ticket.give_way()
            while self.taken >= before and time.monotonic() < ends:  # noqa: ASYNC110 - the core has no event for it
                await asyncio.sleep(_POLL_S)
            if time.monotonic() >= ends:
                return

    def _last_of_greediest(self, client: str, choices: int) -> "AdmissionTicket | None":
        """The last that waits of the client of most waiting choices, if those are more than `client` would have."""
        waiting, held = self._waiting(), Counter[str]()
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
        return FULL if self.taken + choices > self.choices else None

    def _claim(self, choices: int, answers: int) -> None:
        """Take so many, or give back what is below 0. Overloaded: so many answers are not there."""
        if self._open_answers + answers > ANSWERS_PER_CHOICE * self.choices:
            raise Overloaded(FULL)
        self._reserved += choices
        self._open_answers += answers

    def _queue(self, ticket: "AdmissionTicket") -> None:
        """After the client's own that wait; else with the first that waits; where nobody waits, as those that run had it. Later by
        what other replicas began for the client."""
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
    """What one request holds. `turn`: lower ones go first."""

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
        """Whether its prompt has yet to be computed."""
        return self._reserved > 0 or any(clock.scheduled is None for clock in self._clocks)

    @property
    def may_give_way(self) -> bool:
        """The engine has it, and has begun with no choice of it."""
        return self._refuse is not None and all(clock.scheduled is None for clock in self._clocks)

    def note_begun(self) -> None:
        """Tell the admission of choices that the engine has begun meanwhile."""
        begun = sum(clock.scheduled is not None for clock in self._clocks)
        self.admission._begun[self.client] += begun - self._begun
        self._begun = begun

    def settle(self, choices: int, tokens: int, media: int = 0) -> None:
        """What it costs, once: `tokens` of prompts and bytes of `media`, all choices together. Overloaded: it does not fit, and
        nothing is taken."""
        assert not self._reserved, "it has been settled"
        if refusal := self.admission._refusal(choices, tokens, media):
            raise Overloaded(refusal)
        self.admission._claim(choices, choices - self._answers)
        self._reserved = self._answers = self.choices = choices
        self.tokens = tokens
        self.bytes = media
        self.admission._queue(self)

    def submitted(self, clocks: Sequence[Clock], refuse: Callable[[], None]) -> None:
        """The engine has its choices now, and counts them. `refuse` has it give way."""
        self._clocks = clocks
        self._refuse = refuse
        self.admission._claim(-self._reserved, 0)
        self._reserved = 0

    def give_way(self) -> None:
        """Have the engine refuse it, for another client's."""
        refuse, self._refuse = self._refuse, None
        assert refuse is not None
        refuse()

    def leave(self) -> None:
        """Give all back: the request has ended, whichever way. Idempotent."""
        if self._clocks:
            self.note_begun()
        self.admission._claim(-self._reserved, -self._answers)
        self._reserved = self._answers = 0
        self._clocks = ()
