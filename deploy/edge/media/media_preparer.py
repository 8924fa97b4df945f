"""Prepares a chat's media in side processes."""

import asyncio
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import msgspec

from deploy.edge.bodies.raw_json import invalid
from deploy.edge.media.tasks import CPU_S, REQUEST_CPU_S, DecodeTask, Prepared, digest_of, fetch, prepare
from deploy.edge.processes.side_pool import SidePool
from deploy.edge.requests.ask import ChatPrompt, Media
from deploy.edge.service_settings import ServiceSettings
from engine.errors import InvalidRequest
from engine.front.text import TextProcessor
from engine.front.turns import Turns
from engine.protocol import MAX_MEDIA_BYTES, DecodedItem, MediaKind

DECODERS = max(2, min(8, (os.cpu_count() or 1) // 2))  # media that are decoded at once: half of the cores, and one place for others
FETCHERS = 16  # that wait for other servers, most of the time
_HEAD = 1024  # characters of a data: URL before its data
READ_AT_ONCE = 16  # requests whose media are on their way; each may have MAX_MEDIA_BYTES
_PLURALS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "audio"}

T = TypeVar("T")

class MediaPreparer:
    def __init__(self) -> None:
        self.pool = SidePool("deploy.edge.media.media_process")
        self._threads = ThreadPoolExecutor(DECODERS + FETCHERS, "media")
        self._decoders = Turns(DECODERS)
        self._fetchers = Turns(FETCHERS)
        self._local = Turns(READ_AT_ONCE)
        self._remote = Turns(READ_AT_ONCE)  # apart: other servers may be slow

    async def prepare(self, chat: ChatPrompt, key: str, settings: ServiceSettings, client: str) -> list[Prepared]:
        """In order; clients take turns. InvalidRequest names `key`; Overloaded."""
        if not (media := chat.media):
            return []
        if len(media) > (most := settings.media.max_media):
            raise invalid(key, f"{len(media)} images, videos and clips; at most {most} are read")
        for part in media:
            if part.kind not in settings.media_kinds:
                raise invalid(key, f"this model reads no {_PLURALS[part.kind]}")
        limits = DecodeTask(**msgspec.structs.asdict(settings.media), row_samples=settings.row_samples)
        if any(part.is_remote for part in media):
            turns = self._remote
        else:
            turns = self._local
        request = _MediaRequest(client)
        async with turns.place(client):
            tasks = [
                asyncio.ensure_future(self._prepared(request, part, chat.max_soft_tokens, limits, key, f"{part.kind} {count}"))
                for count, part in enumerate(media, 1)
            ]
            try:
                prepared = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        if (size := sum(len(medium.data) for medium in prepared)) > MAX_MEDIA_BYTES:
            why = f"the media have {size} bytes when decoded and resized, more than {MAX_MEDIA_BYTES}; a lower detail has fewer"
            raise invalid(key, why)
        return prepared

    async def _prepared(
        self, request: "_MediaRequest", part: Media, budget: int | None, limits: DecodeTask, key: str, name: str
    ) -> Prepared:
        task = msgspec.structs.replace(limits, kind=part.kind, budget=budget or part.budget)
        try:
            if part.is_remote:
                return await self._fetchers.run(request.client, lambda: self._fetched(request, task, part.url))
            head, comma, _ = part.url[:_HEAD].partition(",")
            head = head.lower().replace(" ", "") + comma
            if not head.endswith(";base64,"):
                raise InvalidRequest("of data: URLs only those in base64 are read")
            task = msgspec.structs.replace(task, media_type=head[len("data:") :].partition(";")[0])
            begin = part.url.index(",") + 1
            return await self._decoders.run(
                request.client, lambda: self._decoded(request, task, lambda: part.url[begin:].encode(errors="replace"))
            )
        except InvalidRequest as error:
            raise invalid(key, f"{name}: {error}") from error

    async def _fetched(self, request: "_MediaRequest", task: DecodeTask, url: str) -> Prepared:
        """Keeps its fetcher's place while it decodes, which bounds files that wait for decoders."""
        remote = msgspec.structs.replace(task, is_remote=True)
        source = await self._in_thread(lambda: fetch(self.pool, remote, url.encode(errors="replace")))
        fetched = msgspec.structs.replace(task, media_type=None)
        return await self._decoders.run(request.client, lambda: self._decoded(request, fetched, lambda: source))

    async def _decoded(self, request: "_MediaRequest", task: DecodeTask, source: Callable[[], bytes]) -> Prepared:
        if request.left_s < 1:
            raise InvalidRequest(f"the media of a request may take {REQUEST_CPU_S} s of CPU, and those before it took them")
        task = msgspec.structs.replace(task, cpu_s=min(CPU_S[task.kind], math.ceil(request.left_s)))
        prepared = await self._in_thread(lambda: prepare(self.pool, task, source()))
        request.left_s -= prepared.cpu_s
        return prepared

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


@dataclass
class _MediaRequest:
    """`left_s`: CPU seconds for media not yet begun."""

    client: str
    left_s: float = REQUEST_CPU_S


def media_items(tokens: Sequence[int], media: Sequence[Prepared], text: TextProcessor) -> tuple[DecodedItem, ...]:
    """By position: messages hold no soft tokens, so every run is a medium's."""
    runs = _runs(tokens, {text.control_id(f"<|{kind}|>") for kind in _PLURALS})
    items = tuple(item for medium in media for item in _items(medium, list(islice(runs, medium.runs))))
    assert next(runs, None) is None, "the prompt has more soft tokens than its media"
    return items


def _items(medium: Prepared, runs: list[tuple[int, int]]) -> Iterator[DecodedItem]:
    if not medium.clips:
        first = runs[0][0]
        end = runs[-1][1]
        yield DecodedItem(first, end - first, medium.digest, tuple(runs), medium.kind, medium.shape, medium.data)
    data = memoryview(medium.data)
    row_bytes = len(medium.data) // medium.shape[0]
    for (first, end), rows in zip(runs, medium.clips, strict=False):
        clip = bytes(data[: rows * row_bytes])
        data = data[rows * row_bytes :]
        shape = (rows, *medium.shape[1:])
        yield DecodedItem(first, end - first, digest_of(medium.kind, shape, clip), (), medium.kind, shape, clip)


def _runs(tokens: Sequence[int], soft: set[int | None]) -> Iterator[tuple[int, int]]:
    """[begin, end) of each run of ids in `soft`."""
    begin = None
    for index, token in enumerate(tokens):
        if token in soft:
            begin = index if begin is None else begin
        elif begin is not None:
            yield begin, index
            begin = None
