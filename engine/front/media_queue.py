"""Sends media to the core in pieces, so that neither the event loop nor other requests wait.
Requests wait here for their media."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from engine.protocol import PIECE_BYTES, FrontMessage, MediaEnd, MediaItem, MediaPiece, encode_message, frame

Media = tuple[MediaItem, ...]


@dataclass
class _Sending:
    id: int
    media: Media
    pieces: Iterator[bytes]
    followers: dict[int, bytes] = field(default_factory=dict)
    aborts: list[bytes] = field(default_factory=list)


class MediaQueue:
    def __init__(self) -> None:
        self._ids = count(1)
        self._sendings = deque[_Sending]()

    def add(self, media: Media) -> int:
        """Send media unless they are the last tuple added; returns their id."""
        if not self._sendings or self._sendings[-1].media is not media:
            number = next(self._ids)
            self._sendings.append(_Sending(number, media, _pieces(number, media)))
        return self._sendings[-1].id

    def follow(self, request: int, message: bytes) -> None:
        self._sendings[-1].followers[request] = message

    def abort(self, request: int, message: FrontMessage) -> bool:
        """Send an abort after a request that waits here; else False."""
        sending = next((sending for sending in self._sendings if request in sending.followers), None)
        if sending is None:
            return False
        sending.aborts.append(frame(encode_message(message)))
        return True

    def next(self) -> bytes | None:
        """A piece, or all requests that waited for the media; None if empty."""
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
        self._sendings.clear()


def _pieces(number: int, media: Media) -> Iterator[bytes]:
    for item in media:
        data = memoryview(item.data)
        for first in range(0, max(1, len(data)), PIECE_BYTES):
            end = first + PIECE_BYTES
            yield frame(encode_message(MediaPiece(number, bytes(data[first:end]), end >= len(data))))
