"""The encode stage: how often encoders run, whose rows go where, what is kept."""

import hashlib
import random
from collections import deque
from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from engine import media_memory
from engine.media_memory import MediaReader
from engine.plan import Admission, Encode, StepPlan, encode_plan, read_plan
from engine.protocol import DecodedItem, PlacedItem, SamplingParams
from engine.rank import output_cache
from engine.rank.batch import Chunk
from engine.rank.models.architecture import MediaEncoder
from engine.rank.parallel import Parallel, Single
from engine.rank.stages import encode_stage
from engine.rank.stages.encode_stage import EncodeStage, reaches_encodes
from engine.rank_status import EncoderFigures
from tests.support.engine.media import MEMORY, plan_of
from tests.support.engine.plans import PrefillChunk
from tests.support.engine.threads import ThreadParallel, run_ranks

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


class Counting:
    """An encoder whose rows are (mean of the picture's pixels, its height, the row's number)."""

    out, dtype = torch.empty(3, 1), torch.float32

    def __init__(self) -> None:
        self.calls: list[int] = []

    def inputs(self, data: Tensor) -> list[Tensor]:
        return [data] if data.dim() == 3 else list(data)

    def rows(self, one: Tensor) -> int:
        return one.shape[0] * one.shape[1] // 48**2

    def pieces(self, batch: Sequence[Tensor]) -> Generator[None, None, Tensor]:
        self.calls.append(len(batch))
        yield
        facts = [(one.float().mean().item(), one.shape[0], row) for one in batch for row in range(self.rows(one))]
        return torch.tensor(facts)


def placed(item: DecodedItem) -> PlacedItem:
    return MEMORY.place([item])[0]


def picture(first: int, shade: int, rows: int = 2, columns: int = 3) -> PlacedItem:
    data = bytes([shade]) * (48 * rows * 48 * columns * 3)
    end = first + rows * columns
    digest = hashlib.sha256(data).digest()
    return placed(DecodedItem(first, rows * columns, digest, ((first, end),), "image", (48 * rows, 48 * columns, 3), data))


def stage_of(cached: int = 1 << 20, parallel: Parallel = Single(), host: int = 0) -> tuple[EncodeStage, list[int]]:  # noqa: B008 (it has no state)
    """A stage, and the sizes of its encoder's batches."""
    encoder = Counting()
    kinds = ("image", "video")
    stage = EncodeStage(dict.fromkeys(kinds, cast("MediaEncoder", encoder)), CPU, parallel, host, MediaReader(MEMORY.fd))
    stage._cache = output_cache.OutputCache(CPU, cached, host)
    return stage, encoder.calls


def admit(stage: EncodeStage, *slots: int) -> None:
    """Sequences without media."""
    stage.admit([Admission(slot, 1, [5] * 3, 3, SamplingParams(max_tokens=1)) for slot in slots])


def encode(stage: EncodeStage, items: Sequence[PlacedItem], slots: Sequence[int] = (), admitted: Sequence[int] = ()) -> None:
    """To the end, as a plan does whose chunks follow at once."""
    admit(stage, *admitted)
    stage.encode(plan_of(items, slots))
    stage._gather()


def rows(stage: EncodeStage, *chunks: Chunk) -> list[tuple[int, tuple[float, ...]]]:
    """(row of the batch, values) of the chunks' soft tokens."""
    soft = stage.soft_tokens(chunks)
    return [] if soft is None else list(zip(soft.rows.tolist(), map(tuple, soft.values.tolist()), strict=True))


def test_text_before_an_item_does_not_wait_for_its_encoder() -> None:
    """A chunk that ends where an item begins launches nothing; one that ends a row later has the encoder run to its end."""
    for end, calls in ((4, []), (5, [1])):
        stage, seen = stage_of()
        stage.encode(plan_of([picture(4, 9)]))
        assert len(rows(stage, Chunk(0, 0, end, 0))) == end - 4
        assert seen == calls
        assert len(rows(stage, Chunk(0, end, 12, 0))) == 10 - end


