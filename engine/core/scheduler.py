"""Decides the next plan. Pure: no clock, no sockets, no torch.

Per call of `schedule`, oldest request first:

    1. release   sliding pages that no position after the committed ones can see
    2. run       one decode row, or one prefill chunk within the step's budget, for each running sequence
    3. admit     from the head of the queue, while slots, pages and budget last

A sequence short of pages shrinks its chunk, then preempts the youngest sequence younger than itself, else sits the step out.
The oldest therefore always advances: its worst case fits the empty pools (or it was refused), and everybody else can be preempted.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from engine.core import policy
from engine.core.allocator import Allocator, Changes
from engine.core.pages import PagePool
from engine.core.prefix import PrefixCache
from engine.core.requests import Counters, Requests
from engine.core.results import ChunkRow, Flight, Results
from engine.core.sequence import Key, Sequence, Wait
from engine.geometry import KVGroup
from engine.plan import Admission, PrefillChunk, StepPlan, StepResult
from engine.protocol import AbortReason, FinishReason, GenerateRequest, Load, Output, PoolLoad

MAX_ADMITTED_TOKENS = 1 << 18  # in one plan, one sequence apart: 1 MiB of a ring record


@dataclass(frozen=True)
class SchedulerConfig:
    """`pages` counts each group's pages with its null page; `prefill_budget` is in tokens a step, over all sequences.

    `drafts`: tokens that a decode row guesses beyond its own; it gives between one and 1 + drafts. `cache_share`: how much of each
    pool the prefix cache may keep idle; None: there is no cache.
    """

    groups: tuple[KVGroup, ...]
    pages: tuple[int, ...]
    max_seqs: int
    max_len: int
    prefill_budget: int
    drafts: int = 0
    cache_share: float | None = None


@dataclass
class _Draft:
    """A plan being made, and what it leaves in flight."""

    plan: StepPlan
    changes: Changes
    flight: Flight
    budget: int
    admitted: int = 0


class Scheduler:
    """Call `schedule` for the next plan and `commit` with each plan's result, in order; collect what clients get in `drain`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._width = 1 + config.drafts
        self._worth_waiting = max(config.groups[0].page, config.prefill_budget // 8)  # tokens that another one is about to compute
        self._allocator = Allocator(config.groups, config.pages, self._width, config.cache_share)
        self._requests = Requests(self._allocator, config.max_seqs, config.max_len)
        self._results = Results(self._requests, self._width)
        self._changes = Changes()  # made when no plan went out; the next plan carries them
        self._step = 0  # of the last plan

    # -- what it holds

    @property
    def pools(self) -> list[PagePool]:
        """One pool per KV group."""
        return self._allocator.pools

    @property
    def cache(self) -> PrefixCache | None:
        """The prefix cache, if there is one."""
        return self._allocator.cache

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
    def sequences(self) -> Iterator[Sequence]:
        """All that have not ended."""
        return iter(self._requests)

    @property
    def in_flight(self) -> int:
        """Plans scheduled and not yet committed."""
        return self._results.in_flight

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self._requests.unfinished

    @property
    def stuck(self) -> bool:
        """Requests wait, nothing is in flight, and not one of them waits for the host: an invariant is broken."""
        return bool(self.unfinished) and not self.in_flight and not any(sequence.waits_for for sequence in self._requests)

    # -- requests in, outputs out

    def refuse(self, client: int, request: int, reason: str) -> None:
        """Count and answer a request that could not even be read."""
        self.counters.received += 1
        self._requests.refuse(client, request, reason)

    def add(self, client: int, request: GenerateRequest, *, masked: bool = False) -> None:
        """Queue a request, or refuse it at once when it can never run here. `masked`: each token waits for `mask_ready`."""
        assert not (masked and self.config.drafts), "a row with drafts cannot be masked token by token"
        self.counters.received += 1
        self._requests.add(client, request, masked=masked)

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

    def drain_started(self) -> list[Key]:
        """Requests that were scheduled for the first time since the last call."""
        return self._requests.drain_started()

    def commit(self, result: StepResult) -> None:
        """Fold one result in; results come in the order of their plans."""
        self._results.commit(result)

    def mask_ready(self, client: int, request: int, length: int) -> None:
        """The host has the mask of the token at index `length`; one that comes too late, or twice, changes nothing."""
        sequence = self._requests.find((client, request))
        if sequence is not None and length == len(sequence.tokens) > sequence.high:
            sequence.waits_for = None

    # -- the next plan

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when no sequence can use a step now (all wait for results or the host, or there are none)."""
        changes = self._changes
        plan = StepPlan(self._step + 1, releases=changes.releases, appends=changes.appends, zeros=changes.zeros)
        draft = _Draft(plan, changes, Flight(plan.step), self.config.prefill_budget)
        self._release(changes)
        for sequence in list(self.running):
            if sequence.slot >= 0:  # it may have been preempted by one before it
                self._run(sequence, draft)
        self._admit(draft)
        if not draft.flight.chunks and not draft.flight.decodes:
            assert not draft.plan.admissions, "a sequence was admitted without a row"
            return None
        self._changes = Changes()
        self._step += 1
        draft.flight.prefill_tokens = self.config.prefill_budget - draft.budget
        self._results.expect(draft.flight)
        return draft.plan

    def _release(self, changes: Changes) -> None:
        for sequence in self.running:
            if sequence.low >= sequence.release_at:
                self._allocator.release(sequence, changes)

    def _run(self, sequence: Sequence, draft: _Draft) -> None:
        """Plan the sequence's next chunk or decode row, if it has one and the pages for it.

        The last decode row is that of position limit - 2: once it may be planned, nothing more is.
        """
        if sequence.high < sequence.target:
            self._prefill(sequence, draft)
        elif sequence.high < sequence.limit - 1 and sequence.waits_for is None:
            end = sequence.high + self._width
            if end <= sequence.held or self._hold_row(sequence, end, draft.changes):
                sequence.high = end
                draft.plan.decodes.append(sequence.slot)
                draft.flight.decodes.append((sequence, sequence.number))
                if sequence.masked:
                    sequence.waits_for = Wait.mask

    def _hold_row(self, sequence: Sequence, end: int, changes: Changes) -> bool:
        """Pages for a decode row up to `end`, if it can have them."""
        if not self._make_room(sequence, self._width):
            return False
        self._allocator.hold(sequence, end, changes)
        return True

    def _prefill(self, sequence: Sequence, draft: _Draft, *, may_preempt: bool = True) -> None:
        wanted = min(sequence.ready, draft.budget)
        if wanted < 1:
            return
        fitting = self._allocator.fitting
        size = fitting(sequence, wanted, headroom=len(self.running) - 1) or fitting(sequence, wanted)
        if not size and may_preempt and self._make_room(sequence, 1):
            size = 1
        if size:
            self._chunk(sequence, size, draft)

    def _chunk(self, sequence: Sequence, size: int, draft: _Draft) -> None:
        start, end = sequence.high, sequence.high + size
        self._allocator.hold(sequence, end, draft.changes)
        sequence.high = end
        draft.budget -= size
        samples = end == sequence.target
        draft.plan.chunks.append(PrefillChunk(sequence.slot, start, end, end - 1 if samples else end))
        draft.flight.chunks.append(ChunkRow(sequence, sequence.number, end, samples))
        if samples and sequence.masked:
            sequence.waits_for = Wait.mask  # the next row that gives a token, until the host has made it of this one's

    def _make_room(self, sequence: Sequence, wanted: int) -> bool:
        """Preempt younger sequences, youngest first, until `wanted` positions have pages; False if that is not enough."""
        while self._allocator.fitting(sequence, wanted) < wanted:
            youngest = self.running[-1]
            if youngest is sequence:
                return False
            self._requests.preempt(youngest)
        return True

    def _admit(self, draft: _Draft) -> None:
        """Admit from the head of the queue only, so that nobody is overtaken but those who wait for the host."""
        for sequence in self._requests.admissible():
            if not (self._requests.free_slots and draft.budget):
                return
            if draft.plan.admissions and draft.admitted + len(sequence.tokens) > MAX_ADMITTED_TOKENS:
                return
            hit = self._allocator.find(sequence)
            if sequence.waits_for and hit is not None and len(sequence.tokens) - hit.count * self._allocator.page < 2:
                continue  # nothing to compute before the host has spoken
            if hit is not None and self._allocator.coming(sequence, hit, self.running, self._worth_waiting):
                continue
            if not policy.fits(sequence, hit, self.running, self._allocator):
                return
            first = not sequence.started
            self._requests.admit(sequence)
            if hit is not None:
                self._allocator.attach(sequence, hit, draft.changes)
            if first:
                self.counters.queried_tokens += len(sequence.tokens)
                self.counters.hit_tokens += sequence.cached
                sequence.found = sequence.cached
            draft.admitted += len(sequence.tokens)
            draft.plan.admissions.append(_admission(sequence))
            self._prefill(sequence, draft, may_preempt=False)  # the others have rows in this plan

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
            queried_tokens=counters.queried_tokens,
            hit_tokens=counters.hit_tokens,
            evicted_pages=self.cache.counters.evicted_pages if self.cache else 0,
            pools=[
                PoolLoad(name=pool.group.name, total=pool.total, used=pool.used, cached=pool.idle) for pool in self.pools
            ],
        )


def _admission(sequence: Sequence) -> Admission:
    tokens = array("i", sequence.tokens)
    return Admission(sequence.slot, sequence.number, tokens, sequence.prompt, sequence.params, cached=sequence.cached)
