"""The mapped ring: order, wrap, slow readers, and every way in which it must refuse to go on."""

import os
import random
import struct
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import pytest

import engine.channel
from engine.channel import ChannelBroken, RingReader, RingWriter, Waiter, checksum, create_shared, map_shared, ring_bytes
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

CAPACITY = 4096


def ring(readers: int, capacity: int = CAPACITY) -> tuple[memoryview, RingWriter, list[RingReader]]:
    memory = memoryview(bytearray(ring_bytes(readers, capacity)))
    return memory, RingWriter(memory, readers), [RingReader(memory, readers, index) for index in range(readers)]


def payloads(count: int, seed: int, largest: int = 1500) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice((0, 1, 7, 8, 9, rng.randint(0, largest)))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_records_come_in_order_through_many_wraps(seed: int) -> None:
    """Records of any size, written and read at random distances, come back whole and in order to every reader."""
    _, writer, readers = ring(2)
    rng, sent = random.Random(seed), payloads(500, seed)
    got = [[], []]
    written = 0
    while min(map(len, got)) < len(sent):
        outstanding = sum(len(payload) + 32 for payload in sent[min(map(len, got)) : written + 1])
        if written < len(sent) and outstanding < CAPACITY // 2 and rng.random() < 0.6:
            writer.write(written + 1, sent[written])
            written += 1
        index = rng.randrange(2)
        if (record := readers[index].poll()) is not None:
            assert record[0] == len(got[index]) + 1
            got[index].append(record[1])
    assert got == [sent, sent]
    assert all(reader.poll() is None for reader in readers)


class Patience(Waiter):
    """Ends at the third wait."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 3:
            raise TimeoutError


def test_a_writer_waits_for_a_reader_that_does_not_read() -> None:
    """It waits as soon as the ring is full for one of them, and what was written is intact."""
    memory, _, (fast, slow) = ring(2)
    writer = RingWriter(memory, 2, patience := Patience())
    for step in range(1, 1 + CAPACITY // 520):
        writer.write(step, b"x" * 500)
        assert fast.poll() == (step, b"x" * 500)
    assert not patience.waits
    with pytest.raises(TimeoutError):
        writer.write(step + 1, b"x" * 500)
    assert patience.waits == 3
    assert slow.poll() == (1, b"x" * 500)


READER = """
import sys, zlib
from engine.channel import RingReader, Waiter, map_shared
reader, waiter, total = RingReader(map_shared(int(sys.argv[1])), 2, int(sys.argv[2])), Waiter(), 0
for _ in range(int(sys.argv[3])):
    while (record := reader.poll()) is None:
        waiter.wait()
    waiter.reset()
    total = zlib.crc32(record[1], total)
print(total)
"""


def test_processes_share_a_ring() -> None:
    """Two reader processes that inherit the descriptor read all that this one writes."""
    fd = create_shared("ring", ring_bytes(2, 1 << 14))
    sent = payloads(2000, 7, largest=900)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(fd), str(index), str(len(sent))],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=(fd,),
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        writer = RingWriter(map_shared(fd), 2)
        expected = 0
        for step, payload in enumerate(sent, 1):
            writer.write(step, payload)
            expected = zlib.crc32(payload, expected)
        assert [int(reader.communicate(timeout=30)[0]) for reader in readers] == [expected] * 2
    finally:
        os.close(fd)
        for reader in readers:
            reader.kill()
            reader.wait()


HAMMER = """
import sys
from engine.channel import RingWriter, map_shared
writer, count = RingWriter(map_shared(int(sys.argv[1])), 1), 1
while True:
    count += 1
    writer._counters[0] = count
