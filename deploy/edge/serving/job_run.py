"""Runs one job for any sink, with HTTP or without.

    make room -> charge the API key -> submit -> deltas, as they come -> end, or the first error
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from deploy.edge.answers.response_format import Usage
from deploy.edge.http.http_errors import DeadlineExceeded
from deploy.edge.observe.record import RequestRecord
from deploy.edge.serving.service import Service
from engine.errors import Overloaded, QuartetError
from engine.front.generation import Delta, DeltaReader, Generation, Job
from engine.protocol import AbortReason

TURN_BITS = 31  # of what the engine orders by: whose turn it is, among requests of one priority
Deltas = Iterator[tuple[int, Delta]]  # of choices

T = TypeVar("T")


class JobSink(Protocol[T]):
    def make(self, deltas: Deltas) -> T:
        """Convert what has come."""

    @property
    def put(self) -> Callable[[T], T | None] | None:
        """Takes it without a task switch; returns what `take` must still take."""

    async def take(self, made: T) -> None:
        ...

    async def end(self) -> None:
        ...

    async def fail(self, error: QuartetError) -> None:
        ...


@dataclass
class JobRun:
    service: Service
    job: Job
    record: RequestRecord
    _media_tokens: Mapping[str, int] = field(default_factory=dict)
    _tokens: int = 0
    _generations: list[Generation] = field(default_factory=list)
    _cause: QuartetError | None = None

    async def run(self, sink: JobSink[T]) -> None:
        """Cancelling aborts the job in the engine. Its record has a ticket."""
        with self.service.answering(len(self.job.params)):
            try:
                await self._let_in()
                await self._serve(sink)
            except QuartetError as error:
                self.record.error = error
                await sink.fail(error)

    def cut(self, error: QuartetError, reason: AbortReason) -> None:
        """End the run with this error; the first counts."""
        if self._cause is None:
            self._cause = error
            self._abort(reason)

    @property
    def is_complete(self) -> bool:
        return len(self.record.finishes) == len(self.job.params)

    @property
    def usage(self) -> Usage:
        """Of all choices. A prompt token counts as cached only if no choice computed it."""
        cached = [generation.cached for generation in self._generations]
        per_prompt = self.job.choices_each
        cached_tokens = sum(min(cached[first : first + per_prompt]) for first in range(0, len(cached), per_prompt))
        counts = [(generation.reasoning_tokens, generation.accepted, generation.rejected) for generation in self._generations]
        reasoning, accepted, rejected = map(sum, zip(*counts, strict=True))
        return Usage(self.job.prompt_tokens, self._tokens, cached_tokens, reasoning, self._media_tokens, accepted, rejected)

    async def _let_in(self) -> None:
        """Overloaded, QuotaExceeded."""
        job = self.job
        record = self.record
        ticket = record.ticket
        assert ticket is not None, "a ticket is taken before the job is made"
        choices = len(job.params)
        tokens = job.choices_each * job.prompt_tokens
        media = choices * sum(item.size for item in job.media)
        await self.service.admission.make_room(ticket.client, choices, tokens, media)
        ticket.settle(choices, tokens, media)
        self.job = replace(job, priority=(job.priority << TURN_BITS) + ticket.turn)
        record.model = self.service.settings.name
        record.choices = choices
        record.max_tokens = job.params[0].max_tokens
        record.prompt_tokens = job.prompt_tokens
        if record.grant is not None:
            await record.grant.reserve(job.prompt_tokens + sum(params.max_tokens for params in job.params))

    async def _serve(self, sink: JobSink[T]) -> None:
        limits = self.service.settings.limits
        loop = asyncio.get_running_loop()
        late = DeadlineExceeded(f"The request took longer than {limits.request_timeout_s:g} s.")
        timers = [
            loop.call_at(self.record.deadline, self.cut, late, AbortReason.deadline),
            loop.call_later(limits.queue_timeout_s, self._refuse, f"has waited {limits.queue_timeout_s:g} s for its turn"),
        ]
        try:
            self._submit()
            reader = DeltaReader(self._generations, lambda deltas: sink.make(self._counted(deltas)), sink.put)
            while not reader.has_ended:
                await sink.take(await reader.next())
            if not self.is_complete:  # an aborted generation ends without a word
                assert self._cause is not None, "only `cut` aborts a run that goes on"
                raise self._cause
            await sink.end()
        finally:
            for timer in timers:
                timer.cancel()
            self._abort(AbortReason.client_gone)

    def _submit(self) -> None:
        for choice in range(len(self.job.params)):
            generation = Generation(self.service.engine, self.service.text, self.job, choice)
            self._generations.append(generation)
            self.record.clocks.append(generation.clock)
        self._media_tokens = self.job.media_tokens
        self.job = replace(self.job, media=())  # the engine's now: they are large
        assert self.record.ticket is not None
        self.record.ticket.submitted(self.record.clocks, partial(self._refuse, "has given way to other clients'"))

    def _refuse(self, why: str) -> None:
        if all(clock.scheduled is None for clock in self.record.clocks):
            self.cut(Overloaded(f"The request {why}; please try again shortly."), AbortReason.queue_timeout)

    def _counted(self, deltas: Deltas) -> Deltas:
        for index, delta in deltas:
            self._tokens += len(delta.tokens)
            if delta.finish is not None:
                self.record.finishes[index] = delta.finish
            if self.is_complete:
                self.record.output_tokens = self._tokens
            yield index, delta

    def _abort(self, reason: AbortReason) -> None:
        for generation in self._generations:
            generation.stream.abort(reason)
