"""Media on their way to ranks: messages longer than the ring, ranks that are slow, and the bytes of a plan that names them."""

import threading
import time

import pytest

from engine.channel import RING_BYTES, RingReader, RingWriter, Waiter, create_shared, map_shared, ring_bytes
from engine.protocol import MediaItem
from engine.step_media import MediaReader, MediaWriter

pytestmark = pytest.mark.pure


def item(number: int, size: int) -> MediaItem:
    return MediaItem(number, 4, bytes([number]) * 32, ((number, number + 4),), "image", (size, 1, 1), bytes([number]) * size)


def test_a_message_may_be_longer_than_the_ring() -> None:
    """Two ranks, one of them slow, get the items of each plan whole and in order, though a plan's are three times the ring."""
    plans = [[item(1, 3 * RING_BYTES)], [item(2, 100), item(3, RING_BYTES // 2)], [item(4, 0)]]
    memory = map_shared(create_shared("media", ring_bytes(2)))
    got: list[list[tuple[MediaItem, ...]]] = [[], []]

    def read(rank: int) -> None:
        reader = MediaReader(RingReader(memory, 2, rank))
        for _ in plans:
            time.sleep(0.02 * rank)
            got[rank].append(reader.read(Waiter()))

    ranks = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    writer = MediaWriter(RingWriter(memory, 2))
    for items in plans:
        writer.write(items)
    for rank in ranks:
        rank.join(20)
    assert got[0] == got[1] == [tuple(items) for items in plans]
