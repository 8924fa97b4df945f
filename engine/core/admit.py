"""Admission: which waiting requests get a slot. In order, past those that cannot begin now, but past none for ever.

A request that was overtaken often enough holds up all behind it. That ends, at the latest, when those that run have reached their
limits: nobody of later precedence gets a slot meanwhile, and a request always begins when none runs.
"""

from array import array
from collections.abc import Callable, Iterable
from itertools import islice

from engine.core.allocator import Allocator, Changes
from engine.core.pages import Hit
from engine.core.requests import Requests
from engine.core.sequence import Sequence
from engine.core.step_budget import Policy
from engine.logit_adjustments import encoded_size
from engine.plan import MAX_ADMITTED, Admission, admission_size

_LOOKAHEAD = 16  # requests looked at beyond the free slots


class AdmissionBudget:
    """Pages that are free for admissions: those that running prefills still need are reserved for them."""

    def __init__(self, running: Iterable[Sequence], allocator: Allocator) -> None:
        self._allocator = allocator
        self._running = 0
        self._promised = [0] * len(allocator.pools)
        for sequence in running:
            self.admitted(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """One more runs."""
        self._running += 1
        if sequence.high < sequence.target:
            for index, pool in enumerate(self._allocator.pools):
                worst = pool.group.worst_pages(sequence.target + 1)
                self._promised[index] += max(0, worst - len(sequence.runs[index].pages))

    def fits(self, sequence: Sequence, hit: Hit | None) -> bool:
        """Whether all known tokens fit what is left, with a page to grow for every running sequence; always if none runs.

        Pages of the hit need not be taken, but idle ones among them are no longer available to others.
        """
        if not self._running:
            return True
        for index, pool in reversed(list(enumerate(self._allocator.pools))):  # full pages, of which long ones need most, first
            need = pool.group.worst_pages(len(sequence.tokens) + 1)
            if hit is not None and hit.count:
                if pool.group.window is None:
                    need = max(0, need - len(hit.full)) + hit.idle_full
                else:
                    need = max(0, need - len(hit.tail)) + pool.idle_in(hit.tail)
            if need + self._promised[index] + self._running > pool.available:
                return False
        return True


class Admissions:
    """Takes requests from the queue; `budget` is what a step may prefill."""

    def __init__(self, requests: Requests, allocator: Allocator, policy: Policy, budget: int) -> None:
        self._requests = requests
        self._allocator = allocator
        self._policy = policy
        self._budget = budget
        self._size = 0  # numbers of the admissions of the plan being made
        self._gain = max(allocator.page, budget // 8)  # tokens worth waiting for while another computes them

    def new_plan(self) -> None:
        """A plan is begun, without admissions."""
        self._size = 0

    def again(self, sequence: Sequence, changes: Changes) -> Admission | None:
        """Admit a sequence that has stepped back, with its slot and pages; None if the plan has no room for it beside others."""
        if not self._fits_plan(sequence, sum(len(run.pages) for run in sequence.runs)):
            return None
        self._requests.admit_again(sequence)
        self._allocator.name_again(sequence, changes)
        return _admission(sequence)

    def _fits_plan(self, sequence: Sequence, pages: int) -> bool:
        """Count an admission with so many pages in the plan; False if the plan has no room for it beside others."""
        size = self._size + _size(sequence, pages)
        if self._size and size > MAX_ADMITTED:
            return False
        self._size = size
        return True

    def candidates(self) -> list[Sequence]:
        """The waiting requests to look at, in order: more than there are free slots."""
        free = self._requests.free_slots
        return list(islice(self._requests.waiting, free + _LOOKAHEAD)) if free else []

    def admit(self, changes: Changes, budget_left: Callable[[], int], begin: Callable[[Sequence, Admission], None]) -> None:
        """Admit while slots, pages and this step's budget last; `begin` gets each admitted sequence."""
        if not (self._requests.waiting and self._requests.free_slots and budget_left()):
            return
        room, prefills, passed = AdmissionBudget(self._requests.running, self._allocator), self._prefills(), []
        for sequence in self.candidates():
            if not (self._requests.free_slots and budget_left()):
                return
            hit = self._allocator.find(sequence)
            if self._waits(sequence, hit, prefills):
                continue
            if not self._may_begin(sequence, hit, room, prefills):
                if sequence.overtaken >= self._policy.overtaking:
                    return
                passed.append(sequence)
                continue
            if not self._fits_plan(sequence, 0 if hit is None else len(hit.full) + len(hit.tail)):
                return
            self._admit(sequence, hit, changes)
            room.admitted(sequence)
            for other in passed:
                other.overtaken += 1
            begin(sequence, _admission(sequence))
            prefills = self._prefills()

    def _prefills(self) -> list[Sequence]:
        """Running sequences whose prompts are not committed to their ends."""
        return [sequence for sequence in self._requests.running if sequence.low < sequence.target]

    def _waits(self, sequence: Sequence, hit: Hit | None, prefills: list[Sequence]) -> bool:
        """It has nothing to compute until its mask comes, or another sequence is about to compute its prefix."""
        found = 0 if hit is None else hit.count * self._allocator.page
        if sequence.waits and len(sequence.tokens) - found < 2:
            return True
        return hit is not None and self._allocator.being_computed(sequence, hit, prefills, self._gain)

    def _may_begin(self, sequence: Sequence, hit: Hit | None, room: AdmissionBudget, prefills: list[Sequence]) -> bool:
        """There are pages, and it is short, or few enough long prompts are being computed."""
        found = 0 if hit is None else hit.count * self._allocator.page
        if len(sequence.tokens) - found > self._budget:
            long = sum(other.target - other.high > self._budget for other in prefills)
            if long >= self._policy.long and sequence.overtaken < self._policy.overtaking:
                return False
        return room.fits(sequence, hit)

    def _admit(self, sequence: Sequence, hit: Hit | None, changes: Changes) -> None:
        first = not sequence.started
        self._requests.admit(sequence)
        if hit is not None:
            self._allocator.attach(sequence, hit, changes)
        if first and not sequence.scores:
            self._requests.counters.queried_tokens += len(sequence.tokens)
            self._requests.counters.hit_tokens += sequence.cached
        if first:
            sequence.first_cached = sequence.cached


def _size(sequence: Sequence, pages: int) -> int:
    """The numbers that its admission, with so many pages, adds to a plan."""
    return admission_size(len(sequence.tokens), len(sequence.params.stop_ids), encoded_size(sequence.params.adjustments), pages)


def _admission(sequence: Sequence) -> Admission:
    tokens, prompt = array("i", sequence.tokens), sequence.prompt
    return Admission(sequence.slot, sequence.number, tokens, prompt, sequence.params, cached=sequence.low)
