"""Decides the next plan and folds results back. Pure: no clock, no sockets, no torch.

Per call of `schedule`, oldest request first:

    1. release   sliding pages that no later position of a sequence can see
    2. run       one decode row, or one prefill chunk within the step's budget, for each running sequence
    3. admit     from the head of the queue, while slots, pages and budget last

A sequence short of pages shrinks its chunk, then preempts the youngest sequence younger than itself, else sits the step out.
The oldest therefore always advances: its worst case fits the empty pools (or it was refused), and everybody else can be preempted.
Pages given back while step n runs are first named in a later plan; ranks run plans in order on one stream, so whatever step n still
writes there comes before the new owner's writes, and no lock is needed.
"""

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.pages import PagePool, PageRun
from engine.core.sequence import Key, Sequence
from engine.geometry import KVGroup
from engine.plan import Admission, PageAppend, PageRelease, PrefillChunk, ResultRow, StepPlan, StepResult
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
class Counters:
    """Since boot. received = finished + refused + aborted + failed + (waiting + running)."""

    received: int = 0
    finished: int = 0
    refused: int = 0
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class _Row(NamedTuple):
    """A row of a plan in flight: whose it was when it was planned, and how far it computes."""

    sequence: Sequence
    number: int
    end: int
    samples: bool

    @property
    def stale(self) -> bool:
        return self.sequence.number != self.number


class _Flight(NamedTuple):
    """A plan whose result has not come."""

    step: int
    rows: list[_Row]
    prefill_tokens: int
    decode_tokens: int


@dataclass
class _Draft:
    """A plan being made."""

    plan: StepPlan
    budget: int
    chunk_rows: list[_Row] = field(default_factory=list)
    decode_rows: list[_Row] = field(default_factory=list)


