"""Media on their way from the front: their data come in pieces, and then the requests that have them.

    MediaPiece ... MediaPiece   GenerateRequest ... GenerateRequest   MediaEnd
"""

from collections import defaultdict

from msgspec.structs import replace

from engine.protocol import GenerateRequest, MediaEnd, MediaItem, MediaPiece


class ReceivedMedia:
    """The choices of a request share the items: their data are there once."""

    def __init__(self) -> None:
        self._pieces = list[bytes]()
        self._data = defaultdict[int, list[bytes]](list)
        self._items: dict[int, tuple[MediaItem, ...]] = {}

    def add(self, piece: MediaPiece) -> None:
        """More of an item's data."""
        self._pieces.append(piece.data)
        if piece.is_last:
            self._data[piece.id].append(b"".join(self._pieces))
            self._pieces.clear()

    def complete(self, request: GenerateRequest) -> GenerateRequest:
        """The request with the data of its media."""
        if not request.sent_media:
            return request
        if request.sent_media not in self._items:
            data = self._data.pop(request.sent_media)
            self._items[request.sent_media] = tuple(
                replace(item, data=data) for item, data in zip(request.media, data, strict=True)
            )
        return replace(request, media=self._items[request.sent_media])

    def end(self, end: MediaEnd) -> None:
        """No further request has them."""
        del self._items[end.id]
