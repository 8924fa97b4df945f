"""A job's answer over HTTP: whole, or as server-sent events.

    first delta -> headers + first chunk -> all that has accumulated, one chunk at a time -> finish, usage, [DONE]

Headers wait for the first output, so a refusal is a plain 4xx (with `limits.comment_s`, perhaps an
error event). A stream ends with `[DONE]`, an error event, or nothing if the client left. All
streams' events of a step are made before the first is written (DeltaReader), so the ingress wakes
once a step.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

from msgspec import structs
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.edge.answers.response_format import ResponseFormat
from deploy.edge.http.bounded import bounded, finish, start
from deploy.edge.http.scope import SEND, server_send
from deploy.edge.observe.record import record_of
from deploy.edge.serving.job_run import Deltas, JobRun
from deploy.edge.serving.service import Service
from engine.errors import QuartetError, SlowReader
from engine.front.generation import Job
from engine.protocol import AbortReason

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
        super().__init__()
        self._service = service
        self._job = job
        self._format = form
        self._streams = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """If the client leaves first, abort in the engine."""
        record = record_of(scope)
        record.answer = self._format.id
        record.stream = self._streams
        run = JobRun(self._service, self._job, record)
        del self._job  # its media are large
        if self._streams:
            work = asyncio.ensure_future(EventStream(run, self._format, send, scope[SEND]).serve())
        else:
            work = asyncio.ensure_future(run.run(WholeAnswer(run, self._format, send)))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            record.gone = not work.done()
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


class WholeAnswer:
    """A JobSink."""

    put = None

    def __init__(self, run: JobRun, form: ResponseFormat, send: Send) -> None:
        self._run = run
        self._format = form
        self._send = send

    def make(self, deltas: Deltas) -> Deltas:
        return deltas

    async def take(self, made: Deltas) -> None:
        for index, delta in made:
            self._format.add(index, delta)
            if delta.prompt is not None:
                await asyncio.sleep(0)  # others' turn: there may be many

    async def end(self) -> None:
        reply = Response(self._format.full(self._run.usage), media_type=self._format.media_type)
        await self._send({"type": "http.response.start", "status": 200, "headers": reply.raw_headers})
        await self._send({"type": "http.response.body", "body": reply.body})

    async def fail(self, error: QuartetError) -> None:
        raise error


class EventStream:
    """A JobSink. `raw_send` bypasses middleware."""

    def __init__(self, run: JobRun, form: ResponseFormat, send: Send, raw_send: Send) -> None:
        self._run = run
        self._format = form
        self._limits = run.service.settings.limits
        self._send = send
        self._raw_send = raw_send
        self._send_more = server_send() or raw_send
        self._begun = self._started = False
        self._is_silent = True  # nothing was written since the last comment
        self._unsent: Awaitable[None] | None = None
        self._is_closed = False  # its end is being written, or the client takes nothing

    async def serve(self) -> None:
        comments = asyncio.ensure_future(self._comment())
        try:
            await self._run.run(self)
        finally:
            comments.cancel()

    def make(self, deltas: Deltas) -> Events:
        """Up to _PIECE_BYTES of events, and the rest."""
        events = b""
        for index, delta in deltas:
            events += b"" if self._begun else self._format.begin(structs.replace(self._run.usage, completion=0, reasoning=0))
            self._begun = True
            events += self._format.events(index, delta)
            if len(events) > _PIECE_BYTES and not self._run.is_complete:
                return _in_lines(events), deltas
        return _in_lines(events + self._format.end(self._run.usage) if self._run.is_complete else events), None

    def put(self, made: Events) -> Events | None:
        """Write a chunk now, outside the answer's task; return what remains to be awaited."""
        events, rest = made
        if rest is not None or self._run.is_complete or not self._started:
            return made
        if events:
            self._is_silent = False
            self._unsent = start(self._send_more({"type": "http.response.body", "body": events, "more_body": True}))
        if self._unsent is None:
            return None
        return (b"", None)

    async def take(self, made: Events) -> None:
        events, rest = made
        await self._write(events, more=not self._run.is_complete)
        while rest is not None:
            await asyncio.sleep(0)  # others' turn
            events, rest = self.make(rest)
            await self._write(events, more=not self._run.is_complete)

    async def end(self) -> None:
        """Sends nothing: `make` has added the end."""

    async def fail(self, error: QuartetError) -> None:
        """Its own reply before the headers, the last event after them, nothing to a stuck client."""
        if not self._started:
            raise error
        if not self._is_closed:
            with suppress(SlowReader):  # the client has `error` or nothing
                await self._write(_in_lines(self._format.failure(error)), more=False)

    async def _comment(self) -> None:
        if not (pause_s := self._limits.comment_s):
            return
        while True:
            await asyncio.sleep(pause_s)
            if self._is_silent and self._unsent is None and not self._is_closed:
                try:
                    await self._write(_COMMENT, more=True)
                except SlowReader:  # which has cut the run
                    return
            self._is_silent = True

    async def _write(self, body: bytes, *, more: bool) -> None:
        """The first chunk brings the headers."""
        unsent = self._unsent
        self._unsent = None
        self._is_silent = False
        self._is_closed = not more
        timeout_s = self._limits.write_timeout_s
        try:
            await finish(unsent, timeout_s)
            if more and not body:
                return
            if not self._started:
                self._started = True
                await bounded(self._send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}), timeout_s)
            send = self._send_more if more else self._raw_send
            await bounded(send({"type": "http.response.body", "body": body, "more_body": more}), timeout_s)
        except TimeoutError as error:
            self._is_closed = True
            slow = SlowReader(f"the client took nothing for {timeout_s:g} s")
            self._run.cut(slow, AbortReason.slow_reader)
            raise slow from error


def _in_lines(events: bytes) -> bytes:
    for raw, escaped in _LINE_ENDS:
        events = events.replace(raw, escaped)
    return events


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
