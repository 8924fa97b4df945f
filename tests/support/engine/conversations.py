"""Conversations that take turns over a prefix cache: a trace, what a run of it found, and what any cache could have found.

Every conversation begins with its tenant's system prompt, goes on with a private context, and grows by a user's message and an
answer at each turn. Round robin: everybody's first turn, everybody's second turn, ... which is the order that recency alone serves
worst.
"""

import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from engine.core.prefix import extend_keys, root_key
from engine.core.scheduler import Scheduler
from engine.plan import ResultRow, StepPlan
from engine.protocol import SamplingParams
from tests.support.engine.plans import result_of
from tests.support.engine.scheduling import SchedulerConfig, request_of, scheduler_of, two_groups

PAGE, WINDOW = 32, 256
TAIL = -(-(WINDOW - 1) // PAGE)
GROUPS = two_groups(WINDOW, PAGE)
AT_ONCE = 8
TURN_END = 1


@dataclass(frozen=True)
class Trace:
    """Sizes in tokens. `answer` counts the tokens generated at each turn. Each tenant's conversations have its system prompt."""

    conversations: int
    tenants: int = 1
    turns: int = 4
    system: int = 1300
    context: int = 1000
    message: int = 52
    answer: int = 12

    @property
    def length(self) -> int:
        """Of a conversation, at its end."""
        return self.system + self.context + self.turns * (self.message + self.answer)

    @property
    def full_pages(self) -> int:
        """What keeping everything takes of the full pool."""
        return self.tenants * (self.system // PAGE) + self.conversations * -(-(self.length - self.system) // PAGE)

    @property
    def sliding_pages(self) -> int:
        """What keeping a tail where each conversation goes on, and one behind the system prompt, takes of the sliding pool.

        A turn leaves one behind its prompt and one behind its answer, which overlap but for a page.
        """
        return self.tenants * TAIL + self.conversations * (TAIL + 1)

    def opening(self, conversation: int) -> "array[int]":
        """The system prompt and a context."""
        return _turn(self.system, 1, conversation % self.tenants) + _tokens(self.context, 2, conversation)

    def said(self, conversation: int, turn: int) -> "array[int]":
        """A user's message."""
        return _turn(self.message, 3, conversation, turn)

    def answered(self, conversation: int, turn: int) -> "array[int]":
        """An answer."""
        return _turn(self.answer, 4, conversation, turn)

    def prompts(self) -> Iterator[tuple[int, int, "array[int]"]]:
        """(conversation, turn, prompt) in order of arrival."""
        so_far = [self.opening(each) for each in range(self.conversations)]
        for turn in range(self.turns):
            for each in range(self.conversations):
                so_far[each] += self.said(each, turn)
                yield each, turn, so_far[each][:]
                so_far[each] += self.answered(each, turn)


def _tokens(count: int, *seed: int) -> "array[int]":
    """Tokens of no meaning."""
    return array("i", np.random.default_rng(seed).integers(10, 5000, count, np.int32).tobytes())


def _turn(count: int, *seed: int) -> "array[int]":
    """The same with the end of a turn behind it, `count` together."""
    return _tokens(count - 1, *seed) + array("i", [TURN_END])


@dataclass
class Found:
    """Tokens of all prompts, and how many of them were found."""

    asked: int = 0
    hit: int = 0

    @property
    def rate(self) -> float:
        return self.hit / self.asked


@dataclass
class Server:
    """A scheduler whose ranks answer at once, `AT_ONCE` conversations at a time."""

    trace: Trace
    scheduler: Scheduler
    _answers: dict[int, Iterator[int]] = field(default_factory=dict)  # by request: what is still to come

    def run(self) -> Found:
        """The whole trace."""
        params = SamplingParams(max_tokens=self.trace.answer, stop_ids=(TURN_END,))
        for number, (conversation, turn, prompt) in enumerate(self.trace.prompts()):
            while len(self.scheduler.requests.unfinished) >= AT_ONCE:
                self._step()
            self._answers[number] = iter(self.trace.answered(conversation, turn))
            self.scheduler.requests.add(request_of(number, prompt, params))
        while self.scheduler.requests.unfinished:
            self._step()
        counters = self.scheduler.requests.counters
        assert counters.finished == len(self._answers), counters
        return Found(counters.queried_tokens, counters.hit_tokens)

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(result_of(plan.step, list(self._rows(plan))))
        self.scheduler.requests.drain()
        self.scheduler.requests.drain_started()

    def _rows(self, plan: StepPlan) -> Iterator[ResultRow]:
        running = {sequence.slot: sequence for sequence in self.scheduler.requests.running}
        for slot in plan.result_slots:
            sequence = running[slot]
            yield ResultRow(slot, sequence.number, (next(self._answers[sequence.id]),))


def serve(trace: Trace, pages: tuple[int, int]) -> tuple[Found, Scheduler]:
    """Run the trace through pools of so many pages beyond what running sequences need."""
    running = (AT_ONCE * (TAIL + 2 + 512 // PAGE), 2 * AT_ONCE * (-(-trace.length // PAGE) - trace.system // PAGE + 1))
    total = tuple(count + extra + 1 for count, extra in zip(pages, running, strict=True))
    total = (total[0], max(total[1], trace.length // PAGE + 2))
    scheduler = scheduler_of(SchedulerConfig(GROUPS, total, AT_ONCE, trace.length + 1, 4096, prefix_cache=True))
    return Server(trace, scheduler).run(), scheduler


@cache
def unlimited(trace: Trace) -> Found:
    """What a cache finds that never forgets a page; the last token of an answer is in none, because it is never computed."""
    found, known = Found(), set()
    for conversation, turn, prompt in trace.prompts():
        keys = page_keys(prompt + trace.answered(conversation, turn)[:-1])
        count = 0
        while count < (len(prompt) - 1) // PAGE and keys[count] in known:
            count += 1
        found.asked += len(prompt)
        found.hit += count * PAGE
        known.update(keys)
    return found


def page_keys(tokens: "array[int]") -> list[bytes]:
    """Of all whole pages."""
    keys = []
    extend_keys(keys, root_key(""), tokens, PAGE, len(tokens) // PAGE)
    return keys


def optimum(trace: Trace, pages: tuple[int, int]) -> Found:
    """An upper bound of what any cache of so many pages finds: Belady's rule for full pages, or for tails, whichever is less."""
    return min(_belady(trace, pages[1]), _belady_tails(trace, pages[0]), key=lambda found: found.hit)


def _belady(trace: Trace, capacity: int) -> Found:
    """Evict the page whose next use is furthest away; a page is used with all before it, so that the last of a path go first."""
    names = {}
    asked = []
    for each, turn, prompt in trace.prompts():
        keys = page_keys(prompt + trace.answered(each, turn)[:-1])
        asked.append((len(prompt), array("i", (names.setdefault(key, len(names)) for key in keys))))
    following = [array("i") for _ in asked]  # when each page of a request is used next; -1: never
    seen = [-1] * len(names)
    for at in range(len(asked) - 1, -1, -1):
        following[at] = array("i", (seen[page] for page in asked[at][1]))
        for page in asked[at][1]:
            seen[page] = at
    found, cached = Found(), _Furthest(capacity)
    for (length, pages), uses in zip(asked, following, strict=True):
        limit = (length - 1) // PAGE
        hit = next((at for at, page in enumerate(pages[:limit]) if page not in cached), limit)
        found.asked += length
        found.hit += hit * PAGE
        for page, use in zip(pages, uses, strict=True):
            cached.put(page, use if use >= 0 else None, 1)
    return found


def _belady_tails(trace: Trace, capacity: int) -> Found:
    """The same for windows: a conversation's next turn needs the one behind its last, everybody's first the system prompt's."""
    found, cached = Found(), _Furthest(capacity)
    for at, (conversation, turn, prompt) in enumerate(trace.prompts()):
        found.asked += len(prompt)
        if turn == 0:
            found.hit += trace.system // PAGE * PAGE if at >= trace.tenants else 0
        elif conversation in cached:
            found.hit += (len(prompt) - trace.message - 1) // PAGE * PAGE
        else:
            found.hit += trace.system // PAGE * PAGE
        cached.put(conversation, at + trace.conversations if turn + 1 < trace.turns else None, TAIL)
    return found


class _Furthest:
    """A set of a bounded size that keeps what is used soonest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._count = 0
        self._size = 0

    def __contains__(self, key: int) -> bool:
        return key in self._next

    def put(self, key: int, following: int | None, size: int) -> None:
        """It is used next at `following`; None: never, so that it need not be kept."""
        if self._next.pop(key, None) is not None:
            self._size -= size
        if following is None:
            return
        self._next[key] = following
        self._size += size
        self._count += 1
        heapq.heappush(self._heap, (-following, -self._count, key))
        while self._size > self._capacity:
            use, _, evicted = heapq.heappop(self._heap)
            if self._next.get(evicted) == -use:
                del self._next[evicted]
                self._size -= size


def portions(trace: Trace, working_set: float) -> tuple[int, int]:
    """Pools of which everything that the trace would keep is so large a part."""
    return int(trace.sliding_pages / working_set), int(trace.full_pages / working_set)
