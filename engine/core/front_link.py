"""The core's end of a front's socket."""

import select
import socket

from engine.protocol import FrameReader, TokenBatch, encode_message, frame

MAX_UNSENT_BYTES = 64 << 20  # unread answers, above which the front counts as hung


class FrontLink:
    """The front's socket: whole messages in, buffered frames out, never blocking.

    Every method raises EOFError when the front is gone: it closed the socket, or left answers unread in it, which is a reset.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._frames = FrameReader()
        self._unsent = bytearray()

    def receive(self, timeout_s: float) -> list[bytes]:
        """The messages that have come; waits until some come, there is room to send, or `timeout_s` has passed."""
        readable, writable, _ = select.select([self._sock], [self._sock] if self._unsent else [], [], timeout_s)
        if writable:
            self.flush()
        if not readable:
            return []
        try:
            data = self._sock.recv(1 << 20)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise EOFError("the front left answers unread") from error
        if not data:
            raise EOFError("the front closed its socket")
        return self._frames.feed(data)

    def send(self, batch: TokenBatch) -> None:
        """Queue a batch and send what the socket takes; raises BufferError when the front has stopped reading."""
        self._unsent += frame(encode_message(batch))
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise BufferError(f"the front has left {len(self._unsent)} bytes unread")

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            except ConnectionError as error:
                raise EOFError("the front closed its socket") from error
            del self._unsent[:sent]
