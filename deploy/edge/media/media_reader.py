"""From a chat's media parts to what the engine gets: checked, prepared in side processes, and found again in the prompt."""

import asyncio
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice

import msgspec

from deploy.edge.ask import ChatPrompt, Media
from deploy.edge.edge_settings import MediaSettings
from deploy.edge.media.side_pool import SidePool
from deploy.edge.media.tasks import DecodeTask, Prepared
from deploy.edge.raw_json import invalid
from engine.errors import InvalidRequest
from engine.front.text import TextProcessor
from engine.protocol import MAX_MESSAGE_BYTES, MediaItem, MediaKind

MEDIA_BYTES = MAX_MESSAGE_BYTES - (8 << 20)  # of a request; the rest of its message is for the prompt
_PLURALS: dict[MediaKind, str] = {"image": "images", "video": "videos", "audio": "audio"}


async def read_media(
    chat: ChatPrompt, kinds: frozenset[MediaKind], settings: MediaSettings, pool: SidePool, row_samples: int = 0
) -> list[Prepared]:
    """A chat's media, in the order of their parts. `kinds`: that the model reads; `row_samples`: as in DecodeTask.

    InvalidRequest of "messages"; Overloaded.
    """
    media = chat.media
    if len(media) > settings.max_media:
        raise invalid("messages", f"{len(media)} images, videos and clips; at most {settings.max_media} are read")
    for part in media:
        if part.kind not in kinds:
            raise invalid("messages", f"this model reads no {_PLURALS[part.kind]}")
    limits = DecodeTask(**msgspec.structs.asdict(settings), row_samples=row_samples)
    prepared = (_prepared(part, chat.max_soft_tokens, limits, pool, f"{part.kind} {count}") for count, part in enumerate(media, 1))
    tasks = [asyncio.ensure_future(one) for one in prepared]
    try:
        read = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    if (size := sum(len(one.data) for one in read)) > MEDIA_BYTES:
        why = f"the media have {size} bytes when decoded and resized, more than {MEDIA_BYTES}; a lower detail has fewer"
        raise invalid("messages", why)
    return read


async def _prepared(part: Media, budget: int | None, limits: DecodeTask, pool: SidePool, name: str) -> Prepared:
    begin = 0 if part.is_remote else part.url.find(",") + 1
    head = part.url[:begin].lower()
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
        threads = pool.fetchers if part.is_remote else pool.decoders
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, lambda: pool.run(task, part.url[begin:].encode(errors="replace")))
    except InvalidRequest as error:
        raise invalid("messages", f"{name}: {error}") from error


def media_items(tokens: Sequence[int], media: Sequence[Prepared], text: TextProcessor) -> tuple[MediaItem, ...]:
    """Where each stands in the prompt: no message can hold a soft token, so every run of them is one of these."""
    names = (text.control_id(f"<|{kind}|>") for kind in _PLURALS)
    runs = _runs(tokens, {number for number in names if number is not None})
    items = [item for one in media for item in _items(one, list(islice(runs, one.runs)))]
    assert next(runs, None) is None, "the prompt has more soft tokens than its media"
    return tuple(items)


def _items(one: Prepared, runs: list[tuple[int, int]]) -> Iterator[MediaItem]:
    """One or, of audio, one for each clip."""
    if not one.clips:
        first, end = runs[0][0], runs[-1][1]
        yield MediaItem(first, end - first, one.digest, tuple(runs), one.kind, one.shape, one.data)
    data, row_bytes = one.data, len(one.data) // one.shape[0]
    for (first, end), rows in zip(runs, one.clips, strict=False):
        clip, data = data[: rows * row_bytes], data[rows * row_bytes :]
        yield MediaItem(first, end - first, sha256(clip).digest(), (), one.kind, (rows, *one.shape[1:]), clip)


def _runs(tokens: Sequence[int], soft: set[int]) -> Iterator[tuple[int, int]]:
    """[begin, end) of each run of ids in `soft`."""
    begin = None
    for index, token in enumerate(tokens):
        if token in soft:
            begin = index if begin is None else begin
        elif begin is not None:
            yield begin, index
            begin = None
