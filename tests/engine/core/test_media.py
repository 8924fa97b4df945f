"""Prompts with images, video and audio in the core: their page keys; which chunks they are computed in, and when."""

import random
from array import array
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest

from engine.core import prefix
from engine.core.allocator import Allocator, first_page
from engine.core.pending import MediaUses, PendingTransfers
from engine.core.prefix import extend_keys, root_key
from engine.core.requests import KEPT_MEDIA_BYTES, MEDIA_LOST, Requests
from engine.core.sequence import MediaState, Sequence
from engine.core.step_budget import StepBudget
from engine.geometry import KVGroup
from engine.lifeline import StepTimes
from engine.protocol import AbortReason, FinishReason, MediaEnd, Output, PlacedItem
from tests.support.engine.scheduling import SchedulerConfig, one_token_each, request_of, scheduler_of
from tests.support.engine.world_checks import check_ends
from tests.support.engine.world_runs import simulate
from tests.support.engine.worlds import World

pytestmark = pytest.mark.pure

PAGE, PLACEHOLDER = 4, 9
SLIDING = KVGroup(0, "sliding", (0,), 1, 256, 9, PAGE, bidirectional=True)
GROUPS = (SLIDING, KVGroup(1, "full", (1,), 1, 512, None, PAGE))


def picture(first: int, length: int, name: int, number: int = 0) -> PlacedItem:
    """Of request `number`; a byte a position."""
    place = (number << 20) + first
    return PlacedItem(first, length, bytes([name]) * 32, ((first, first + length),), "image", (max(0, length),), place)


