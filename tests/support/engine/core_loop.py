"""A core's loop in a thread, and the front's end of its socket."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from engine.core.loop import Core
from engine.protocol import Control, FrameReader, Output, decode_token_batch, encode_message, frame
from engine.rank_status import STATUS_BYTES, StatusBlock


@dataclass(frozen=True)
class StatusOnly:
    """What the loop needs of a lifeline: a status block and an index into it."""

    status: StatusBlock = field(default_factory=lambda: StatusBlock(memoryview(bytearray(STATUS_BYTES))))
    index = 0

    @property
    def args(self) -> "StatusOnly":
        return self


@dataclass
class Front:
    """The other end of the core's socket."""

    sock: socket.socket
    frames: FrameReader = field(default_factory=FrameReader)

    def send(self, message: msgspec.Struct | dict[str, object]) -> None:
        self.sock.sendall(frame(encode_message(message)))

    def hear(self) -> list[Output]:
        """What has come; waits as the socket does."""
        batches = [decode_token_batch(raw) for raw in self.frames.feed(self.sock.recv(1 << 20))]
        return [output for batch in batches for output in batch.outputs]

    def until_ended(self, count: int) -> list[Output]:
        """Everything until so many requests have ended."""
        heard = []
        while sum(output.finish is not None for output in heard) < count:
            heard += self.hear()
        return heard


@contextmanager
def running(core_of: Callable[[socket.socket], Core]) -> Iterator[Front]:
    """The loop of the core that `core_of` makes at its end of a socket; told to stop and joined afterwards."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with ours, theirs:
        front, thread = Front(ours), threading.Thread(target=core_of(theirs).run)
        thread.start()
        try:
            yield front
        finally:
            front.send(Control(action="stop"))
            thread.join(10)
        assert not thread.is_alive()
