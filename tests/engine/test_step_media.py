"""Media on their way to ranks: messages longer than the ring, ranks that are slow, records that are torn, bytes of wrong plans."""

import random
import struct
import threading
import time
from collections.abc import Sequence

import msgspec
import pytest
from engine.step_media import MediaReader, write_media

from engine import channel, step_media
from engine.channel import ChannelBroken, RingReader, RingWriter, Waiter, checksum, create_shared, map_shared, ring_bytes
from engine.protocol import MediaItem

pytestmark = pytest.mark.pure

RECORD = 1000
CAPACITY = 1 << 14


@pytest.fixture(autouse=True)
def _small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_media, "RECORD_BYTES", RECORD)


def item(number: int, size: int) -> MediaItem:
    data = random.Random(number).randbytes(size)
    return MediaItem(number, 4, bytes([number]) * 32, ((number, number + 4),), "image", (size, 1, 1), data)


def random_plans(seed: int) -> list[list[MediaItem]]:
    """Some of whose data are longer than the ring."""
    rng = random.Random(seed)
    sizes = (0, 1, RECORD - 1, RECORD, RECORD + 1, 7 * RECORD, 3 * CAPACITY)
    return [[item(rng.randrange(256), rng.choice(sizes)) for _ in range(rng.randint(1, 4))] for _ in range(6)]


class Rank:
    """Reads plans as a rank's loop does: a record at a turn, the rest when rows are needed or the next plan's items come."""

    def __init__(self, memory: memoryview, readers: int, rank: int) -> None:
        self.media = MediaReader(RingReader(memory, readers, rank), Waiter())
        self.got: list[list[tuple[MediaItem, bytearray]]] = []

    def begin(self) -> None:
        self.media.finish()
        items = self.media.items()
        self.got.append([(item, bytearray(item.shape[0])) for item in items])
        self.media.read_into(memoryview(data) for _, data in self.got[-1])

    def read(self, plans: int, rng: random.Random, slow_s: float) -> None:
        for _ in range(plans):
            self.begin()
            for _ in range(rng.choice((0, 3, 100))):
                time.sleep(slow_s)
                self.media.advance()
        self.media.finish()

    def found(self) -> list[list[MediaItem]]:
        """Items with their data."""
        return [[msgspec.structs.replace(item, data=bytes(data)) for item, data in items] for items in self.got]


@pytest.mark.parametrize("seed", range(4))
def test_ranks_get_what_plans_encode(seed: int) -> None:
    """Two ranks, one of them slow, get the items of each plan whole and in order, however far each has read when the next plan
    comes, and though a plan's data may be three times the ring."""
    plans, memory = random_plans(seed), map_shared(create_shared("media", ring_bytes(2, CAPACITY)))
    ranks = [Rank(memory, 2, rank) for rank in range(2)]
    threads = [
        threading.Thread(target=one.read, args=(len(plans), random.Random(seed + rank), 2e-4 * rank), daemon=True)
        for rank, one in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    writer = RingWriter(memory, 2)
    for items in plans:
        write_media(writer, items)
    for thread in threads:
        thread.join(20)
    assert [one.found() for one in ranks] == [plans] * 2


def written(plans: Sequence[Sequence[MediaItem]]) -> tuple[memoryview, Rank]:
    memory = memoryview(bytearray(ring_bytes(1, CAPACITY)))
    writer = RingWriter(memory, 1)
    for items in plans:
        write_media(writer, items)
    return memory, Rank(memory, 1, 0)


@pytest.mark.parametrize("fault", [False, True])
def test_a_record_is_read_at_a_time(fault: bool) -> None:
    """Each turn reads one record, into its own place; then there is nothing to do, though the next plan's are there (planted fault:
    memory in another order)."""
    plans = [[item(1, 3 * RECORD), item(2, 3 * RECORD)], [item(3, RECORD)]]
    _, rank = written(plans)
    rank.begin()
    if fault:
        rank.media.left.rotate(1)
    assert [rank.media.advance() for _ in range(8)] == [True] * 6 + [False] * 2
    assert (rank.found() == plans[:1]) == (not fault)
    rank.begin()
    rank.media.finish()
    assert (rank.found() == plans) == (not fault)


@pytest.mark.parametrize("mended", [True, False])
def test_a_torn_record_is_read_again(mended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a record that is still an older one is read again until it is there; one that stays old breaks the channel, also
    where the picture is black."""
    black = MediaItem(0, 4, bytes(32), (), "image", (RECORD, 1, 1), bytes(RECORD))
    memory, rank = written([[black, item(2, RECORD)]])
    rank.begin()
    (headers,) = struct.unpack_from("<I", memory, 128)
    place = 128 + 16 + (headers + 7) // 8 * 8 + 16 + RECORD // 2
    right, memory[place], looks = memory[place], 1, []

    def looked(payload: memoryview, start: int) -> int:
        found = checksum(payload, start)
        looks.append(found)
        memory[place] = right if mended else 1
        return found

    monkeypatch.setattr(channel, "checksum", looked)
    if mended:
        assert rank.media.advance()
        assert len(looks) == 2
        rank.media.finish()
        assert rank.found() == [[black, item(2, RECORD)]]
    else:
        with pytest.raises(ChannelBroken, match="bad size or checksum"):
            rank.media.advance()
        assert len(rank.media.left) == 2


@pytest.mark.parametrize("size", [RECORD - 1, RECORD + 1, 2 * RECORD])
def test_data_of_another_size_are_refused(size: int) -> None:
    """Data that are not of their item's size are not read as another item's."""
    wrong = msgspec.structs.replace(item(1, size), shape=(RECORD, 1, 1))
    _, rank = written([[wrong, item(2, 10)]])
    rank.begin()
    with pytest.raises(ValueError, match="different structures"):
        rank.media.finish()
