"""Media of tests: a media memory of this process, with what is placed in it, and plans that encode."""

import os
from collections.abc import Iterable, Sequence

from engine.channel import create_shared
from engine.front.client import _placed
from engine.media_memory import MediaReader, MediaWriter, free_media
from engine.plan import Encode, PlanView, StepPlan, encode_plan, read_plan
from engine.protocol import DecodedItem, MediaItem, PlacedItem


class MediaMemory:
    """A memory, and the front's way to it."""

    def __init__(self) -> None:
        self._file = os.fdopen(create_shared("quartet-media", 0), "rb")
        self.fd = self._file.fileno()
        self._writer = MediaWriter(self.fd)

    def place(self, media: Sequence[DecodedItem]) -> tuple[PlacedItem, ...]:
        """The items with their data in the memory."""
        pages = self._writer.reserve(sum(item.size for item in media))
        self._writer.write(pages.start, [item.data for item in media])
        return _placed(media, pages.start)

    def decoded(self, item: PlacedItem) -> DecodedItem:
        """With its data."""
        data = bytearray(item.size)
        reader = MediaReader(self.fd)
        reader.read_into(memoryview(data), item.place)
        reader.finish()
        return DecodedItem(*fields(item), bytes(data))

    def free(self, begin: int, end: int) -> None:
        free_media(self.fd, range(begin, end))

    @property
    def held(self) -> int:
        """Bytes that it takes."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        self._writer.close()
        self._file.close()


MEMORY = MediaMemory()  # of ranks in this process, and of those that are started without a core


def fields(item: MediaItem) -> list[object]:
    """Of any item, without its data or place."""
    return [getattr(item, name) for name in MediaItem.__struct_fields__]


def plan_of(media: Iterable[PlacedItem], slots: Sequence[int] = ()) -> PlanView:
    """A plan that encodes these items, of slot 0 or those given."""
    items = list(media)
    encodes = [Encode(slot, item) for slot, item in zip(slots or [0] * len(items), items, strict=True)]
    return read_plan(encode_plan(StepPlan(1, encodes=encodes)))