class Asked(NamedTuple):
    """Of a tenant: text and pictures."""

    salt: str
    tokens: list[int]
    media: list[PlacedItem]

    def keys(self) -> list[bytes]:
        """A page at a time, as they are asked for."""
        keys = []
        for count in range(len(self.tokens) // PAGE + 1):
            extend_keys(keys, root_key(self.salt), array("i", self.tokens), PAGE, count, self.media)
        return keys

    def content(self, end: int) -> "Asked":
        """All that positions below `end` depend on."""
        return self._replace(tokens=self.tokens[:end], media=[item for item in self.media if item.first < end])


def prompt(rng: random.Random) -> Asked:
    """Text and media of few sizes, contents and spans, so that many prompts are alike."""
    asked = Asked(rng.choice(("", "", "", "1")), [], [])
    while len(asked.tokens) < 24:
        asked.tokens.extend(rng.choices((5, 6), (9, 1), k=rng.randint(1, 2)))
        length = rng.choice((0, 1, 3, 6))
        if length:
            item = picture(len(asked.tokens), length, rng.randint(1, 2))
            asked.media.append(item if rng.random() < 0.7 else msgspec.structs.replace(item, spans=()))
        asked.tokens.extend([PLACEHOLDER] * length)
    return asked


def wrong_keys(seeds: range) -> int:
    """Pages of pairs of random prompts whose keys are equal where their contents are not, or the other way round."""
    wrong = 0
    for seed in seeds:
        rng = random.Random(seed)
        one, other = prompt(rng), prompt(rng)
        for page, (key, another) in enumerate(zip(one.keys(), other.keys(), strict=False)):
            end = (page + 1) * PAGE
            wrong += (key == another) != (one.content(end) == other.content(end))
    return wrong


def test_page_keys_are_equal_where_contents_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prompts, whatever text and media stand where in them, with what spans, and whose they are. Planted faults: keys that
    know no spans, and keys of the tokens alone."""
    assert wrong_keys(range(2000)) == 0
    described = prefix._media_by_page

    def without_spans(media: list[PlacedItem], page: int) -> dict[int, bytes]:
        return described([msgspec.structs.replace(item, spans=()) for item in media], page)

    monkeypatch.setattr(prefix, "_media_by_page", without_spans)
    assert wrong_keys(range(2000)) > 20
    monkeypatch.setattr(prefix, "_media_by_page", lambda media, page: {})
    assert wrong_keys(range(2000)) > 50


def answer(item: PlacedItem, length: int = 10, pages: tuple[int, int] = (60, 60)) -> Output:
    """Of a request with this item, the last that it is told."""
    scheduler = scheduler_of(SchedulerConfig(GROUPS, pages, 4, 100, 16))
    scheduler.requests.add(request_of(1, [5] * length, media=(item,)))
    while scheduler.requests.unfinished:
        scheduler.commit(one_token_each(scheduler, scheduler.schedule()))
    return scheduler.requests.drain()[-1]


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        (picture(7, 4, 1), "end of the prompt"),
        (picture(-1, 2, 1), "overlaps"),
        (picture(3, 0, 1), "overlaps"),
        (msgspec.structs.replace(picture(3, 2, 1), spans=((3, 4), (3, 5))), "span"),
        (msgspec.structs.replace(picture(3, 2, 1), spans=((4, 6),)), "span"),
    ],
)
def test_media_that_do_not_fit_their_prompt_are_refused(item: PlacedItem, complaint: str) -> None:
    """Each is an error of its request that says what is wrong."""
    output = answer(item)
    assert (output.finish, output.invalid) == (FinishReason.error, True)
    assert complaint in (output.error or "")


def chunks_of(
    media: list[PlacedItem], length: int, budget: int, groups: tuple[KVGroup, ...] = GROUPS
) -> list[tuple[tuple[int, int], int]]:
    """(chunk, positions encoded in its step) of a prompt that is alone."""
    scheduler = scheduler_of(SchedulerConfig(groups, (60, 60), 4, 100, budget, encoder_rows=8))
    scheduler.requests.add(request_of(1, [5] * length, media=tuple(media)))
    chunks = []
    while (plan := scheduler.schedule()) is not None:
        ((_, start, end, *_),) = plan.chunks
        chunks.append(((start, end), sum(item.length for _, item in plan.encodes)))
    return chunks


def test_chunks_end_before_a_span_or_behind_it() -> None:
    """What is left of a budget before a span stays unused; a span longer than the budget is a chunk of its own."""
    assert chunks_of([picture(6, 4, 1)], 20, 8) == [((0, 6), 0), ((6, 14), 4), ((14, 20), 0)]
    assert chunks_of([picture(6, 12, 1)], 20, 8) == [((0, 6), 0), ((6, 18), 12), ((18, 20), 0)]


def test_chunks_cut_what_is_seen_causally() -> None:
    """Where no layer sees tokens both ways, a span is cut like text, and no plan names it."""
    causal = (replace(SLIDING, bidirectional=False), GROUPS[1])
    assert chunks_of([picture(6, 12, 1)], 20, 8, causal) == [((0, 8), 12), ((8, 16), 0), ((16, 20), 0)]


def test_what_a_step_encodes_is_bounded() -> None:
    """Of three pictures two have rows in the first step; the prompt waits before the third."""
    pictures = [picture(first, 4, 1) for first in (0, 5, 10)]
    assert chunks_of(pictures, 20, 16) == [((0, 10), 8), ((10, 20), 4)]


def planned_beside(decoding: bool, text_before: int = 2) -> list[tuple[int, int, int]]:
    """(decode rows, encodes, prompt tokens) of steps with three prompts of text, a picture of 4 rows and a token, whose encodes
    take three steps each."""
    scheduler = scheduler_of(SchedulerConfig(GROUPS, (60, 60), 4, 100, 32))
    scheduler.requests.add(request_of(0, [5] * 8, 20 if decoding else 1))
    shown = []
    launched = []  # steps with encodes
    for step in range(12):
        if step in (1, 2):
            for number in range(step):
                item = picture(text_before, 4, 3 * step + number)
                scheduler.requests.add(request_of(3 * step + number, [5] * (text_before + 5), media=(item,)))
        if (plan := scheduler.schedule()) is None:
            continue
        shown.append((len(plan.rows), len(plan.encodes), plan.prompt_tokens))
        launched += [step] * bool(plan.encodes)
        result = one_token_each(scheduler, plan)
        scheduler.commit(result._replace(ended=sum(step >= began + 2 for began in launched)))
    return shown


def test_decode_rows_do_not_wait_for_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a decode row a picture's positions come once its encode has ended, with short text before it, and what came meanwhile
    is encoded then, together; longer text comes at once; and with nobody to hold up all do. Planted fault: encoders that are said
    to have ended."""
    steps = [(0, 0, 8), (1, 1, 0), (1, 0, 0), (1, 0, 0), (1, 2, 7), (1, 0, 0), (1, 0, 0), (1, 0, 14)]
    assert planned_beside(decoding=True)[:8] == steps
    assert planned_beside(decoding=True, text_before=5)[:5] == [(0, 0, 8), (1, 1, 5), (1, 0, 10), (1, 0, 0), (1, 2, 5)]
    assert planned_beside(decoding=False)[:3] == [(0, 0, 8), (0, 1, 7), (0, 2, 14)]
    monkeypatch.setattr(PendingTransfers, "ended", property(lambda self: 1000, lambda self, value: None), raising=False)
    assert planned_beside(decoding=True)[2] == (1, 2, 7)


def crowded_world(seed: int) -> World:
    """Eight prompts of pictures, in pages that hold hardly more than one sequence; small steps."""
    rng = random.Random(seed)
    world = World(seed)
    sliding = KVGroup(0, "sliding", (0,), 1, 256, 15, PAGE, bidirectional=True)
    world.groups = (sliding, GROUPS[1])
    world.config = SchedulerConfig(world.groups, (11, rng.randint(22, 26)), 2, 96, 3, prefix_cache=True, encoder_rows=8)
    world.config = replace(world.config, kv_events="collected")
    world.media = {}
    world.requests = []
    for number in range(8):
        length = rng.randint(10, 61)
        media = []
        first = rng.choice((0, 5))
        while first < length:
            media.append(picture(first, min(length - first, rng.randint(1, 16)), 1, number))
            first = media[-1].end + rng.randint(0, 4)
        asked = request_of(number, [PLACEHOLDER] * length, rng.randint(1, 89), media=tuple(media))
        params = msgspec.structs.replace(asked.params, seed=5000 + number)
        world.requests.append(msgspec.structs.replace(asked, params=params, priority=rng.choice((0, 2)), clip=True))
        world.media[params.seed] = asked.media
    world.depth = 2
    world.abort_chance = 0.0
    world.follow_chance = 0.0
    world.nan_chance = 0.0
    world.stop_chance = 0.0
    return world


def test_the_first_gets_the_encoders_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages are so few that the first in order preempts another before each try, all end: the readmitted one starts no
    encodes before the first's. Planted fault: it starts them, and in some world the first finds the encoders busy for ever."""
    monkeypatch.setattr("tests.support.engine.world_runs._MAX_STEPS", 1500)
    seeds = range(13, 17)
    for world in map(crowded_world, seeds):
        check_ends(world, simulate(world))
    monkeypatch.setattr(Sequence, "before_item", False)
    endless = 0
    for world in map(crowded_world, seeds):
        try:
            simulate(world)
        except AssertionError as error:
            endless += "no end in sight" in str(error)
    assert endless > 0


def media_lost(worlds: list[World], kept: int) -> int:
    """How many requests of these worlds end because their media are gone, where so many bytes are kept; all others end well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.core.requests.KEPT_MEDIA_BYTES", kept)
        note = Requests.note_computed

        def bounded(requests: Requests, sequence: Sequence) -> None:
            note(requests, sequence)
            assert sum(one.media.kept_bytes for one in requests.unfinished.values()) <= kept

        patch.setattr(Requests, "note_computed", bounded)
        runs = [(world, simulate(world)) for world in worlds]
        for world, run in runs:
            check_ends(world, run)
        return sum(output.error == MEDIA_LOST for _, run in runs for output in run.outputs)


def test_media_are_dropped_when_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of media whose positions are computed only a bound is kept. Where preempted sequences need more, they end with an error, and
    nothing is encoded without data; with room for them none does. Planted fault: nobody asks whether the data are there."""
    lost = [media_lost([*map(crowded_world, range(2)), *map(World, range(60))], kept) for kept in (0, 12, KEPT_MEDIA_BYTES)]
    print(f"lost: {lost}")
    assert lost[0] > lost[1] >= lost[2] == 0
    monkeypatch.setattr(MediaState, "lacks_data", lambda *_: False)
    with pytest.raises(AssertionError, match="an item to encode has no data"):
        media_lost([*map(crowded_world, range(2)), *map(World, range(60))], 0)


def test_media_of_the_youngest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one picture that of the younger of two sequences stays, and media that are not all computed yet; there is no
    room for two pictures of a sequence. With room for all, the planted fault, all stay."""
    for kept in (4, 1000):
        monkeypatch.setattr("engine.core.requests.KEPT_MEDIA_BYTES", kept)
        scheduler = scheduler_of(SchedulerConfig(GROUPS, (60, 60), 4, 100, 16))
        for number, media in enumerate(([picture(3, 4, 1)], [picture(3, 4, 1)], [picture(3, 4, 1), picture(24, 4, 1)])):
            scheduler.requests.add(request_of(number, [5] * (10 + 20 * (len(media) - 1)), 20, media=tuple(media)))
        dropped = []
        for step in range(6):
            scheduler.commit(one_token_each(scheduler, scheduler.schedule())._replace(ended=step + 1))
            dropped.append([one.media.dropped for one in scheduler.requests.running])
        assert dropped[0] == [False] * 3
        assert ([True, False, False] in dropped) == (kept == 4)
        assert dropped[-1] == ([True, False, True] if kept == 4 else dropped[0])


@pytest.mark.parametrize(("rows", "waited_s"), [(8, 0.05), (4, 0.1), (12, 0.0)])
def test_waits_for_an_encoder_are_counted(rows: int, waited_s: float) -> None:
    """Of three pictures of 4 rows beside another prompt: steps of 50 ms in which some wait; none where one step takes all."""
    scheduler = scheduler_of(SchedulerConfig(GROUPS, (60, 60), 4, 100, 32, encoder_rows=rows))
    for number, media in enumerate(([picture(first, 4, 1) for first in (0, 5, 10)], [])):
        scheduler.requests.add(request_of(number, [5] * 15, media=tuple(media)))
    waiting = []
    while (plan := scheduler.schedule()) is not None:
        waiting.append(scheduler.load().encoder_waiting)
        scheduler.commit(one_token_each(scheduler, plan)._replace(took_us=50_000))
    assert waiting[-1] == 0
    assert sum(waiting) * 0.05 == pytest.approx(waited_s) == scheduler.load().encoder_wait_s


def uses_of(choices: int) -> tuple[PendingTransfers, MediaUses]:
    """Of media that so many requests have."""
    transfers = PendingTransfers()
    uses = MediaUses(transfers)
    for _ in range(choices):
        uses.add(0)
    return transfers, uses


def test_media_memory_is_freed_once() -> None:
    """After the last of a prompt's choices that has it, and not before the front has sent all of them."""
    _, uses = uses_of(2)
    uses.drop(0)
    uses.drop(0)
    assert uses.next_free(0) is None
    uses.add(0)  # a third choice, which the front has sent last
    uses.end(MediaEnd(0, 4096))
    assert uses.next_free(0) is None
    uses.drop(0)
    assert [uses.next_free(0), uses.next_free(0)] == [range(4096), None]
    uses.end(MediaEnd(8192, 12288))  # its requests were refused
    assert uses.next_free(0) == range(8192, 12288)


def test_much_memory_is_freed_in_pieces() -> None:
    """All of it once, 8 MiB at a time."""
    _, uses = uses_of(0)
    uses.end(MediaEnd(4096, 4096 + (20 << 20)))
    pieces = [uses.next_free(0) for _ in range(4)]
    size = 8 << 20
    begins = (4096, 4096 + size, 4096 + 2 * size)
    assert pieces == [range(begins[0], begins[1]), range(begins[1], begins[2]), range(begins[2], begins[2] + size // 2), None]


@pytest.mark.parametrize("fault", [False, True])
def test_media_memory_is_read_before_it_is_freed(fault: bool) -> None:
    """A request that is aborted while a plan with its encode is in flight: every rank reads first (planted fault: transfers are
    not waited for)."""
    transfers, uses = uses_of(1)
    uses.end(MediaEnd(0, 4096))
    if fault:
        uses._transfers = PendingTransfers()
    transfers.begin()
    uses.drop(0)
    transfers.begin()
    assert (uses.next_free(0) is None) == (not fault)
    assert fault or uses.next_free(1) == range(4096)


def test_who_has_left_waits_for_no_encoder() -> None:
    """A request that is aborted beside a running one while its picture waits is not counted in the steps behind. Planted: it is."""
    counted = []
    for forgets in (PendingTransfers.forget, lambda self, sequence: None):
        scheduler = scheduler_of(SchedulerConfig(GROUPS, (60, 60), 4, 100, 32))
        scheduler.requests.add(request_of(0, [5] * 3, 50))
        for _ in range(3):
            scheduler.commit(one_token_each(scheduler, scheduler.schedule()))
        scheduler.requests.add(request_of(1, [5] * 15, media=(picture(2, 4, 1),)))
        scheduler.commit(one_token_each(scheduler, scheduler.schedule()))
        assert scheduler.load().encoder_waiting == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PendingTransfers, "forget", forgets)
            scheduler.requests.abort(1, AbortReason.client_gone)
            for _ in range(3):
                scheduler.commit(one_token_each(scheduler, scheduler.schedule()))
        counted.append(scheduler.load().encoder_waiting)
    assert counted == [0, 1]


def test_a_span_that_no_chunk_can_hold_is_refused() -> None:
    """Longer than the pages of sliding layers allow beside the window, or than any chunk may be."""
    for length, invalid in ((20, False), (40, True)):
        assert answer(picture(8, length, 1), 60, (10, 60)).invalid == invalid


@pytest.mark.parametrize("window", range(2, 12))
def test_a_span_is_taken_where_its_pages_fit_wherever_it_begins(window: int) -> None:
    """With one page less it is refused: its prompt could not go on, and would preempt the others for ever."""
    group = replace(SLIDING, window=window)
    for length in range(1, 30):
        pages = max(-(-(low + length) // PAGE) - first_page(group, low) for low in range(100, 100 + PAGE))
        held = [Allocator((group, GROUPS[1]), (count + 1, 60), caches=False).holds_span(length) for count in (pages - 1, pages)]
        assert held == [False, True], length


TIMES = StepTimes(((1, 10.0), (8, 10.0)), ((1, 10.0), (64, 12.0)), ((1, 0.0), (8, 0.0)), 0.0, 0.0, 0.0, 1)


def beside_pictures(target_ms: float | None) -> tuple[float, int]:
    """Mean ms of the steps of two streams beside a picture that always waits, and how many were encoded: quiet steps take 10 ms,
    the two behind an encode 8 more for each item of it."""
    times = TIMES if target_ms else None
    config = SchedulerConfig(GROUPS, (600, 600), 8, 3000, 32, step_times=times, tpot_target_ms=target_ms)
    scheduler, began, taken = scheduler_of(config), list[tuple[int, int]](), list[float]()
    for stream in range(2):
        scheduler.requests.add(request_of(stream, [5] * 8, 2000))
    for step in range(2000):
        while len(scheduler.requests.unfinished) < 6:
            number = 10 + step + len(scheduler.requests.unfinished) * 5000
            scheduler.requests.add(request_of(number, [5] * 7, media=(picture(2, 4, step % 200),)))
        plan = scheduler.schedule()
        assert plan is not None
        began += [(step, len(plan.encodes))] * bool(plan.encodes)
        taken.append(10.0 + sum(8.0 * items for first, items in began if first < step <= first + 2))
        result, encoded = one_token_each(scheduler, plan), sum(first + 2 <= step for first, _ in began)
        scheduler.commit(result._replace(ended=encoded, took_us=round(1e3 * taken[-1])))
        scheduler.requests.drain()
    return sum(taken[50:]) / len(taken[50:]), sum(items for first, items in began if first >= 50)


def test_a_target_holds_encoders_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside pictures that always wait, steps keep to the target on average, within a fiftieth, and use what it leaves; a target
    that no step meets still gives an encode every 128 steps. Planted fault: encodes begin whatever steps take."""
    (free, many), (bound, some) = beside_pictures(None), beside_pictures(11.0)
    print(f"no target: {free:.2f} ms, {many} pictures; of 11 ms {bound:.2f}, {some}")
    assert free > 15
    assert 10.8 < bound <= 1.02 * 11
    assert some == pytest.approx(1950 / 16, rel=0.1)
    assert 1950 / 130 <= beside_pictures(5.0)[1] <= 1950 / 126
    monkeypatch.setattr(StepBudget, "holds_encodes", False)
    assert beside_pictures(11.0)[0] > 13


@pytest.mark.parametrize("forgets", [True, False])
def test_lateness_is_forgotten_where_no_decode_row_can_run(forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late stream runs out of pages while an older request waits for its encode: it begins, and steps owe nothing any more.
    Planted fault: they still do."""
    if not forgets:
        monkeypatch.setattr(StepBudget, "forget_lateness", lambda self: None)
    config = SchedulerConfig(GROUPS, (60, 10), 4, 100, 32, step_times=TIMES, tpot_target_ms=10.0)
    scheduler = scheduler_of(config)
    scheduler.requests.add(request_of(0, [5] * 8, 28))
    plans = []
    for step in range(20):
        if step == 4:
            scheduler.requests.add(request_of(1, [5] * 15, priority=-1, media=(picture(11, 3, 1),)))
        plans.append(scheduler.schedule())
        scheduler.commit(one_token_each(scheduler, plans[-1])._replace(took_us=50_000))
        if plans[-1].encodes:
            break
    assert plans[-1].encodes
    assert not plans[-1].rows
    assert all(plan.rows for plan in plans[1:-1])
    assert scheduler._budget.holds_encodes is not forgets


def waits_after(ended: int) -> list[bool]:
    """Whether each of two sequences still waits, for the first and the second of two transfers, once those up to `ended` have
    ended."""
    pending, ids = PendingTransfers(), (1, 2)
    scheduler = scheduler_of(SchedulerConfig(GROUPS, (60, 60), 4, 100, 32))
    sequences = [scheduler.requests.add(request_of(number, [5] * 3)) for number in ids]
    for transfer, sequence in zip(ids, sequences, strict=True):
        assert sequence is not None
        pending.begin()
        pending.wait(sequence, transfer)
    pending.end(ended)
    pending.release()
    return [bool(sequence and sequence.waits) for sequence in sequences]


def test_a_sequence_waits_for_its_own_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on once that transfer has ended, whatever runs after it. Planted fault: it waits until nothing runs."""
    assert [waits_after(ended) for ended in range(3)] == [[True, True], [False, True], [False, False]]
    release = PendingTransfers.release
    monkeypatch.setattr(PendingTransfers, "release", lambda self: None if self.running else release(self))
    assert waits_after(1) == [True, True]
