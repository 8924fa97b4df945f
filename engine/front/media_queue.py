"""Media on their way to the core, in pieces, so that neither the loop nor other requests wait for them.

The choices of a request have the same media, which are sent once. What needs them waits here until they are sent.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from engine.protocol import PIECE_BYTES, FrontMessage, MediaEnd, MediaItem, MediaPiece, encode_message, frame

Media = tuple[MediaItem, ...]


@dataclass
class _Sending:
    """Media that are sent as `id`, and the frames of requests that follow them."""

    id: int
    media: Media
    pieces: Iterator[bytes]
    followers: dict[int, bytes] = field(default_factory=dict)
    aborts: list[bytes] = field(default_factory=list)


class MediaQueue:
    """Frames for the core's socket, one at a time."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._sendings = deque[_Sending]()

    def add(self, media: Media) -> int:
        """Send the media, unless those added last are the same tuple; returns what they are sent as."""
        if not self._sendings or self._sendings[-1].media is not media:
            number = next(self._ids)
            self._sendings.append(_Sending(number, media, _pieces(number, media)))
        return self._sendings[-1].id

    def follow(self, request: int, message: bytes) -> None:
        """Send the frame of a request after the media added last."""
        self._sendings[-1].followers[request] = message

    def abort(self, request: int, message: FrontMessage) -> bool:
        """Send its abort after a request that waits here; False: it does not."""
        sending = next((sending for sending in self._sendings if request in sending.followers), None)
        if sending is None:
            return False
        sending.aborts.append(frame(encode_message(message)))
        return True

    def next(self) -> bytes | None:
        """What to write next: a piece, or all requests that have waited for the media. None: nothing waits."""
        if not self._sendings:
            return None
        sending = self._sendings[0]
        piece = next(sending.pieces, None)
        if piece is not None:
            return piece
        self._sendings.popleft()
        end = frame(encode_message(MediaEnd(sending.id)))
        return b"".join([*sending.followers.values(), *sending.aborts, end])

    def clear(self) -> None:
        """Nobody reads it any more."""
        self._sendings.clear()


def _pieces(number: int, media: Media) -> Iterator[bytes]:
    for item in media:
        data = memoryview(item.data)
        for first in range(0, max(1, len(data)), PIECE_BYTES):
            end = first + PIECE_BYTES
            yield frame(encode_message(MediaPiece(number, bytes(data[first:end]), end >= len(data))))