"""


def test_a_counter_is_never_seen_half_written() -> None:
    """While another process stores a growing counter, every load gives one of its values, and none smaller than the one before."""
    fd = create_shared("ring", ring_bytes(1, CAPACITY))
    reader = RingReader(map_shared(fd), 1, 0)
    writer = subprocess.Popen([sys.executable, "-c", HAMMER, str(fd)], env={**os.environ, "PYTHONPATH": str(ROOT)}, pass_fds=(fd,))
    os.close(fd)
    try:
        while not reader._counters[0]:
            assert writer.poll() is None
        backwards, last = 0, 0
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            value = reader._counters[0]
            backwards += value < last
            last = max(last, value)
        assert not backwards
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.parametrize("size", [10, 300_000])
@pytest.mark.parametrize("at", ["payload", "end", "step", "checksum", "size"])
def test_a_flipped_bit_breaks_the_channel(at: str, size: int) -> None:
    """One bit wrong anywhere in a record is found by its checksum, at the first look; the same record untouched is read."""
    memory, writer, (reader,) = ring(1, 1 << 20)
    payload = random.Random(size).randbytes(size)
    writer.write(1, payload)
    place = 128 + {"size": 0, "checksum": 4, "step": 8, "payload": 16, "end": 15 + size}[at]
    memory[place] ^= 1
    with pytest.raises(ChannelBroken, match="bad size or checksum"):
        reader.poll()
    memory[place] ^= 1
    assert reader.poll() == (1, payload)
    assert reader.poll() is None


@pytest.mark.parametrize("row", [b"\x00", b"\x01", b"\xff", b"a mask's row "])
def test_stale_pages_change_the_checksum(row: bytes) -> None:
    """Of a large record of equal pages, any number of them older than the rest, wherever they lie, is found."""
    pages, choice = 64, random.Random(1)
    page = (row * 4096)[:4096]
    whole, sums = page * pages, set()
    for stale in range(1, pages + 1):
        data = bytearray(whole)
        for at in choice.sample(range(pages), stale):
            data[at * 4096 : (at + 1) * 4096] = choice.randbytes(1) * 4096 if row == b"\x00" else bytes(4096)
        assert bytes(data) == whole or checksum(bytes(data)) != checksum(whole), stale
        sums.add(checksum(bytes(data)))
    assert len(sums) > pages // 2
    assert checksum(whole) == checksum(whole) != checksum(whole, 1)


STALE = {"the mark": ((1500, 1500, 1200), slice(3040, 3044)), "the record behind it": ((1500, 1500, 1200), slice(0, 1520)),
         "an older mark": ((1500, 1500, 1200, 1808, 1000), slice(3040, 3044))}  # fmt: skip


@pytest.mark.parametrize("what", STALE)
@pytest.mark.parametrize("mended", [True, False])
def test_words_of_the_last_round_are_read_again(what: str, mended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the ring wraps, a processor that reorders loads may show the mark, or the record behind it, as it was a round before:
    all is looked at again. What stays old breaks the channel."""
    memory, writer, (reader,) = ring(1)
    sizes, place = STALE[what]
    data = memory[128:]
    for step, size in enumerate(sizes, 1):
        before = bytes(data)
        writer.write(step, bytes(size))
        if step < len(sizes):
            assert reader.poll() == (step, bytes(size))
    after = bytes(data)
    assert before[place] != after[place]
    data[place] = before[place]

    def looked(payload: bytes, start: int = 0) -> int:
        found = checksum(payload, start)
        if mended:
            data[place] = after[place]
        return found

    monkeypatch.setattr(engine.channel, "checksum", looked)
    if mended:
        assert reader.poll() == (len(sizes), bytes(sizes[-1]))
    else:
        with pytest.raises(ChannelBroken, match=f"read after step {len(sizes) - 1}"):
            reader.poll()


def test_a_ring_wraps_where_no_head_of_a_record_fits() -> None:
    """With eight bytes left a record can only lie at the start: it is read although the mark is not visible yet."""
    memory, writer, (reader,) = ring(1)
    for step, size in enumerate((1504, 1504, 1032), 1):
        writer.write(step, bytes(size))
        assert reader.poll() == (step, bytes(size))
    writer.write(4, b"behind the end")
    memory[-8:] = bytes(8)
    assert reader.poll() == (4, b"behind the end")


def test_a_gap_in_the_steps_breaks_the_channel() -> None:
    """Neither side lets a step be skipped or repeated."""
    _, writer, _ = ring(1)
    writer.write(1, b"")
    for step in (1, 3, 0):
        with pytest.raises(ChannelBroken, match=f"step {step} written after step 1"):
            writer.write(step, b"")
    memory, writer, (reader,) = ring(1)
    writer.write(1, b"a")
    assert reader.poll() == (1, b"a")
    writer.step = 2  # a writer that lost a step
    writer.write(3, b"b")
    with pytest.raises(ChannelBroken, match="step 3 read after step 1"):
        reader.poll()
    assert struct.unpack_from("<Q", memory, 64)[0] < struct.unpack_from("<Q", memory, 0)[0]


def test_a_record_too_large_is_refused_before_it_is_written() -> None:
    """A record of more than half the ring can never be sure to fit; the next one goes through."""
    _, writer, (reader,) = ring(1)
    with pytest.raises(ChannelBroken, match="does not fit"):
        writer.write(1, b"x" * (CAPACITY // 2))
    writer.write(1, b"x" * (CAPACITY // 2 - 16))
    record = reader.poll()
    assert record is not None
    assert len(record[1]) == CAPACITY // 2 - 16


def test_waiting_spins_then_sleeps_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter makes its polls without sleeping, then sleeps short, then longer; `reset` starts over."""
    waiter, slept = Waiter(spin=2000), list[float]()
    monkeypatch.setattr("engine.channel.time", SimpleNamespace(sleep=slept.append))
    for _ in range(2000):
        waiter.wait()
    assert slept == []
    for _ in range(50_000):
        waiter.wait()
    assert slept == sorted(slept)
    assert set(slept) == {50e-6, 0.001, 0.005}
    waiter.reset()
    slept.clear()
    for _ in range(2001):
        waiter.wait()
    assert slept == [50e-6]


def test_a_late_look_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that comes late, to a process that stands still meanwhile, is read once more."""
    memory, writer, (reader,) = ring(1)
    writer.write(1, b"hello")
    at = bytes(memory).index(b"hello")
    memory[at : at + 1] = b"j"

    def slow(payload: bytes, step: int = 0) -> int:
        summed = checksum(payload, step)
        memory[at : at + 1] = b"h"
        time.sleep(0.002)
        return summed

    monkeypatch.setattr(engine.channel, "checksum", slow)
    assert reader.poll() == (1, b"hello")