class Scheduler:
    """Call `schedule` for the next plan and `commit` with each plan's result, in order; collect what clients get in `drain`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pools = [PagePool(group, pages) for group, pages in zip(config.groups, config.pages, strict=True)]
        self.counters = Counters()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._by_key: dict[Key, Sequence] = {}
        self._slots = list(range(config.max_seqs - 1, -1, -1))
        self._in_flight: deque[_Flight] = deque()
        self._outputs: list[tuple[int, Output]] = []
        self._releases: list[PageRelease] = []  # made when no plan went out; the next plan carries them
        self._arrivals = 0
        self._admissions = 0
        self._step = 0  # of the last plan
        self._done = 0  # of the last result

    # -- requests in, outputs out

    def refuse(self, client: int, request: int, reason: str) -> None:
        """Count and answer a request that could not even be read."""
        self.counters.received += 1
        self._refuse(client, request, reason)

    def add(self, client: int, request: GenerateRequest) -> None:
        """Queue a request, or refuse it at once when it can never run here."""
        self.counters.received += 1
        key = (client, request.id)
        limit, refusal = self._limit(request)
        if key in self._by_key:
            refusal = f"request id {request.id} is already in use"
        if refusal is not None:
            self._refuse(client, request.id, refusal)
            return
        self._arrivals += 1
        sequence = Sequence(key, list(request.prompt), len(request.prompt), limit, request.params, self._arrivals)
        self._by_key[key] = sequence
        self._enqueue(sequence)

    def _refuse(self, client: int, request: int, reason: str) -> None:
        self.counters.refused += 1
        self._emit(client, Output(id=request, finish=FinishReason.error, error=reason, invalid=True))

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
        fits = self._longest()
        if limit > fits and (prompt + 1 > fits or not request.clip):
            return 0, f"the request needs room for {limit} tokens; the KV cache holds at most {fits} of one request"
        return min(limit, fits), None

    def _longest(self) -> int:
        """Tokens of the longest sequence that fits the empty pools; its last token needs no page."""
        return min(pool.total * pool.group.page for pool in self.pools if pool.group.window is None) + 1

    def abort(self, client: int, request: int, reason: AbortReason) -> None:
        """End a request at whatever stage it is; unknown ids are fine. A stop string is a success."""
        sequence = self._by_key.get((client, request))
        if sequence is None:
            return
        success = reason is AbortReason.stop_string
        self._end(sequence, Output(id=request, finish=FinishReason.stop if success else FinishReason.abort))

    def drain(self) -> Iterator[tuple[int, Output]]:
        """What clients are to be told since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return iter(outputs)

    @property
    def in_flight(self) -> int:
        """Plans scheduled and not yet committed."""
        return len(self._in_flight)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.waiting) + len(self.running)

    # -- the next plan

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when no sequence can use a step now (all wait for results, or there are none)."""
        draft = _Draft(StepPlan(step=self._step + 1, releases=self._releases), self.config.prefill_budget)
        for sequence in self.running:
            if sequence.scheduled >= sequence.quiet:
                self._release_dead(sequence, draft.plan)
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
        self._in_flight.append(_Flight(self._step, rows, self.config.prefill_budget - draft.budget, len(draft.decode_rows)))
        return draft.plan

    def _release_dead(self, sequence: Sequence, plan: StepPlan) -> None:
        """Give back the pages before the window of the next position to run."""
        if sequence.exhausted:
            return
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            first = pool.group.pages_for(sequence.scheduled, sequence.scheduled + 1).start
            at = run.first
            dropped = run.drop_before(first)
            if dropped:
                pool.give(dropped)
                plan.releases.append(PageRelease(pool.group.index, sequence.slot, at, len(dropped)))

    def _run(self, sequence: Sequence, draft: _Draft) -> None:
        """Plan the sequence's next chunk or decode row, if it has one and the pages for it."""
        if sequence.prefilling:
            self._prefill(sequence, draft)
        elif not sequence.exhausted and self._room_for_one(sequence, draft.plan):
            sequence.scheduled += 1
            draft.plan.decodes.append(sequence.slot)
            draft.decode_rows.append(_Row(sequence, sequence.number, sequence.scheduled, samples=True))

    def _room_for_one(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Pages for the next position, held. Most positions need no work: their page is held and nothing leaves the window."""
        if sequence.scheduled < sequence.quiet:
            return True
        if not self._make_room(sequence):
            return False
        self._hold(sequence, sequence.scheduled + 1, plan)
        sequence.quiet = min(map(_quiet_before, self.pools, sequence.runs))
        return True

    def _prefill(self, sequence: Sequence, draft: _Draft) -> None:
        wanted = min(sequence.target - sequence.scheduled, draft.budget)
        if wanted < 1:
            return
        size = self._fitting(sequence, wanted, headroom=len(self.running) - 1) or self._fitting(sequence, wanted)
        if not size and self._make_room(sequence):
            size = 1
        if size:
            self._chunk(sequence, size, draft)

    def _chunk(self, sequence: Sequence, size: int, draft: _Draft) -> None:
        start, end = sequence.scheduled, sequence.scheduled + size
        self._hold(sequence, end, draft.plan)
        sequence.scheduled = end
        draft.budget -= size
        samples = end == sequence.target
        draft.plan.chunks.append(PrefillChunk(sequence.slot, start, end, end - 1 if samples else end))
        draft.chunk_rows.append(_Row(sequence, sequence.number, end, samples))

    # -- pages

    def _fitting(self, sequence: Sequence, wanted: int, headroom: int = 0) -> int:
        """The largest chunk up to `wanted` that the free pages allow; 0 when not even one token fits."""
        start = sequence.scheduled
        room = wanted
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            held = (run.end + max(0, pool.free - headroom)) * pool.group.page
            room = min(room, held - start)
        return max(0, room)

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt younger sequences, youngest first, until the next position has pages; False if that is not enough."""
        while not self._fitting(sequence, 1):
            youngest = self.running[-1]
            if youngest is sequence:
                return False
            self._preempt(youngest)
        return True

    def _hold(self, sequence: Sequence, end: int, plan: StepPlan) -> None:
        """Append the pages for positions up to `end` to the sequence's tables."""
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            if not run.pages:
                run.first = pool.group.pages_for(sequence.scheduled, end).start
            at = run.end
            pages = pool.take(run.missing(-(-end // pool.group.page)))
            run.pages += pages
            group = pool.group.index
            plan.appends.extend(PageAppend(group, sequence.slot, at + i, page) for i, page in enumerate(pages))

    # -- queue

    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.arrival)

    def _admit(self, draft: _Draft) -> None:
        """Admit from the head of the queue only, so that nobody is overtaken."""
        while self.waiting and self._slots and draft.budget and self._has_pages(self.waiting[0]):
            sequence = self.waiting.pop(0)
            self._admissions += 1
            sequence.admit(self._slots.pop(), self._admissions, len(self.pools))
            bisect.insort(self.running, sequence, key=lambda running: running.arrival)
            draft.plan.admissions.append(
                Admission(sequence.slot, sequence.number, list(sequence.tokens), sequence.prompt, sequence.params)
            )
            self._prefill(sequence, draft)

    def _has_pages(self, sequence: Sequence) -> bool:
        """All known tokens fit what running prefills leave, with a page to grow for everybody; anything fits empty pools."""
        if not self.running:
            return True
        for index, pool in enumerate(self.pools):
            promised = sum(self._outstanding(running, index) for running in self.running)
            need = pool.group.worst_pages(len(sequence.tokens) + 1)
            if need + promised + len(self.running) > pool.free:
                return False
        return True

    def _outstanding(self, sequence: Sequence, index: int) -> int:
        """Pages a running prefill still has to take in pool `index`."""
        if not sequence.prefilling:
            return 0
        return max(0, self.pools[index].group.worst_pages(sequence.target + 1) - len(sequence.runs[index].pages))

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self._vacate(sequence)
        self._enqueue(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Take slot and pages back; rows of this admission still in flight become stale."""
        for pool, run in zip(self.pools, sequence.runs, strict=True):
            pool.give(run.pages)
        self.running.remove(sequence)
        self._slots.append(sequence.leave())

    # -- results

    def commit(self, result: StepResult) -> None:
        """Fold one result in. Rows of sequences that were preempted or ended since are dropped."""
        step, rows, prefill_tokens, decode_tokens = self._in_flight.popleft()
        assert result.step == step, (result.step, step)
        self._done = step
        self.counters.prefill_tokens += prefill_tokens
        self.counters.decode_tokens += decode_tokens
        results = iter(result.rows)
        for row in rows:
            outcome = next(results) if row.samples else None
            if row.stale:
                continue
            row.sequence.committed = row.end
            if outcome is not None:
                assert (outcome.slot, outcome.number) == (row.sequence.slot, row.number & 0x7FFFFFFF), (outcome, row)
                self._take(row.sequence, outcome)
        assert next(results, None) is None, f"step {step} gave more rows than it had"

    def _take(self, sequence: Sequence, row: ResultRow) -> None:
        """Append the row's tokens up to the first that ends the sequence, and tell its client."""
        request = sequence.key[1]
        if row.nan:
            self._end(sequence, Output(id=request, finish=FinishReason.error, error="the model's logits were not finite"))
            return
        taken: list[int] = []
        finish: FinishReason | None = None
        for token in row.tokens:
            taken.append(token)
            sequence.tokens.append(token)
            finish = self._finish(sequence, token)
            if finish:
                break
        logprobs = [] if row.logprobs is None else [row.logprobs]
        output = Output(id=request, tokens=taken, logprobs=logprobs, finish=finish)
        if finish:
            self._end(sequence, output)
        else:
            self._emit(sequence.key[0], output)

    def _finish(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.params
        generated = len(sequence.tokens) - sequence.prompt
        if token in params.stop_ids and generated > params.min_tokens:
            return FinishReason.stop
        return FinishReason.length if len(sequence.tokens) >= sequence.limit else None

    def _end(self, sequence: Sequence, output: Output) -> None:
        """The one place where a request ends."""
        assert not sequence.ended, sequence
        sequence.ended = True
        if sequence.running:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        del self._by_key[sequence.key]
        self._count(output.finish)
        self._emit(sequence.key[0], output)

    def _count(self, finish: FinishReason | None) -> None:
        if finish is FinishReason.abort:
            self.counters.aborted += 1
        elif finish is FinishReason.error:
            self.counters.failed += 1
        else:
            self.counters.finished += 1

    def _emit(self, client: int, output: Output) -> None:
        self._outputs.append((client, output))

    def load(self) -> Load:
        """The figures that admission and metrics see."""
        counters = self.counters
        return Load(
            step=self._done,
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


def _quiet_before(pool: PagePool, run: PageRun) -> int:
    """The first position that needs another page of this group, or no longer needs the first one held."""
    group = pool.group
    full = run.end * group.page
    return full if group.window is None else min(full, (run.first + 1) * group.page + group.window - 1)
