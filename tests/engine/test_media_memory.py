"""The media memory: what is written there is read in pieces, and takes no memory once it is freed."""

import random

import pytest

from engine import media_memory
from engine.channel import ChannelBroken
from engine.media_memory import MediaReader
from engine.protocol import DecodedItem, PlacedItem
from tests.support.engine.media import MediaMemory

pytestmark = pytest.mark.pure

PIECE = 1000


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MediaMemory:
    monkeypatch.setattr(media_memory, "PIECE_BYTES", PIECE)
    return MediaMemory()


def item(rng: random.Random, size: int) -> DecodedItem:
    return DecodedItem(0, 4, bytes(32), ((0, 4),), "image", (size, 1, 1), rng.randbytes(size))


def read(memory: MediaMemory, items: list[PlacedItem], off: int = 0) -> list[bytes]:
    """As a rank does: a piece at a time for some, the rest at once. `off`: bytes by which a place is wrong."""
    reader = MediaReader(memory.fd)
    found = [bytearray(one.size) for one in items]
    for one, data in zip(items, found, strict=True):
        reader.read_into(memoryview(data), one.place + off)
    for _ in range(3):
        reader.advance()
    reader.finish()
    return list(map(bytes, found))


@pytest.mark.parametrize("seed", range(4))
def test_ranks_read_what_was_written(memory: MediaMemory, seed: int) -> None:
    """Items of any size, a request's one after the other. Planted fault: a byte further there is something else."""
    rng = random.Random(seed)
    requests = [[item(rng, rng.choice((0, 1, PIECE - 1, PIECE, 7 * PIECE + 1))) for _ in range(3)] for _ in range(5)]
    requests.append([item(rng, 5 * PIECE)])
    items = [one for request in requests for one in memory.place(request)]
    expected = [one.data for request in requests for one in request]
    assert read(memory, items) == expected
    assert read(memory, items, off=1) != expected
    memory.close()


def test_freed_memory_is_free_and_never_used_again(memory: MediaMemory) -> None:
    """A freed request is zeros, and takes nothing; its neighbours stay. A request of no bytes has a page of its own."""
    rng = random.Random(0)
    first, second, third = ([item(rng, 9999)] for _ in range(3))
    (one,) = memory.place(first)
    (empty,) = memory.place([item(rng, 0)])
    (two,) = memory.place(second)
    assert one.place < empty.place < two.place
    before = memory.held
    memory.free(one.place, empty.place)
    assert memory.held == before - 12288
    memory.free(empty.place, two.place)
    (three,) = memory.place(third)
    assert three.place > two.place
    assert read(memory, [one, two, three]) == [bytes(9999), second[0].data, third[0].data]
    memory.close()


def test_what_was_never_written_is_an_error(memory: MediaMemory) -> None:
    (one,) = memory.place([item(random.Random(0), 5000)])
    reader = MediaReader(memory.fd)
    reader.read_into(memoryview(bytearray(5000)), one.place + 8000)
    with pytest.raises(ChannelBroken, match="the media memory has no 1000 bytes at 8"):
        reader.finish()
    memory.close()


def test_a_reader_reads_a_piece_at_a_time(memory: MediaMemory) -> None:
    data = item(random.Random(0), 3 * PIECE)
    (one,) = memory.place([data])
    reader = MediaReader(memory.fd)
    found = bytearray(3 * PIECE)
    reader.read_into(memoryview(found), one.place)
    for count in range(1, 4):
        assert reader.advance()
        assert found == data.data[: count * PIECE] + bytes((3 - count) * PIECE)
    assert not reader.advance()
    memory.close()
