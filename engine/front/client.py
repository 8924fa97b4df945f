"""The replica's client of the engine, for use from one event loop.

A request leaves `open` only when the core has ended it or is gone, so events agree with the core's
counters.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic, monotonic_ns
from typing import cast

import msgspec

from engine.adapters import NO_ADAPTER
from engine.errors import EngineDead, GenerationFailed, InvalidRequest, Overloaded, QuartetError, SlowReader
from engine.events import (
    EngineFailed,
    EngineLoad,
    FirstToken,
    Outcome,
    RequestFinished,
    RequestStarted,
    Scheduled,
    Sink,
    Tokens,
)
from engine.front.stream import Clock, Stream
from engine.media_memory import MediaWriter
from engine.protocol import (
    MAX_MEDIA_BYTES,
    OVERLOADED,
    Abort,
    AbortReason,
    AdapterChange,
    AdapterOrders,
    Control,
    DecodedItem,
    FinishReason,
    FrameReader,
    FrontMessage,
    GenerateRequest,
    Load,
    MediaEnd,
    Output,
    PlacedItem,
    SamplingParams,
    decode_token_batch,
    encode_message,
    frame,
    pack_tokens,
)

MAX_PILED_TOKENS = 4096
EOF_GRACE_S = 0.25  # after the socket's end, wait for the watcher: it may know which process died


@dataclass
class _Placement:
    """Media whose data are being written, and the messages of requests that have them."""

    media: tuple[DecodedItem, ...]
    placed: tuple[PlacedItem, ...]
    end: MediaEnd
    messages: list[bytes] = field(default_factory=list)


class EngineClient(asyncio.Protocol):
    """Speaks to the core over `sock`, which it detaches; writes data of media to the media memory, a
    descriptor. `sink` gets all events, `on_orders` the core's adapter orders."""

    def __init__(self, sock: socket.socket, media: int, *, sink: Sink) -> None:
        self.load: Load | None = None
        self.on_orders: Callable[[AdapterOrders], None] = _unexpected
        self.dead: str | None = None
        self._sink = sink
        self._frames = FrameReader()
        self._media = MediaWriter(media)
        self._writer = ThreadPoolExecutor(1, "media memory")
        self._placements: dict[int, _Placement] = {}  # by requests that wait for their media
        self._requests: dict[int, Stream] = {}
        self._stepped = 0.0  # when the core last reported a step, or work where it had none
        self._last_id = 0
        self._waiting_since = 0
        self._transport: asyncio.WriteTransport | None = None
        self._sock = socket.socket(fileno=sock.detach())

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self._sock)

    # -- the interface: generate, abort, health

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        clip: bool = False,
        salt: str = "",
        priority: int = 0,
        adapter: int = NO_ADAPTER,
        client: str = "",
        media: tuple[DecodedItem, ...] = (),
    ) -> Stream:
        """Submit a request; arguments as in GenerateRequest. Successive requests share a tuple of
        media, written once. InvalidRequest if too large."""
        self._last_id += 1
        stream = Stream(self._last_id, self.abort, Clock(monotonic()), adapter)
        request = GenerateRequest(
            id=stream.id,
            prompt=pack_tokens(prompt),
            params=params,
            clip=clip,
            salt=salt,
            priority=priority,
            adapter=adapter,
            client=client,
        )
        try:
            if self.dead is None and media:
                self._send_with_media(request, media)
            elif self.dead is None:
                self._send(request)
        except ValueError as error:
            raise InvalidRequest(f"the request is too large: {error}") from error
        if not self._requests:
            self._waiting_since = monotonic_ns()
        self._requests[stream.id] = stream
        self._sink(RequestStarted(stream.id, len(prompt)))
        if self.dead is not None:
            self._end(stream.id, "dead", EngineDead(self.dead))
        return stream

    def abort(self, request: int, reason: AbortReason) -> None:
        """No effect if the request has ended or was aborted."""
        stream = self._requests.get(request)
        if stream is None or stream.aborted is not None:
            return
        stream.aborted = reason
        stream.clock.aborted = monotonic()
        abort = Abort(request, reason)
        if request in self._placements:  # after its request
            self._placements[request].messages.append(frame(encode_message(abort)))
        else:
            self._send(abort)

    def health(self) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)

    # -- the engine as a whole

    @property
    def open(self) -> int:
        return len(self._requests)

    def count_by_adapter(self) -> Counter[tuple[int, bool]]:
        """Open requests by (adapter, whether the core has started them). Any thread."""
        return Counter((stream.adapter, stream.clock.scheduled is not None) for stream in list(self._requests.values()))

    @property
    def waiting_since(self) -> int | None:
        """Monotonic ns since which a request has always been open, or None."""
        if self._requests:
            return self._waiting_since
        return None

    def change_adapter(self, change: AdapterChange) -> None:
        self._send(change)

    def report(self) -> None:
        """Ask for the core's figures: `load` and an EngineLoad event."""
        self._send(Control("report"))

    def stop(self) -> None:
        """Stop the core after the plan in flight. Open streams then raise EngineDead."""
        self._send(Control("stop"))

    def fail(self, reason: str) -> None:
        """Open and future streams raise EngineDead with the first reason."""
        if self.dead is not None:
            return
        self.dead = reason
        self._placements.clear()
        self._sink(EngineFailed())
        for request in list(self._requests):
            self._end(request, "dead", EngineDead(reason))

    async def close(self) -> None:
        self.fail("the engine client was closed")
        if self._transport is not None:
            self._transport.close()
        else:
            self._sock.close()
        self._writer.shutdown(cancel_futures=True)
        self._media.close()
        await asyncio.sleep(0)  # the transport closes its socket on the loop's next turn

    # -- from the core

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            try:
                batch = decode_token_batch(message)
            except msgspec.DecodeError as error:
                self.fail(f"the core sent a message that cannot be decoded: {error}")
                continue
            before = self.load
            self.load = batch.load
            self._sink(EngineLoad(batch.load, self._interval(before, batch.load)))
            for request in batch.started:
                self._started(request)
            self._count_tokens(batch.outputs)
            for output in batch.outputs:
                self._output(output)
            if batch.adapters:
                self.on_orders(batch.adapters)

    def _output(self, output: Output) -> None:
        stream = self._requests.get(output.id)
        if stream is None:
            return
        if output.error is not None:
            self._end(output.id, "refused" if output.invalid else "error", _error_of(output, output.error))
            return
        if output.finish is not None:
            aborted = stream.aborted or AbortReason.client_gone
            reason = aborted if output.finish is FinishReason.abort else output.finish
            self._end(output.id, cast("Outcome", reason.value), None)  # outcomes have the names of both kinds of reasons
        if stream.push(output) > MAX_PILED_TOKENS and output.finish is None:
            stream.fail(SlowReader(f"the reader has left more than {MAX_PILED_TOKENS} tokens unread"))
            self.abort(output.id, AbortReason.slow_reader)

    def _started(self, request: int) -> None:
        stream = self._requests.get(request)
        if stream is None:
            return
        clock = stream.clock
        now = clock.scheduled = monotonic()
        if stream.aborted is None:
            self._sink(Scheduled(request, now - clock.submitted))

    def _count_tokens(self, outputs: Sequence[Output]) -> None:
        now = monotonic()
        total = 0
        gaps = list[float]()
        for output in outputs:
            stream = self._requests.get(output.id)
            count = len(output.tokens)
            if stream is None or stream.aborted is not None or not count:
                continue
            clock = stream.clock
            if clock.last is None:
                clock.first = now
                self._sink(FirstToken(output.id, now - clock.submitted, clock.queue_s))
            else:
                gaps.append((now - clock.last) / count)
            clock.last = now
            clock.output_tokens += count
            total += count
        if total:
            self._sink(Tokens(total, gaps))

    def _end(self, request: int, outcome: Outcome, error: Exception | None) -> None:
        """The only place where a request leaves `open`."""
        stream = self._requests.pop(request)
        if error is not None:
            stream.fail(error)
        clock = stream.clock
        first = clock.first
        last = clock.last
        count = clock.output_tokens
        ttft = None if first is None else first - clock.submitted
        tpot = None if first is None or last is None or count < 2 else (last - first) / (count - 1)
        e2e = (clock.aborted or monotonic()) - clock.submitted
        self._sink(RequestFinished(request, outcome, count, ttft, tpot, e2e, clock.queue_s))

    def _interval(self, before: Load | None, load: Load) -> float | None:
        """Seconds since the last reported step; None without a new step or work in between."""
        last_step = before.step if before is not None and before.running + before.waiting else None
        if load.step == last_step:
            return None
        now = monotonic()
        since = self._stepped
        self._stepped = now
        if last_step is None:
            return None
        return now - since

    def connection_lost(self, exc: Exception | None) -> None:
        """The process watcher has EOF_GRACE_S to report a specific cause."""
        ended = exc is None or isinstance(exc, ConnectionError)  # reset: it left messages unread
        if ended:
            reason = "the core ended"
        else:
            reason = f"the core's socket broke: {exc}"
        asyncio.get_running_loop().call_later(EOF_GRACE_S, self.fail, reason)

    # -- to the core

    def _send(self, message: FrontMessage) -> None:
        """ValueError: the message is too large."""
        self._write(frame(encode_message(message)))

    def _write(self, messages: bytes) -> None:
        assert self._transport is not None, "EngineClient.start has not run"
        if not self._transport.is_closing():
            self._transport.write(messages)

    def _send_with_media(self, request: GenerateRequest, media: tuple[DecodedItem, ...]) -> None:
        """Send it once the data are written."""
        last = next(reversed(self._placements.values()), None)
        if last is None or last.media is not media:
            last = self._place(media)
        request = msgspec.structs.replace(request, media=last.placed)
        last.messages.append(frame(encode_message(request)))
        self._placements[request.id] = last

    def _place(self, media: tuple[DecodedItem, ...]) -> _Placement:
        """Begin to write data, in a thread."""
        for item in media:
            if len(item.data) != item.size:
                raise InvalidRequest(f"{len(item.data)} bytes of {item.kind} are not of shape {item.shape}")
        size = sum(item.size for item in media)
        if size > MAX_MEDIA_BYTES:
            raise InvalidRequest(f"media of {size} bytes exceed {MAX_MEDIA_BYTES}")
        pages = self._media.reserve(size)
        placement = _Placement(media, _placed(media, pages.start), MediaEnd(pages.start, pages.stop))
        writing = self._writer.submit(self._media.write, pages.start, [item.data for item in media])
        asyncio.wrap_future(writing).add_done_callback(lambda written: self._written(placement, written))
        return placement

    def _written(self, placement: _Placement, written: asyncio.Future[None]) -> None:
        if self.dead is not None:
            return
        for request in [request for request, waited in self._placements.items() if waited is placement]:
            del self._placements[request]
            if written.exception() is not None:
                self._end(request, "error", GenerationFailed(f"its media could not be stored: {written.exception()}"))
        if written.exception() is not None:
            placement.messages.clear()
        self._write(b"".join([*placement.messages, frame(encode_message(placement.end))]))


def _placed(media: Sequence[DecodedItem], begin: int) -> tuple[PlacedItem, ...]:
    places = accumulate((item.size for item in media), initial=begin)
    return tuple(
        PlacedItem(item.first, item.length, item.digest, item.spans, item.kind, item.shape, place)
        for item, place in zip(media, places, strict=False)
    )


def _error_of(output: Output, said: str) -> QuartetError:
    if output.invalid:
        return InvalidRequest(said, code=output.code)
    if output.code == OVERLOADED:
        return Overloaded(said)
    return GenerationFailed(said)


def _unexpected(orders: AdapterOrders) -> None:
    raise AssertionError(f"no handler for adapter orders: {orders}")
