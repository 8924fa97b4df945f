"""Decides the next plan. Pure: no clock, no sockets, no torch.

Per call of `schedule`, oldest request first:

    1. release   sliding pages that no later position of a sequence can see
    2. run       one decode row, or one prefill chunk within the step's budget, for each running sequence
    3. admit     from the head of the queue, while slots, pages and budget last

A sequence short of pages shrinks its chunk, then preempts the youngest sequence younger than itself, else sits the step out.
The oldest therefore always advances: its worst case fits the empty pools (or it was refused), and everybody else can be preempted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.core import policy
from engine.core.allocator import Allocator
from engine.core.pages import PagePool
from engine.core.requests import Counters, Requests
from engine.core.results import Flight, Results, Row
from engine.core.sequence import Sequence
from engine.geometry import KVGroup
from engine.plan import Admission, PageRelease, PrefillChunk, StepPlan, StepResult
from engine.protocol import AbortReason, FinishReason, GenerateRequest, Load, Output, PoolLoad


@dataclass(frozen=True)
class SchedulerConfig:
    """`pages` counts each group's pages with its null page; `prefill_budget` is in tokens a step, over all sequences."""

    groups: tuple[KVGroup, ...]
    pages: tuple[int, ...]
    max_seqs: int
    max_len: int
    prefill_budget: int


@dataclass
class _Draft:
    """A plan being made."""

    plan: StepPlan
    budget: int
    chunk_rows: list[Row] = field(default_factory=list)
    decode_rows: list[Row] = field(default_factory=list)


