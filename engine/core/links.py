"""The core's links: rings to and from the ranks, and the front's socket, which also carries media."""

import select
import socket
from collections import defaultdict

from msgspec.structs import replace

from engine.channel import RingReader, RingWriter, Waiter, map_shared
from engine.lifeline import BootArgs
from engine.plan import StepPlan, StepResult, decode_result, encode_plan
from engine.protocol import (
    FrameReader,
    GenerateRequest,
    MediaEnd,
    MediaItem,
    MediaPiece,
    TokenBatch,
    encode_message,
    frame,
)
from engine.step_media import write_media

MAX_UNSENT_BYTES = 64 << 20  # unread answers, above which the front counts as hung


class RingExecutor:
    """Sends plans to all ranks; reads rank 0's results, in the same order."""

    def __init__(self, args: BootArgs) -> None:
        waiter = Waiter(args.spin)
        self._plans, self._masks, self._media = (
            RingWriter(map_shared(ring), args.tp, waiter) for ring in (args.plan, args.masks, args.media)
        )
        self._results = RingReader(map_shared(args.result), 1, 0)

    def submit(self, plan: StepPlan) -> None:
        self._plans.write(plan.step, encode_plan(plan))
        if plan.media:
            write_media(self._media, plan.media)

    def submit_masks(self, masks: bytes) -> None:
        """Send the masks of a `masked` plan, before or after it, in plan order."""
        self._masks.write(self._masks.step + 1, masks)

    def poll(self) -> StepResult | None:
        record = self._results.poll()
        if record is None:
            return None
        return decode_result(record[1])


class FrontLink:
    """Reads whole messages and buffers sends; never blocks. ConnectionError if the front closed the
    socket, BufferError if it stopped reading."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._frames = FrameReader()
        self._unsent = bytearray()

    def receive(self, timeout_s: float) -> list[bytes]:
        """Returns messages; waits for input, room for unsent data, or `timeout_s`."""
        readable, writable, _ = select.select([self._sock], [self._sock] if self._unsent else [], [], timeout_s)
        if writable:
            self.flush()
        if not readable:
            return []
        data = self._sock.recv(1 << 20)
        if not data:
            raise ConnectionError("the front closed its socket")
        return self._frames.feed(data)

    def send(self, batch: TokenBatch) -> None:
        self._unsent += frame(encode_message(batch))
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise BufferError(f"the front has left {len(self._unsent)} bytes unread")

    def flush(self) -> None:
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]


class ReceivedMedia:
    """Assembles media data, which arrive in pieces before their requests. The choices of a prompt
    share them."""

    def __init__(self) -> None:
        self._pieces = list[bytes]()
        self._data = defaultdict[int, list[bytes]](list)
        self._items: dict[int, tuple[MediaItem, ...]] = {}

    def add(self, piece: MediaPiece) -> None:
        self._pieces.append(piece.data)
        if piece.is_last:
            self._data[piece.id].append(b"".join(self._pieces))
            self._pieces.clear()

    def complete(self, request: GenerateRequest) -> GenerateRequest:
        if not request.sent_media:
            return request
        if request.sent_media not in self._items:
            data = self._data.pop(request.sent_media)
            self._items[request.sent_media] = tuple(
                replace(item, data=data) for item, data in zip(request.media, data, strict=True)
            )
        return replace(request, media=self._items[request.sent_media])

    def end(self, end: MediaEnd) -> None:
        """Drop data that no further request needs, if any is left."""
        self._data.pop(end.id, None)
        self._items.pop(end.id, None)
