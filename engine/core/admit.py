"""Admission gives slots in order of precedence, past requests that cannot begin now. One overtaken
`Policy.overtaking` times blocks all later ones; it begins at the latest when no request runs."""

from array import array
from collections.abc import Iterator

from engine.core.pages import Hit
from engine.core.requests import Requests
from engine.core.sequence import Sequence
from engine.core.step_budget import Policy
from engine.plan import MAX_ADMITTED, Admission, StepPlan, admission_size

_LOOKAHEAD = 16  # requests looked at beyond the free slots


class AdmissionBudget:
    """Free pages not reserved for running prefills."""

    def __init__(self, requests: Requests) -> None:
        self._running = 0
        self._promised = dict.fromkeys(requests.allocator.pools, 0)
        for sequence in requests.running:
            self.reserve(sequence)

    def reserve(self, sequence: Sequence) -> None:
        self._running += 1
        if sequence.planned < sequence.target:
            for run in sequence.pages.runs:
                self._promised[run.pool] += max(0, run.pool.group.worst_pages(sequence.target + 1) - len(run.pages))

    def fits(self, sequence: Sequence, hit: Hit) -> bool:
        """Whether all known tokens fit, with a page left per running sequence; True if none runs."""
        if not self._running:
            return True
        for pool, promised in self._promised.items():
            if pool.group.window is None:
                cached = hit.full
            else:
                cached = hit.tail
            need = pool.group.worst_pages(len(sequence.tokens) + 1) - len(cached)
            left = pool.available - promised - self._running - need
            if left < 0 or (left < len(cached) and pool.idle_in(cached) > left):
                return False
        return True


class Admissions:
    def __init__(self, requests: Requests, policy: Policy, budget: int) -> None:
        self._requests = requests
        self._allocator = requests.allocator
        self._policy = policy
        self._budget = budget
        self._gain = max(self._allocator.page, budget // 8)  # tokens worth waiting for while another computes them

    def new_plan(self, plan: StepPlan) -> None:
        self._plan = plan
        self._size = 0  # numbers of its admissions

    def readmit(self, sequence: Sequence) -> bool:
        """Admit again after `step_back`; False if the plan is full."""
        if not self._fits_plan(sequence, sum(len(run.pages) for run in sequence.pages.runs)):
            return False
        self._requests.readmit(sequence)
        self._allocator.append_again(sequence, self._plan)
        self._add_to_plan(sequence)
        return True

    def _add_to_plan(self, sequence: Sequence) -> None:
        tokens = array("i", sequence.tokens)
        computed = sequence.committed
        admission = Admission(
            sequence.slot, sequence.number, tokens, sequence.prompt, sequence.params, computed,
            self._requests.adapters.use(sequence.adapter),
        )  # fmt: skip
        self._plan.admissions.append(admission)

    def _fits_plan(self, sequence: Sequence, pages: int) -> bool:
        size = admission_size(len(sequence.tokens), sequence.params, pages) + self._size
        if self._size and size > MAX_ADMITTED:
            return False
        self._size = size
        return True

    def candidates(self) -> list[Sequence]:
        free = self._requests.free_slots
        if free:
            return self._requests.waiting[: len(free) + _LOOKAHEAD]
        return []

    def admit(self) -> Iterator[Sequence]:
        """Yields each admitted sequence, which then starts."""
        candidates = self.candidates()
        if not candidates:
            return
        page_budget = AdmissionBudget(self._requests)
        passed: list[Sequence] = []
        prefills = [sequence for sequence in self._requests.running if sequence.committed < sequence.target]
        for sequence in self._with_adapters(candidates, passed):
            if not self._requests.free_slots:
                return
            hit = self._allocator.find(sequence)
            left = len(sequence.tokens) - hit.count * self._allocator.page
            waits_for_mask = sequence.waits and left < 2  # nothing can be computed before its mask comes
            if waits_for_mask or self._allocator.being_computed(sequence, hit, prefills, self._gain):
                continue
            holds_up = sequence.overtaken >= self._policy.overtaking
            long = [other for other in prefills if other.target - other.planned > self._budget] if left > self._budget else []
            if (len(long) >= self._policy.long and not holds_up) or not page_budget.fits(sequence, hit):
                if holds_up:
                    return
                passed.append(sequence)
                continue
            if sequence.media.lacks_data(hit.count * self._allocator.page):
                self._requests.lose_media(sequence)
                continue
            if not self._fits_plan(sequence, len(hit.full) + len(hit.tail)):
                return
            self._admit(sequence, hit)
            page_budget.reserve(sequence)
            for other in passed:
                other.overtaken += 1
            yield sequence
            prefills.append(sequence)

    def _with_adapters(self, candidates: list[Sequence], passed: list[Sequence]) -> Iterator[Sequence]:
        """Yields requests whose adapters are on the device, and asks for the others. One without a
        free adapter slot is `passed`, or blocks all later ones."""
        adapters = self._requests.adapters
        kept = {sequence.adapter for sequence in self._requests.running}  # their slots are not free
        for sequence in candidates:
            if adapters.is_ready(sequence.adapter):
                kept.add(sequence.adapter)
                yield sequence
            elif not adapters.want(sequence.adapter, kept):
                if sequence.overtaken >= self._policy.overtaking:
                    return
                passed.append(sequence)

    def _admit(self, sequence: Sequence, hit: Hit) -> None:
        self._requests.admit(sequence)
        self._allocator.attach(sequence, hit, self._plan)
        self._add_to_plan(sequence)
        if sequence.pages.first_cached < 0:
            sequence.pages.first_cached = sequence.committed
            self._requests.started.append(sequence.id)
            if not sequence.scores:
                self._requests.counters.queried_tokens += len(sequence.tokens)
                self._requests.counters.hit_tokens += sequence.committed