class Scheduler:
    """Call `schedule` for the next plan and `commit` with each plan's result, in order; collect what clients get in `drain`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._allocator = Allocator(config.groups, config.pages)
        self._requests = Requests(self._allocator, config.max_seqs)
        self._results = Results(self._requests)
        self._releases: list[PageRelease] = []  # made when no plan went out; the next plan carries them
        self._arrivals = 0
        self._step = 0  # of the last plan

    # -- what it holds

    @property
    def pools(self) -> list[PagePool]:
        """One pool per KV group."""
        return self._allocator.pools

    @property
    def counters(self) -> Counters:
        """What has happened since boot."""
        return self._requests.counters

    @property
    def waiting(self) -> list[Sequence]:
        """The queue, oldest first."""
        return self._requests.waiting

    @property
    def running(self) -> list[Sequence]:
        """Who has a slot, oldest first."""
        return self._requests.running

    @property
    def in_flight(self) -> int:
        """Plans scheduled and not yet committed."""
        return self._results.in_flight

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self._requests.unfinished

    # -- requests in, outputs out

    def refuse(self, client: int, request: int, reason: str) -> None:
        """Count and answer a request that could not even be read."""
        self.counters.received += 1
        self._requests.refuse(client, request, reason)

    def add(self, client: int, request: GenerateRequest) -> None:
        """Queue a request, or refuse it at once when it can never run here."""
        self.counters.received += 1
        key = (client, request.id)
        limit, refusal = self._limit(request)
        if key in self._requests:
            refusal = f"request id {request.id} is already in use"
        if refusal is not None:
            self._requests.refuse(client, request.id, refusal)
            return
        self._arrivals += 1
        self._requests.add(Sequence(key, list(request.prompt), len(request.prompt), limit, request.params, self._arrivals))

    def _limit(self, request: GenerateRequest) -> tuple[int, str | None]:
        """(length at which the request ends, why it is refused)."""
        prompt, max_len = len(request.prompt), self.config.max_len
        if not prompt:
            return 0, "the prompt is empty"
        if request.params.max_tokens < 1:
            return 0, f"max_tokens must be at least 1, not {request.params.max_tokens}"
        if prompt + 1 > max_len:
            return 0, f"the prompt has {prompt} tokens; with one to generate it exceeds the context of {max_len}"
        limit = min(prompt + request.params.max_tokens, max_len)
        fits = self._allocator.longest()
        if limit > fits and (prompt + 1 > fits or not request.clip):
            return 0, f"the request needs room for {limit} tokens; the KV cache holds at most {fits} of one request"
        return min(limit, fits), None

    def abort(self, client: int, request: int, reason: AbortReason) -> None:
        """End a request at whatever stage it is; unknown ids are fine. A stop string is a success."""
        sequence = self._requests.find((client, request))
        if sequence is None:
            return
        success = reason is AbortReason.stop_string
        self._requests.end(sequence, Output(id=request, finish=FinishReason.stop if success else FinishReason.abort))

    def drain(self) -> Iterator[tuple[int, Output]]:
        """What clients are to be told since the last call, in order."""
        return self._requests.drain()

    def commit(self, result: StepResult) -> None:
        """Fold one result in; results come in the order of their plans."""
        self._results.commit(result)

    # -- the next plan

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when no sequence can use a step now (all wait for results, or there are none)."""
        draft = _Draft(StepPlan(step=self._step + 1, releases=self._releases), self.config.prefill_budget)
        for sequence in self.running:
            if sequence.scheduled >= sequence.quiet:
                draft.plan.releases.extend(self._allocator.release_dead(sequence))
        for sequence in list(self.running):
            if sequence.running:
                self._run(sequence, draft)
        self._admit(draft)
        rows = draft.chunk_rows + draft.decode_rows
        if not rows:
            assert not draft.plan.admissions, "a sequence was admitted without a row"
            return None
        self._releases = []
        self._step += 1
        self._results.expect(Flight(self._step, rows, self.config.prefill_budget - draft.budget, len(draft.decode_rows)))
        return draft.plan

    def _run(self, sequence: Sequence, draft: _Draft) -> None:
        """Plan the sequence's next chunk or decode row, if it has one and the pages for it."""
        if sequence.prefilling:
            self._prefill(sequence, draft)
        elif not sequence.exhausted and self._room_for_one(sequence, draft.plan):
            sequence.scheduled += 1
            draft.plan.decodes.append(sequence.slot)
            draft.decode_rows.append(Row(sequence, sequence.number, sequence.scheduled, samples=True))

    def _room_for_one(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Pages for the next position, held. Most positions need no work: their page is held and nothing leaves the window."""
        if sequence.scheduled < sequence.quiet:
            return True
        if not self._make_room(sequence):
            return False
        plan.appends.extend(self._allocator.hold_next(sequence))
        return True

    def _prefill(self, sequence: Sequence, draft: _Draft) -> None:
        wanted = min(sequence.target - sequence.scheduled, draft.budget)
        if wanted < 1:
            return
        fitting = self._allocator.fitting
        size = fitting(sequence, wanted, headroom=len(self.running) - 1) or fitting(sequence, wanted)
        if not size and self._make_room(sequence):
            size = 1
        if size:
            self._chunk(sequence, size, draft)

    def _chunk(self, sequence: Sequence, size: int, draft: _Draft) -> None:
        start, end = sequence.scheduled, sequence.scheduled + size
        draft.plan.appends.extend(self._allocator.hold(sequence, end))
        sequence.scheduled = end
        draft.budget -= size
        samples = end == sequence.target
        draft.plan.chunks.append(PrefillChunk(sequence.slot, start, end, end - 1 if samples else end))
        draft.chunk_rows.append(Row(sequence, sequence.number, end, samples))

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt younger sequences, youngest first, until the next position has pages; False if that is not enough."""
        while not self._allocator.fitting(sequence, 1):
            youngest = self.running[-1]
            if youngest is sequence:
                return False
            self._requests.preempt(youngest)
        return True

    def _admit(self, draft: _Draft) -> None:
        """Admit from the head of the queue only, so that nobody is overtaken."""
        while self.waiting and self._requests.free_slots and draft.budget:
            if not policy.fits(self.waiting[0], self.running, self.pools):
                return
            sequence = self._requests.admit()
            draft.plan.admissions.append(
                Admission(sequence.slot, sequence.number, list(sequence.tokens), sequence.prompt, sequence.params)
            )
            self._prefill(sequence, draft)

    def load(self) -> Load:
        """The figures that admission and metrics see."""
        counters = self.counters
        return Load(
            step=self._results.done,
            waiting=len(self.waiting),
            running=len(self.running),
            waiting_tokens=sum(len(sequence.tokens) for sequence in self.waiting),
            preemptions=counters.preemptions,
            received=counters.received,
            finished=counters.finished,
            refused=counters.refused,
            aborted=counters.aborted,
            failed=counters.failed,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            pools=[PoolLoad(name=pool.group.name, total=pool.total, used=pool.used) for pool in self.pools],
        )
