"""One answer over HTTP: whole, or as server-sent events.

    submit -> first delta -> headers + first chunk -> all that has accumulated, one chunk at a time -> finish, usage, [DONE]

Headers wait for the engine's first output, so a refusal is a plain 4xx (with `limits.comment_s`,
perhaps an error event). A stream ends with `[DONE]`, an error event, or nothing if the client left.
Tokens accumulate only while a write waits. All streams' events of a step are made before the first
is written (DeltaReader), so the ingress wakes up once a step.
"""

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from functools import partial

from msgspec import structs
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.edge.answers.response_format import ResponseFormat, Usage
from deploy.edge.http.bounded import bounded, finish, start
from deploy.edge.http.http_errors import DeadlineExceeded
from deploy.edge.http.scope import server_send
from deploy.edge.observe.record import RequestRecord, record_of
from deploy.edge.serving.service import Service
from engine.errors import Overloaded, QuartetError, SlowReader
from engine.front.generation import Delta, DeltaReader, Generation, Job
from engine.protocol import AbortReason

Deltas = Iterator[tuple[int, Delta]]  # of choices
Events = tuple[bytes, Deltas | None]  # what the client reads, and the deltas that are still to be made such

_PIECE_BYTES = 1 << 16  # of a stream's events that are made in one go
_COMMENT = b": waiting\n\n"
# Clients that split a text into lines as Unicode does would cut an event at one of these, which JSON leaves as they are.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class CompletionResponse(Response):
    def __init__(self, service: Service, job: Job, form: ResponseFormat, *, stream: bool) -> None:
        super().__init__(media_type=form.media_type)
        self._service = service
        self._limits = service.settings.limits
        self._job = job
        self._format = form
        self._streams = stream
        self._media_tokens = job.media_tokens
        self._generations: list[Generation] = []
        self._tokens = 0
        self._begun = self._started = False
        self._is_silent = True  # nothing was written since the last comment
        self._unsent: Awaitable[None] | None = None
        self._stuck = False
        self._late: QuartetError = DeadlineExceeded(f"The request took longer than {self._limits.request_timeout_s:g} s.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. If the client leaves first, abort in the engine."""
        await self._note(record_of(scope))
        with self._service.answering(len(self._job.params)):
            work = asyncio.ensure_future(self._serve(send))
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                self._record.gone = not work.done()
                if work.done():
                    work.result()
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
                self._abort(AbortReason.client_gone)

    async def _note(self, record: RequestRecord) -> None:
        """Record what is known before the first token, and charge the API key. QuotaExceeded."""
        self._record = record
        record.model = self._service.settings.name
        record.answer = self._format.id
        record.stream = self._streams
        record.choices = len(self._job.params)
        record.max_tokens = self._job.params[0].max_tokens
        record.prompt_tokens = self._job.prompt_tokens
        if record.grant is not None:
            await record.grant.reserve(record.prompt_tokens + sum(params.max_tokens for params in self._job.params))

    async def _serve(self, send: Send) -> None:
        wait_s = self._limits.queue_timeout_s
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_at(self._record.deadline, self._abort, AbortReason.deadline),
            loop.call_later(wait_s, self._refuse, f"has waited {wait_s:g} s for its turn"),
        ]
        try:
            self._submit()
            await (self._stream(send) if self._streams else self._whole(send))
            if not self._is_complete:  # an aborted generation ends without a word, and only the timers abort one from outside
                await self._fail(self._late, send)
        except QuartetError as error:
            await self._fail(error, send)
        finally:
            for timer in timers:
                timer.cancel()

    def _submit(self) -> None:
        """Submit all choices."""
        for choice in range(len(self._job.params)):
            generation = Generation(self._service.engine, self._service.text, self._job, choice)
            self._generations.append(generation)
            self._record.clocks.append(generation.clock)
        self._job = replace(self._job, media=())  # the engine's now: they are large
        if self._record.ticket is not None:
            self._record.ticket.submitted(self._record.clocks, partial(self._refuse, "has given way to other clients'"))

    def _refuse(self, why: str) -> None:
        if all(clock.scheduled is None for clock in self._record.clocks):
            self._late = Overloaded(f"The request {why}; please try again shortly.")
            self._abort(AbortReason.queue_timeout)

    async def _whole(self, send: Send) -> None:
        """Sends nothing if some choice has no end."""
        reader: DeltaReader[Deltas] = DeltaReader(self._generations, iter)
        while not reader.has_ended:
            for index, delta in await reader.next():
                self._count(index, delta)
                self._format.add(index, delta)
                if delta.prompt is not None:
                    await asyncio.sleep(0)  # others' turn: there may be many
        if not self._is_complete:
            return
        reply = Response(self._format.full(self._usage()), media_type=self.media_type)
        await send({"type": "http.response.start", "status": 200, "headers": reply.raw_headers})
        await send({"type": "http.response.body", "body": reply.body})

    async def _stream(self, send: Send) -> None:
        """Sends no end if some choice has none."""
        self._send_more = server_send() or self._record.send
        reader = DeltaReader(self._generations, self._events, self._put)
        comments = asyncio.ensure_future(self._comment(send))
        try:
            while not reader.has_ended:
                events, rest = await reader.next()
                while True:
                    await self._write(events, send, more=not self._is_complete)
                    if rest is None:
                        break
                    await asyncio.sleep(0)  # others' turn
                    events, rest = self._events(rest)
        finally:
            comments.cancel()

    async def _comment(self, send: Send) -> None:
        if not (pause_s := self._limits.comment_s):
            return
        while True:
            await asyncio.sleep(pause_s)
            if self._is_silent and self._unsent is None and not self._stuck:
                try:
                    await self._write(_COMMENT, send, more=True)
                except SlowReader as error:
                    self._late = error
                    return
            self._is_silent = True

    def _put(self, made: Events) -> Events | None:
        """Write a chunk now, outside the answer's task; return what remains to be awaited."""
        events, rest = made
        if rest is not None or self._is_complete or not self._started:
            return made
        if events:
            self._is_silent = False
            self._unsent = start(self._send_more({"type": "http.response.body", "body": events, "more_body": True}))
        return None if self._unsent is None else (b"", None)

    def _events(self, deltas: Deltas) -> Events:
        """Up to _PIECE_BYTES of events (some milliseconds of work), and the rest."""
        events = b""
        for index, delta in deltas:
            events += b"" if self._begun else self._format.begin(structs.replace(self._usage(), reasoning=0))
            self._begun = True
            self._count(index, delta)
            events += self._format.events(index, delta)
            if len(events) > _PIECE_BYTES and not self._is_complete:
                return _in_lines(events), deltas
        return _in_lines(events + self._format.end(self._usage()) if self._is_complete else events), None

    def _count(self, index: int, delta: Delta) -> None:
        self._tokens += len(delta.tokens)
        if delta.finish is not None:
            self._record.finishes[index] = delta.finish
        if self._is_complete:
            self._record.output_tokens = self._tokens

    @property
    def _is_complete(self) -> bool:
        return len(self._record.finishes) == len(self._job.params)

    def _usage(self) -> Usage:
        """Usage of all choices. A prompt token counts as cached only if no choice computed it."""
        cached = [generation.cached for generation in self._generations]
        per_prompt = self._job.choices_each
        cached_tokens = sum(min(cached[first : first + per_prompt]) for first in range(0, len(cached), per_prompt))
        counts = [(generation.reasoning_tokens, generation.accepted, generation.rejected) for generation in self._generations]
        reasoning, accepted, rejected = map(sum, zip(*counts, strict=True))
        return Usage(self._job.prompt_tokens, self._tokens, cached_tokens, reasoning, self._media_tokens, accepted, rejected)

    async def _write(self, body: bytes, send: Send, *, more: bool) -> None:
        """Write one chunk, bypassing middleware; the first brings the headers."""
        unsent, self._unsent = self._unsent, None
        self._is_silent = False
        timeout_s = self._limits.write_timeout_s
        try:
            await finish(unsent, timeout_s)
            if more and not body:
                return
            if not self._started:
                self._started = True
                await bounded(send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}), timeout_s)
            send = self._send_more if more else self._record.send
            await bounded(send({"type": "http.response.body", "body": body, "more_body": more}), timeout_s)
        except TimeoutError as error:
            self._stuck = True
            self._abort(AbortReason.slow_reader)
            raise SlowReader(f"the client took nothing for {timeout_s:g} s") from error

    async def _fail(self, error: QuartetError, send: Send) -> None:
        """Its own reply before the headers, the last event after them, nothing to a stuck client."""
        self._record.error = error
        if not self._started:
            raise error
        if not self._stuck:
            await self._write(_in_lines(self._format.failure(error)), send, more=False)

    def _abort(self, reason: AbortReason) -> None:
        for generation in self._generations:
            generation.stream.abort(reason)


def _in_lines(events: bytes) -> bytes:
    for raw, escaped in _LINE_ENDS:
        events = events.replace(raw, escaped)
    return events


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
