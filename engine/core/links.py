"""The core's links: rings to and from the ranks, the media memory, and the front's socket."""

import select
import socket

from engine.channel import RingReader, RingWriter, Waiter, map_shared
from engine.lifeline import BootArgs
from engine.media_memory import free_media
from engine.plan import StepPlan, StepResult, decode_result, encode_plan
from engine.protocol import FrameReader, TokenBatch, encode_message, frame
from engine.rank_status import StatusBlock

MAX_UNSENT_BYTES = 64 << 20  # unread answers, above which the front counts as hung


class RingExecutor:
    """Sends plans to all ranks; reads rank 0's results, in the same order."""

    def __init__(self, args: BootArgs, status: StatusBlock) -> None:
        waiter = Waiter(args.spin)
        self._args = args
        self._status = status
        self._plans = RingWriter(map_shared(args.plan), args.tp, waiter)
        self._masks = RingWriter(map_shared(args.masks), args.tp, waiter)
        self._results = RingReader(map_shared(args.result), 1, 0)

    def submit(self, plan: StepPlan) -> None:
        self._plans.write(plan.step, encode_plan(plan))

    def submit_masks(self, masks: bytes) -> None:
        """Send the masks of a `masked` plan, before or after it, in plan order."""
        self._masks.write(self._masks.step + 1, masks)

    def poll(self) -> StepResult | None:
        record = self._results.poll()
        if record is None:
            return None
        return decode_result(record[1])

    @property
    def encodes_read(self) -> int:
        """Plans with encodes whose media every rank has read."""
        return min(self._status.read(rank).encodes_read for rank in range(self._args.tp))

    def free_media(self, pages: range) -> None:
        free_media(self._args.media, pages)


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