@pytest.mark.parametrize(
    ("items", "room", "calls"),
    [
        ([picture(10 * at, at) for at in range(6)], 4096, [6]),
        ([picture(20 * at, at, 2, 2 + at % 2) for at in range(6)], 4096, [6]),
        ([picture(10 * at, at) for at in range(6)], 12, [2, 2, 2]),
        ([picture(10 * at, at) for at in range(2)], 5, [1, 1]),
        ([picture(10 * at, 1) for at in range(6)], 4096, [1]),
        ([], 4096, []),
    ],
    ids=["equal sizes", "two sizes", "a budget for two", "a budget for less than one", "one picture six times", "none"],
)
def test_how_often_encoders_run(monkeypatch: pytest.MonkeyPatch, items: list[PlacedItem], room: int, calls: list[int]) -> None:
    """Once for all pictures of a step, of whatever sizes; in as many parts as their rows need; each picture once."""
    monkeypatch.setattr(encode_stage, "ENCODER_ROWS", room)
    stage, called = stage_of()
    encode(stage, items)
    assert called == calls
    assert rows(stage, Chunk(0, 0, 200, 0)) == whole_rows(items)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_ranks_share_pictures(count: int) -> None:
    """Each picture is encoded by one rank of three, but a single one by all; every rank has the rows of all, in order."""
    items = [picture(20 * at, at, 2, 2 + at % 2) for at in range(count)]
    alone, _ = stage_of()
    encode(alone, items)
    right = rows(alone, Chunk(0, 0, 200, 0))

    def on_thread(parallel: ThreadParallel) -> tuple[object, int]:
        stage, calls = stage_of(parallel=parallel)
        encode(stage, items)
        return rows(stage, Chunk(0, 0, 200, 0)), sum(calls)

    found = run_ranks(3, on_thread)
    assert [one for one, _ in found] == [right] * 3
    encoded = [calls for _, calls in found]
    assert encoded == [1] * 3 if count == 1 else sum(encoded) == count
    assert max(encoded) <= max(1, -(-count // 2))


def test_data_are_read_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of them at a time. Encodes have not ended before; a chunk without their rows is computed meanwhile, and one that has
    some reads the rest. What is in the cache is not read again."""
    monkeypatch.setattr(media_memory, "PIECE_BYTES", 10_000)
    items = [picture(4, 9), picture(20, 8)]  # of 41 472 bytes
    for reaches in (False, True):
        stage, calls = stage_of()
        media = stage._media
        for plan, pieces in enumerate((10, 0)):
            admit(stage, 0)
            stage.encode(plan_of(items))
            assert (len(media.left), stage.ended, stage.read) == (pieces, plan, plan + (not pieces))
            for left in range(pieces - 1, pieces // 2, -1):
                assert (stage.advance(), stage.ended, stage.read, len(media.left)) == (True, plan, plan, left)
            unread = len(media.left)
            assert rows(stage, Chunk(0, 0, 4, 0)) == []
            assert (len(media.left), stage.ended) == (unread, plan)
            while not reaches and stage.advance():
                assert (stage.ended > plan) == (not media.left and stage._pieces is None)
            assert [values[0] for _, values in rows(stage, Chunk(0, 4, 30, 0))] == [9.0] * 6 + [8.0] * 6
            assert (list(media.left), stage.ended, stage.read) == ([], plan + 1, plan + 1)
        assert calls == [2]


def test_a_rank_reads_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven frames three ranks read each one once, where it is; a single picture is read by all."""
    read = list[int]()
    honest = MediaReader.read_into

    def noted(self: MediaReader, buffer: memoryview, place: int) -> None:
        read.append(place)
        honest(self, buffer, place)

    monkeypatch.setattr(MediaReader, "read_into", noted)
    frame = 48 * 48 * 3
    data = b"".join(bytes([shade]) * frame for shade in range(7))
    video = placed(DecodedItem(0, 7, bytes(32), tuple((at, at + 1) for at in range(7)), "video", (7, 48, 48, 3), data))
    alone = picture(0, 1)

    def on_thread(parallel: ThreadParallel) -> list[object]:
        stage, _ = stage_of(parallel=parallel)
        encode(stage, [video])
        found = rows(stage, Chunk(0, 0, 9, 0))
        encode(stage, [alone], admitted=[0])
        return found

    assert run_ranks(3, on_thread) == [[(at, (float(at), 48.0, 0)) for at in range(7)]] * 3
    assert sorted(read) == sorted([*(video.place + at * frame for at in range(7)), *[alone.place] * 3])


def random_pictures(rng: random.Random) -> list[PlacedItem]:
    return [picture(20 * at, rng.randint(1, 8), 2, 2 + rng.randint(0, 1)) for at in range(rng.randint(1, 3))]


def whole_rows(items: Sequence[PlacedItem]) -> list[tuple[int, tuple[float, float, int]]]:
    """What a chunk from 0 on has of pictures of two cells' height."""
    return [(item.first + row, (MEMORY.decoded(item).data[0], 96.0, row)) for item in items for row in range(item.length)]


@pytest.mark.parametrize("fault", [False, True])
def test_ranks_that_have_read_different_parts_agree(monkeypatch: pytest.MonkeyPatch, fault: bool) -> None:
    """Three ranks, each of which has read and launched as much as chance wants when the next plan comes or rows are read, have the
    rows of all pictures (planted fault: one reads the rest to other memory)."""
    monkeypatch.setattr(media_memory, "PIECE_BYTES", 5_000)
    rng = random.Random(1)
    steps = [random_pictures(rng) for _ in range(20)]
    read_now = [rng.random() < 0.5 for _ in steps]

    def on_thread(parallel: ThreadParallel) -> list[object]:
        stage, own = stage_of(200, parallel)[0], random.Random(parallel.rank)
        media = stage._media
        finish = media.finish

        def elsewhere() -> None:
            media.left = deque((memoryview(bytearray(len(piece))), place) for piece, place in media.left)
            finish()

        if fault and parallel.rank == 1:
            monkeypatch.setattr(media, "finish", elsewhere)
        seen = []
        for items, now in zip(steps, read_now, strict=True):
            admit(stage, 0)
            stage.encode(plan_of(items))
            for _ in range(own.randint(0, 40)):
                stage.advance()
            if now:
                seen.append(rows(stage, Chunk(0, 0, 200, 0)))
        return seen

    shown = [items for items, now in zip(steps, read_now, strict=True) if now]
    right = [whole_rows(items) for items in shown]
    assert (run_ranks(3, on_thread) == [right] * 3) == (not fault)


def test_rows_follow_chunks() -> None:
    """A picture that chunks cut gives each its part, at its place in the batch, and goes behind its end; another slot's stays."""
    stage, _ = stage_of()
    encode(stage, [picture(2, 7), picture(4, 9)], [0, 1])
    assert rows(stage, Chunk(0, 0, 5, 10), Chunk(1, 0, 4, 15)) == [(12 + at, (7.0, 96.0, float(at))) for at in range(3)]
    assert rows(stage, Chunk(0, 5, 9, 0)) == [(at, (7.0, 96.0, 3.0 + at)) for at in range(3)]
    assert rows(stage, Chunk(0, 0, 9, 0)) == []
    assert len(rows(stage, Chunk(1, 4, 10, 0))) == 6


def test_a_new_sequence_has_nothing_of_the_last_one() -> None:
    """A slot's rows go when it is admitted again; those that come with the admission stay."""
    stage, _ = stage_of()
    encode(stage, [picture(0, 7)])
    encode(stage, [picture(1, 9)], admitted=[0])
    assert [values[0] for _, values in rows(stage, Chunk(0, 0, 9, 0))] == [9.0] * 6


def test_between_a_videos_frames_is_text() -> None:
    """Rows of a video go to its spans alone."""
    stage, calls = stage_of()
    data = bytes([1]) * (48 * 48 * 3) + bytes([2]) * (48 * 48 * 3)
    video = placed(DecodedItem(3, 5, bytes(32), ((3, 4), (7, 8)), "video", (2, 48, 48, 3), data))
    encode(stage, [video])
    assert [(row, values[0]) for row, values in rows(stage, Chunk(0, 0, 9, 0))] == [(3, 1.0), (7, 2.0)]
    assert calls == [2]


def test_what_was_done_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, frames and clips by number, rows, and the time in encoders; two equal items of a step are encoded once. What is
    found takes no time, and what there is no room for is counted (planted fault: encoders that take no time)."""
    size, slow, clock = 6 * 3 * 4, 20_000_000, [0]
    monkeypatch.setattr("engine.rank.step_clock.time", SimpleNamespace(monotonic_ns=lambda: clock[0]))

    def figures() -> list[EncoderFigures]:
        stage, _ = stage_of(2 * size)
        run = Counting.pieces

        def slowly(self: Counting, batch: Sequence[Tensor]) -> Generator[None, None, Tensor]:
            clock[0] += slow
            return (yield from run(self, batch))

        monkeypatch.setattr(Counting, "pieces", slowly)
        frames = bytes([1]) * (48 * 48 * 3) + bytes([2]) * (48 * 48 * 3)
        video = placed(DecodedItem(30, 5, bytes(32), ((30, 31), (34, 35)), "video", (2, 48, 48, 3), frames))
        shown = []
        for items in ([picture(0, 1), video, picture(10, 1)], [picture(0, 1)], [picture(0, 2), picture(10, 3)]):
            encode(stage, items, admitted=[0])
            shown.append(stage.figures)
        monkeypatch.setattr(Counting, "pieces", run)
        return shown

    first, second, third = figures()
    assert first[1:] == (1, 2, 0, 8, 3, 1, 0, 0, size + 2 * 12, 0)
    assert second[1:] == (1, 2, 0, 8, 4, 2, 0, 0, size + 2 * 12, 0)
    assert third[1:] == (3, 2, 0, 20, 6, 2, 0, 2, 2 * size, 0)
    assert (first.us, second.us, third.us - second.us >= 20_000) == (40_000, 40_000, True)
    slow = 0
    assert figures()[0].us == 0


def test_outputs_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that was encoded is not encoded again while there is room for its rows, the oldest of which go first; the same
    bytes of another shape are another picture (planted fault: found by the digest alone)."""
    size = 6 * 3 * 4
    stage, calls = stage_of(2 * size)
    for shade in (1, 2, 1, 3, 1, 2):
        encode(stage, [picture(0, shade)], admitted=[0])
        assert rows(stage, Chunk(0, 0, 9, 0))[0][1][0] == shade
    assert calls == [1] * 4  # of 1, 2, 3, and 2 again
    stage, calls = stage_of()
    for faulty in (False, True):
        if faulty:
            monkeypatch.setattr(encode_stage, "_key", lambda item: item.digest)
            stage, calls = stage_of()
        for shape in ((2, 3), (3, 2)):
            encode(stage, [picture(0, 5, *shape)], admitted=[0])
            height = rows(stage, Chunk(0, 0, 9, 0))[0][1][1]
        assert (height == 96.0) == faulty


SHOWN = (1, 2, 3, 4, 1, 5, 3, 2)  # two fit on the device, two more on the host


@pytest.mark.parametrize(("host", "encoded", "host_hits", "evictions"), [(2, 6, 2, 2), (0, 8, 0, 6)])
def test_the_host_keeps_what_the_device_has_no_room_for(host: int, encoded: int, host_hits: int, evictions: int) -> None:
    """A picture comes back from the host as it was, and is encoded again when it is gone there too; both keep to their bytes."""
    size = 6 * 3 * 4
    stage, calls = stage_of(2 * size, host=host * size)
    for shade in SHOWN:
        encode(stage, [picture(0, shade)], admitted=[0])
        assert rows(stage, Chunk(0, 0, 9, 0)) == [(row, (shade, 96.0, row)) for row in range(6)]
        assert stage.figures.cached_bytes <= 2 * size
        assert stage.figures.host_bytes <= host * size
    assert sum(calls) == encoded
    assert (stage.figures.host_hits, stage.figures.evictions) == (host_hits, evictions)


@pytest.mark.parametrize("host", [0, 2])
def test_slots_hold_no_more_on_the_device(monkeypatch: pytest.MonkeyPatch, host: int) -> None:
    """Five slots wait with a picture each where the device has room for two: the others' rows are on the host, and are right."""
    copies, size = list[Tensor](), 6 * 3 * 4

    def downloaded(rows: Tensor) -> Tensor:
        copies.append(rows.clone())
        return copies[-1]

    monkeypatch.setattr(output_cache, "downloaded", downloaded)
    stage, _ = stage_of(2 * size, host=host * size)
    for slot in range(5):
        encode(stage, [picture(0, slot)], [slot])
    outputs = [item.output for items in stage._slot_items.values() for item in items]
    left = [output.rows for output in outputs if output and not any(output.rows is copy for copy in copies)]
    assert sum(one.nbytes for one in left) == stage.figures.cached_bytes == 2 * size
    for slot in range(5):
        assert rows(stage, Chunk(slot, 0, 9, 0)) == [(row, (slot, 96.0, row)) for row in range(6)]


def test_a_wrong_copy_on_the_host_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: rows a place off, of what is found again and of what a slot holds."""
    monkeypatch.setattr(output_cache, "downloaded", lambda rows: rows.roll(1, 0))
    stage, _ = stage_of(6 * 3 * 4)
    for slot in (0, 1):
        encode(stage, [picture(0, 1 + slot)], [slot])
    assert rows(stage, Chunk(0, 0, 9, 0))[1] == (1, (1.0, 96.0, 0.0))
    stage, _ = stage_of(6 * 3 * 4, host=1 << 10)
    for shade in (1, 2, 1):
        encode(stage, [picture(0, shade)], admitted=[0])
    assert rows(stage, Chunk(0, 0, 9, 0))[1] == (1, (1.0, 96.0, 0.0))


@pytest.mark.parametrize("host", [0, 300])
def test_ranks_agree_on_what_is_kept(host: int) -> None:
    """Random pictures of random sizes, some a step: three ranks have the same of each, and have encoded the same."""
    rng = random.Random(host)
    steps = [random_pictures(rng) for _ in range(40)]

    def on_thread(parallel: ThreadParallel) -> tuple[list[object], tuple[int, ...]]:
        stage, _ = stage_of(200, parallel, host)
        seen = []
        for items in steps:
            encode(stage, items, admitted=[0])
            seen.append(rows(stage, Chunk(0, 0, 200, 0)))
        return seen, stage.figures[1:]

    right = [whole_rows(items) for items in steps]
    made = run_ranks(3, on_thread)
    assert [seen for seen, _ in made] == [right] * 3
    assert len({figures for _, figures in made}) == 1


def test_which_plans_need_their_items_at_once() -> None:
    """One with a chunk beyond an item's first position, in the item's slot; not one whose chunks end there, or have other slots."""

    def reaches(*chunks: PrefillChunk) -> bool:
        encodes = [Encode(1, picture(20, 1)), Encode(3, picture(40, 1))]
        return reaches_encodes(read_plan(encode_plan(StepPlan(1, chunks=list(chunks), encodes=encodes))))

    assert reaches(PrefillChunk(1, 0, 21, 21))
    assert reaches(PrefillChunk(0, 0, 90, 90), PrefillChunk(3, 30, 64, 64))
    assert not reaches()
    assert not reaches(PrefillChunk(1, 0, 20, 20), PrefillChunk(3, 0, 30, 30), PrefillChunk(2, 0, 90, 90))


def test_an_item_is_let_go_with_its_last_row() -> None:
    """A chunk that ends where the item does is the last to need it; one that ends a row before is not."""
    for end, kept in ((10, 0), (9, 1)):
        stage, _ = stage_of()
        encode(stage, [picture(4, 9)])
        rows(stage, Chunk(0, 0, end, 0))
        assert len(stage._slot_items[0]) == kept
