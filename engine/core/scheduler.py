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
from engine.core.allocator import Allocator
from engine.core.pages import PagePool
from engine.core.requests import Counters, Requests
from engine.core.results import ChunkRow, DecodeRow, Flight, Results
from engine.core.sequence import Key, Sequence, Wait
from engine.geometry import KVGroup
from engine.plan import Admission, PageRelease, PrefillChunk, StepPlan, StepResult
from engine.protocol import MAX_STOP_IDS, AbortReason, FinishReason, GenerateRequest, Load, Output, PoolLoad


@dataclass(frozen=True)
class SchedulerConfig:
    """`pages` counts each group's pages with its null page; `prefill_budget` is in tokens a step, over all sequences.

    `drafts`: tokens that a decode row guesses beyond its own; it gives between one and 1 + drafts.
    """

    groups: tuple[KVGroup, ...]
    pages: tuple[int, ...]
    max_seqs: int
    max_len: int
    prefill_budget: int
    drafts: int = 0


@dataclass
class _Draft:
    """A plan being made, and what it leaves in flight."""

    plan: StepPlan
    flight: Flight
    budget: int


class Scheduler:
    """Call `schedule` for the next plan and `commit` with each plan's result, in order; collect what clients get in `drain`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._width = 1 + config.drafts
        self._allocator = Allocator(config.groups, config.pages, self._width)
        self._requests = Requests(self._allocator, config.max_seqs)
        self._results = Results(self._requests, self._width)
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
        key = (client, request.id)
        tokens, refusal = _prompt(request)
        limit = 0
        if refusal is None:
            limit, refusal = self._limit(request, len(tokens))
        if key in self._requests:
            refusal = f"request id {request.id} is already in use"
        if refusal is not None:
            self._requests.refuse(client, request.id, refusal)
            return
        self._arrivals += 1
        self._requests.add(Sequence(key, tokens, len(tokens), limit, request.params, self._arrivals, masked))

    def _limit(self, request: GenerateRequest, prompt: int) -> tuple[int, str | None]:
        """(length at which a request with so many prompt tokens ends, why it is refused)."""
        max_len = self.config.max_len
        if not prompt:
            return 0, "the prompt is empty"
        if len(request.params.stop_ids) > MAX_STOP_IDS:
            return 0, f"{len(request.params.stop_ids)} stop ids, end ids included; at most {MAX_STOP_IDS} are possible"
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
        draft = _Draft(StepPlan(step=self._step + 1, releases=self._releases), Flight(self._step + 1), self.config.prefill_budget)
        self._release(draft.plan)
        for sequence in list(self.running):
            if sequence.running:
                self._run(sequence, draft)
        self._admit(draft)
        if not draft.flight.chunks and not draft.flight.decodes:
            assert not draft.plan.admissions, "a sequence was admitted without a row"
            return None
        self._releases = []
        self._step += 1
        draft.flight.prefill_tokens = self.config.prefill_budget - draft.budget
        self._results.expect(draft.flight)
        return draft.plan

    def _release(self, plan: StepPlan) -> None:
        for sequence in self.running:
            if sequence.low >= sequence.release_at:
                plan.releases.extend(self._allocator.release(sequence))

    def _run(self, sequence: Sequence, draft: _Draft) -> None:
        """Plan the sequence's next chunk or decode row, if it has one and the pages for it."""
        if sequence.prefilling:
            self._prefill(sequence, draft)
        elif not (sequence.exhausted or sequence.waits_for) and self._hold_row(sequence, draft.plan):
            sequence.high += self._width
            draft.plan.decodes.append(sequence.slot)
            draft.flight.decodes.append(DecodeRow(sequence, sequence.number))
            self._sampled(sequence)

    def _hold_row(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Pages for the next decode row, if it can have them; most rows find theirs held."""
        end = sequence.high + self._width
        if end > sequence.held:
            if not self._make_room(sequence, self._width):
                return False
            plan.appends.extend(self._allocator.hold(sequence, end))
        return True

    def _prefill(self, sequence: Sequence, draft: _Draft) -> None:
        wanted = min(sequence.ready, draft.budget)
        if wanted < 1:
            return
        fitting = self._allocator.fitting
        size = fitting(sequence, wanted, headroom=len(self.running) - 1) or fitting(sequence, wanted)
        if not size and self._make_room(sequence, 1):
            size = 1
        if size:
            self._chunk(sequence, size, draft)

    def _chunk(self, sequence: Sequence, size: int, draft: _Draft) -> None:
        start, end = sequence.high, sequence.high + size
        draft.plan.appends.extend(self._allocator.hold(sequence, end))
        sequence.high = end
        draft.budget -= size
        samples = end == sequence.target
        draft.plan.chunks.append(PrefillChunk(sequence.slot, start, end, end - 1 if samples else end))
        draft.flight.chunks.append(ChunkRow(sequence, sequence.number, end, samples))
        if samples:
            self._sampled(sequence)

    def _sampled(self, sequence: Sequence) -> None:
        """A row that gives a token is planned; with a mask, the next one waits for what the host makes of it."""
        if sequence.masked:
            sequence.waits_for = Wait.mask

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
            if not (self._requests.free_slots and draft.budget and policy.fits(sequence, self.running, self._allocator)):
                return
            self._requests.admit(sequence)
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


def _prompt(request: GenerateRequest) -> tuple["array[int]", str | None]:
    """(the prompt's tokens, why they cannot be read)."""
    try:
        return request.tokens, None
    except ValueError as error:
        return array("i"), f"the prompt could not be read: {error}"
