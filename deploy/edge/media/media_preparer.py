"""From a chat's media parts to what the engine gets: checked, prepared in side processes, and found again in the prompt."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import islice

import msgspec

from deploy.edge.ask import ChatPrompt, Media
from deploy.edge.media.tasks import DecodeTask, Prepared, prepare
from deploy.edge.raw_json import invalid
from deploy.edge.service_settings import ServiceSettings
from deploy.edge.side_pool import SidePool
from engine.errors import InvalidRequest
from engine.front.text import TextProcessor
from engine.protocol import MAX_MESSAGE_BYTES, MediaItem, MediaKind

MEDIA_BYTES = MAX_MESSAGE_BYTES - (8 << 20)  # of a request; the rest of its message is for the prompt
DECODERS = min(8, os.cpu_count() or 1)  # media that are decoded at once
FETCHERS = 16  # that wait for other servers, most of the time
_HEAD = 1024  # characters of a data: URL before its data
READ_AT_ONCE = 16  # requests whose media are on their way; each may have a message's worth of bytes
_PLURALS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "audio"}


class MediaPreparer:
    """Prepares the media of chats; the side process starts with the first, or by `pool.start`."""

    def __init__(self) -> None:
        self.pool = SidePool("deploy.edge.media.media_process")
        # by `is_remote`: who waits for other servers, apart
        self._threads = [ThreadPoolExecutor(count, name) for count, name in ((DECODERS, "media"), (FETCHERS, "fetch"))]
        self._reading = [asyncio.Semaphore(READ_AT_ONCE) for _ in self._threads]

    async def prepare(self, chat: ChatPrompt, key: str, settings: ServiceSettings) -> list[Prepared]:
        """Returns a chat's media in the order of their parts. InvalidRequest of `key`, the client's for them; Overloaded."""
        if not (media := chat.media):
            return []
        if len(media) > (most := settings.media.max_media):
            raise invalid(key, f"{len(media)} images, videos and clips; at most {most} are read")
        for part in media:
            if part.kind not in settings.media_kinds:
                raise invalid(key, f"this model reads no {_PLURALS[part.kind]}")
        limits = DecodeTask(**msgspec.structs.asdict(settings.media), row_samples=settings.row_samples)
        async with self._reading[any(part.is_remote for part in media)]:
            tasks = [
                asyncio.ensure_future(self._prepared(part, chat.max_soft_tokens, limits, key, f"{part.kind} {count}"))
                for count, part in enumerate(media, 1)
            ]
            try:
                prepared = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        if (size := sum(len(medium.data) for medium in prepared)) > MEDIA_BYTES:
            why = f"the media have {size} bytes when decoded and resized, more than {MEDIA_BYTES}; a lower detail has fewer"
            raise invalid(key, why)
        return prepared

    async def _prepared(self, part: Media, budget: int | None, limits: DecodeTask, key: str, name: str) -> Prepared:
        begin = 0 if part.is_remote else part.url.find(",", 0, _HEAD) + 1
        head = part.url[:begin].lower().replace(" ", "")
        try:
            if not part.is_remote and not head.endswith(";base64,"):
                raise InvalidRequest("of data: URLs only those in base64 are read")
            task = msgspec.structs.replace(
                limits,
                kind=part.kind,
                media_type=head[len("data:") :].partition(";")[0],
                is_remote=part.is_remote,
                budget=budget or part.budget,
            )
            return await asyncio.get_running_loop().run_in_executor(
                self._threads[part.is_remote], lambda: prepare(self.pool, task, part.url[begin:].encode(errors="replace"))
            )
        except InvalidRequest as error:
            raise invalid(key, f"{name}: {error}") from error


def media_items(tokens: Sequence[int], media: Sequence[Prepared], text: TextProcessor) -> tuple[MediaItem, ...]:
    """Where each stands in the prompt: no message can hold a soft token, so every run of them is one of these."""
    runs = _runs(tokens, {text.control_id(f"<|{kind}|>") for kind in _PLURALS})
    items = tuple(item for medium in media for item in _items(medium, list(islice(runs, medium.runs))))
    assert next(runs, None) is None, "the prompt has more soft tokens than its media"
    return items


def _items(medium: Prepared, runs: list[tuple[int, int]]) -> Iterator[MediaItem]:
    """Yield one item or, of audio, one for each clip."""
    if not medium.clips:
        first, end = runs[0][0], runs[-1][1]
        yield MediaItem(first, end - first, medium.digest, tuple(runs), medium.kind, medium.shape, medium.data)
    data, row_bytes = memoryview(medium.data), len(medium.data) // medium.shape[0]
    for (first, end), rows in zip(runs, medium.clips, strict=False):
        clip, data = bytes(data[: rows * row_bytes]), data[rows * row_bytes :]
        yield MediaItem(first, end - first, sha256(clip).digest(), (), medium.kind, (rows, *medium.shape[1:]), clip)


def _runs(tokens: Sequence[int], soft: set[int | None]) -> Iterator[tuple[int, int]]:
    """[begin, end) of each run of ids in `soft`."""
    begin = None
    for index, token in enumerate(tokens):
        if token in soft:
            begin = index if begin is None else begin
        elif begin is not None:
            yield begin, index
            begin = None
