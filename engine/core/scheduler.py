"""The scheduler: requests in, plans out, results in, outputs out. Pure: no clock, no sockets, no torch.

    add, abort --> requests --> planner --> plan ... result --> results --> outputs
                                 policy, admit, allocator (pages, prefix)
"""

from collections.abc import Iterator

from engine.core.allocator import Allocator
from engine.core.pages import PagePool
from engine.core.planner import Planner, SchedulerConfig, Width, all_drafts
from engine.core.prefix import PrefixCache
from engine.core.requests import Counters, Requests
from engine.core.results import Results
from engine.core.sequence import Key, Sequence
from engine.errors import InvalidRequest
from engine.memory import longest_sequence
from engine.plan import StepPlan, StepResult
from engine.protocol import AbortReason, FinishReason, GenerateRequest, Load, Output, PoolLoad

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Call `schedule` for the next plan and `commit` with each plan's result, in order; `drain` gives the outputs.

    width  how many tokens a sequence's next row should compute
    """

    def __init__(self, config: SchedulerConfig, width: Width = all_drafts) -> None:
        self.config = config
        self._allocator = Allocator(config.groups, config.pages, config.cache_share)
        longest = longest_sequence(config.groups, config.pages)
        self._requests = Requests(self._allocator, config.max_seqs, config.max_len, longest)
        self._results = Results(self._requests)
        self._planner = Planner(config, self._requests, self._allocator, width)

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
        """Counts since boot."""
        return self._requests.counters

    @property
    def waiting(self) -> list[Sequence]:
        """The queue, in order of precedence."""
        return self._requests.waiting

    @property
    def running(self) -> list[Sequence]:
        """Sequences with a slot, in order of precedence."""
        return self._requests.running

    @property
    def sequences(self) -> Iterator[Sequence]:
        """All sequences that have not ended."""
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
        """Requests are open, nothing is in flight, and none of them waits for the host: an invariant is broken."""
        return bool(self.unfinished) and not self.in_flight and not any(sequence.waits for sequence in self._requests)

    # -- requests in, outputs out

    def refuse(self, client: int, request: int, reason: str) -> None:
        """Count and answer a request that is not let in."""
        self.counters.received += 1
        self._requests.refuse(client, request, InvalidRequest(reason))

    def add(self, client: int, request: GenerateRequest) -> None:
        """Queue a request, or refuse it if it can never run here."""
        self.counters.received += 1
        self._requests.add(client, request)

    def abort(self, client: int, request: int, reason: AbortReason) -> None:
        """End a request at any stage; unknown ids are ignored. A stop string is a success."""
        sequence = self._requests.find((client, request))
        if sequence is None:
            return
        success = reason is AbortReason.stop_string
        self._requests.end(sequence, Output(id=request, finish=FinishReason.stop if success else FinishReason.abort))

    def drain(self) -> Iterator[tuple[int, Output]]:
        """(client, output) of everything since the last call, in order."""
        return self._requests.drain()

    def drain_started(self) -> list[Key]:
        """Requests that were scheduled for the first time since the last call."""
        return self._requests.drain_started()

    def commit(self, result: StepResult, took_ms: float | None = None) -> None:
        """Commit one result; results come in the order of their plans. `took_ms`: milliseconds since the one before it, or since
        the plan was sent if nothing was in flight then."""
        flight = self._results.commit(result)
        if took_ms is not None:
            self._planner.took(flight, took_ms)

    def find(self, client: int, request: int) -> Sequence | None:
        """A request that has not ended."""
        return self._requests.find((client, request))

    def fail(self, sequence: Sequence, error: str) -> None:
        """End a request that cannot go on; its client gets `error`."""
        self._requests.end(sequence, Output(id=sequence.key[1], finish=FinishReason.error, error=error))

    def schedule(self) -> StepPlan | None:
        """The next plan; None if no sequence can use a step now: all wait for results or the host, or there are none."""
        drafted = self._planner.next()
        if drafted is None:
            return None
        plan, flight = drafted
        self._results.expect(flight)
        return plan

    def load(self) -> Load:
        """The figures for the front's admission and for metrics."""
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
            evicted_pages=0 if self.cache is None else self.cache.evicted_pages,
            pools=[
                PoolLoad(name=pool.group.name, total=pool.total, used=pool.used, cached=pool.idle) for pool in self.pools
            ],
        )
