"""Requests with media: their data are written once, before they are sent, and whatever happens the core hears of their end."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from engine.errors import EngineDead, GenerationFailed, InvalidRequest
from engine.front import client as front_client
from engine.front.client import EngineClient
from engine.media_memory import MediaWriter
from engine.protocol import Abort, AbortReason, DecodedItem, FinishReason, Output, PlacedItem, SamplingParams
from tests.support.engine.fakes import FakeCore
from tests.support.engine.media import MediaMemory
from tests.support.engine.outcomes import no_sink
from tests.support.engine.outputs import outputs

pytestmark = pytest.mark.pure

PARAMS = SamplingParams(max_tokens=8)
Patch = pytest.MonkeyPatch


def media(*sizes: int) -> tuple[DecodedItem, ...]:
    return tuple(DecodedItem(at, 1, bytes(32), (), "image", (size,), bytes([at + 1]) * size) for at, size in enumerate(sizes))


async def attached() -> tuple[EngineClient, FakeCore]:
    core = FakeCore()
    client = EngineClient(core.front, core.memory.fd, sink=no_sink)
    await client.start()
    return client, core


async def freed(core: FakeCore) -> None:
    """The core has heard that no further request has the media."""
    while core.memory.held:
        await core.silent()


@pytest.mark.parametrize("fault", [False, True])
def test_choices_share_media(fault: bool, monkeypatch: Patch) -> None:
    """Eight requests of one tuple come with their data, which are written once. Planted: of a tuple each."""
    places = set[int]()
    decoded = MediaMemory.decoded

    def noted(memory: MediaMemory, item: PlacedItem) -> DecodedItem:
        places.add(item.place)
        return decoded(memory, item)

    monkeypatch.setattr(MediaMemory, "decoded", noted)

    async def story() -> None:
        client, core = await attached()
        shared = media(3_000_000, 1, 0)
        for number in range(8):
            client.generate([5, number], PARAMS, media=media(3_000_000, 1, 0) if fault else shared)
        for number in range(8):
            request = await core.receive_request()
            assert (request.id, request.media, list(request.tokens)) == (number + 1, shared, [5, number])
        await freed(core)
        await client.close()
        core.close()

    asyncio.run(asyncio.wait_for(story(), 20))
    assert len(places) == (24 if fault else 3)


def test_an_abort_comes_after_its_request() -> None:
    """Though it is made while the data are written; and the next request without media does not wait for them."""

    async def story() -> None:
        client, core = await attached()
        first = client.generate([1], PARAMS, media=media(10_000_000))
        first.abort(AbortReason.client_gone)
        client.generate([2], PARAMS)
        assert (await core.receive_request()).id == 2
        assert (await core.receive_request()).media == media(10_000_000)
        assert await core.receive() == Abort(1, AbortReason.client_gone)
        await freed(core)
        await core.send(Output(id=1, finish=FinishReason.abort))
        await client.close()
        core.close()

    asyncio.run(asyncio.wait_for(story(), 20))


def test_media_of_a_wrong_size_are_refused(monkeypatch: Patch) -> None:
    """Data of another shape, and more data than a request may have; the largest that it may have are sent."""
    monkeypatch.setattr(front_client, "MAX_MEDIA_BYTES", 1000)

    async def story() -> None:
        client, core = await attached()
        short = (DecodedItem(0, 1, bytes(32), (), "image", (5, 5, 3), bytes(74)),)
        with pytest.raises(InvalidRequest, match=r"74 bytes of image are not of shape \(5, 5, 3\)"):
            client.generate([1], PARAMS, media=short)
        with pytest.raises(InvalidRequest, match="media of 1001 bytes exceed 1000"):
            client.generate([1], PARAMS, media=media(1000, 1))
        client.generate([1], PARAMS, media=media(999, 1))
        assert (await core.receive_request()).media == media(999, 1)
        await client.close()
        core.close()

    asyncio.run(asyncio.wait_for(story(), 20))


def failing(self: MediaWriter, place: int, data: Iterable[bytes]) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("write", [failing, MediaWriter.write])
def test_media_that_cannot_be_stored_fail_their_requests(write: Callable[..., None], monkeypatch: Patch) -> None:
    """All choices, with the reason; other requests go on, and nothing is held. Where it can be stored, none fails."""
    monkeypatch.setattr(MediaWriter, "write", write)

    async def story() -> None:
        client, core = await attached()
        shared = media(5000)
        streams = [client.generate([1], PARAMS, media=shared) for _ in range(2)]
        if write is failing:
            for stream in streams:
                with pytest.raises(GenerationFailed, match=r"its media could not be stored: .* No space left on device"):
                    _ = [output async for output in outputs(stream)]
        else:
            assert [(await core.receive_request()).id for _ in streams] == [1, 2]
        client.generate([1], PARAMS)
        assert (await core.receive_request()).id == 3
        assert client.open == (1 if write is failing else 3)
        await freed(core)
        await client.close()
        core.close()

    asyncio.run(asyncio.wait_for(story(), 20))


@pytest.mark.parametrize("fault", [False, True])
def test_an_end_while_media_are_written_leaves_nothing(fault: bool, monkeypatch: Patch) -> None:
    """Streams end, later ones too, and every descriptor and thread is closed (planted fault: the writer stays open)."""
    left = list[MediaWriter]()
    if fault:
        monkeypatch.setattr(MediaWriter, "close", lambda self: left.append(self))  # noqa: PLW0108 (a builtin binds no self)

    async def story() -> None:
        client, core = await attached()
        streams = [client.generate([1], PARAMS, media=media(20_000_000)) for _ in range(3)]
        client.fail("rank 0 was killed")
        for stream in [*streams, client.generate([1], PARAMS, media=media(1))]:
            with pytest.raises(EngineDead, match="rank 0 was killed"):
                _ = [output async for output in outputs(stream)]
        await client.close()
        core.close()

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    asyncio.run(asyncio.wait_for(story(), 20))
    before = descriptors()
    asyncio.run(asyncio.wait_for(story(), 20))
    assert (descriptors() > before) is fault
    for writer in left:
        writer._file.close()
