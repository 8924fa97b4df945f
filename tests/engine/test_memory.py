"""The memory arithmetic of the KV cache."""

from dataclasses import replace
from typing import get_args

import pytest

from deploy.edge.edge_settings import SoftTokens
from engine import memory
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.geometry import KVGroup, read_geometry
from engine.memory import (
    CACHED_TOKENS,
    CPU_BYTES,
    PIECE_LOGITS,
    PIECES,
    adjustment_bytes,
    kv_budget,
    longest_sequence,
    pages_of,
    pool_pages,
    sampling_bytes,
)
from engine.plan import DEPTH
from engine.protocol import FinishReason, Output, PlacedItem
from engine.step_shapes import buckets, sequence_rows
from engine.vision_geometry import LARGEST_PICTURE
from tests.support.engine.kvmachine import KVMachine
from tests.support.engine.scheduling import SchedulerConfig, finish, one_token_each, request_of, scheduler_of, two_groups
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

SLIDING = KVGroup(0, "sliding", (0, 1), kv_heads=2, head_dim=256, window=1024)
FULL = KVGroup(1, "full", (2,), kv_heads=1, head_dim=512, window=None)
SLOTS, BUDGET, MAX_LEN = 8, 512, 8192
WINDOWS = SLOTS * (33 + 1) + DEPTH * 16 + 1  # ceil((1024 + 1) / 32) = 33
TAIL = 32  # pages that hold 1023 positions


def asked(spare: int, max_len: int = MAX_LEN, slots: int = SLOTS, *, cache: bool = False) -> tuple[int, ...]:
    """Pages when `spare` bytes are left behind the windows."""
    spent = WINDOWS * SLIDING.page_bytes
    return pool_pages(sized(slots, max_len, BUDGET, cache=cache), (SLIDING, FULL), spent + spare)


def sized(slots: int, max_len: int, budget: int, *, cache: bool) -> EngineConfig:
    """The settings that pools are sized by."""
    return EngineConfig(model="", device="cuda", max_seqs=slots, max_len=max_len, prefill_budget=budget, prefix_cache=cache)


def test_a_budget_is_the_share_less_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole bytes; it may be below zero, and then weights do not fit. The ranks of a CPU divide one bound."""
    monkeypatch.setattr(memory, "reserved_bytes", lambda config: 50)
    budgets = [(1000, 200, 0.9, 650), (1001, 0, 0.5, 450), (1000, 900, 0.9, -50)]
    for total, used, fraction, budget in budgets:
        assert kv_budget(EngineConfig(model="", device="cuda", memory_fraction=fraction), total, used) == budget
    cpu = [kv_budget(EngineConfig(model="", device="cpu", tp=tp), 0, 0) for tp in (1, 4)]
    assert cpu == [CPU_BYTES, CPU_BYTES // 4]


def test_tables_of_adjustments_are_for_all_slots_and_the_paddings() -> None:
    """`max_seqs` slots and one for padding rows take equal parts, at every cut of the vocabulary."""
    for tp in (1, 3, 4):
        sizes = [adjustment_bytes(slots, 262_144, tp) for slots in (7, 8)]
        assert sizes[1] == 9 * (sizes[1] - sizes[0]) > 0


@pytest.mark.parametrize(
    ("member", "tp", "least"), [("31b", 2, 1536), ("31b", 4, 1536), ("12b", 2, 3011), ("26b-a4b", 2, 0), ("31b", 1, 0)]
)
def test_ranks_norm_rows_of_their_own_where_a_step_has_work_enough(member: str, tp: int, least: int) -> None:
    """From so many rows on, up to the largest padded step; not one rank, nor ranks that read the residual elsewhere."""
    geometry = read_geometry(ROOT / "deploy" / "models" / "public" / member)
    for budget in (2048 - 100, 8192):
        rows = sequence_rows(EngineConfig(model="", tp=tp, device="cuda", max_seqs=100, prefill_budget=budget), geometry)
        assert (rows[0], rows[-1]) == (least, budget + 104) if least and budget + 104 >= least else not rows


def test_what_sampling_takes_is_reserved() -> None:
    """Logits of the largest padded step thrice, and pieces whatever the slots: 1.1 GB for 256 slots and a whole vocabulary. Were
    only one row's reserved, or `max_seqs` without their padding, it would be less. With drafts rows, and masks of a step, are as
    many times more."""
    assert buckets(250)[-1] == 256
    assert buckets(300)[-1] == 320
    for slots, rows, tp in ((250, 256, 1), (300, 320, 4), (1, 1, 1)):
        logits = 4 * rows * 262_144 // tp
        taken = sampling_bytes(slots, 262_144, tp) - adjustment_bytes(slots, 262_144, tp)
        assert taken == 3 * logits + 4 * PIECES * PIECE_LOGITS
    wide = sampling_bytes(250, 262_144, 4, 6) - sampling_bytes(250, 262_144, 4)
    assert wide == 5 * (3 * 4 * 256 * 262_144 // 4 + 251 * 4 * 262_144 // 32 // 4)
    assert 3 * 4 * 256 * 262_144 + 4 * PIECES * PIECE_LOGITS > 1.1e9


def test_sliding_by_need_and_full_by_what_is_left() -> None:
    """Sliding pages hold all windows and the budgets of two plans; every whole page that is left over is a full one."""
    page = FULL.page_bytes
    assert asked(100 * page) == (WINDOWS, 100)
    assert asked(101 * page - 1) == (WINDOWS, 100)


def test_no_more_than_all_slots_can_fill() -> None:
    """With memory to spare no group gets more pages than `slots` sequences of `max_len` tokens fill, and the null page."""
    assert asked(1 << 40) == (WINDOWS, SLOTS * MAX_LEN // 32 + 1)
    assert asked(1 << 40, max_len=100) == (SLOTS * 4 + 1, SLOTS * 4 + 1)


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("chunk", [1, 31, 32, 33, 512])
def test_windows_and_a_chunk_always_fit(slots: int, chunk: int) -> None:
    """Whatever position each slot is at, its window's pages and the chunks of two plans, none of whose results is in, fit the
    sliding pool."""
    group = SLIDING
    for start in range(5000, 5000 + 64):
        decode = len(group.pages_for(start, start + 1))
        prefill = len(group.pages_for(start, start + DEPTH * chunk))
        pages, _ = asked(1 << 40, slots=slots)
        chunks = min(slots, BUDGET // chunk)
        assert (slots - chunks) * decode + chunks * prefill < pages, (start, chunk)


@pytest.mark.parametrize("spare", [10, 200, 400, 800, 1600, 1 << 14])
@pytest.mark.parametrize("max_len", [2048, 65_536])
def test_windows_of_cached_conversations(spare: int, max_len: int) -> None:
    """Once every slot has a usual conversation, more of them get full pages and a window each; bytes are never exceeded."""
    left, page, tail = spare << 20, FULL.page_bytes, TAIL * SLIDING.page_bytes
    without, pages = asked(left, max_len), asked(left, max_len, cache=True)
    usual = min(max_len, CACHED_TOKENS) // 32
    cached, rest = divmod(pages[0] - without[0], TAIL)
    assert rest == 0
    assert 0 <= cached <= SLOTS
    assert (pages[0] - without[0]) * SLIDING.page_bytes + pages[1] * page <= left
    if cached:
        assert pages[1] >= (SLOTS + cached) * usual
    if cached < SLOTS:
        assert left < SLOTS * usual * page + (cached + 1) * (tail + usual * page)
        assert pages[1] == (left - cached * tail) // page
    else:
        assert pages[1] == min((left - cached * tail) // page, 2 * SLOTS * max_len // 32 + 1)


@pytest.mark.parametrize(("slots", "budget", "page"), [(1, 16, 16), (1, 512, 32), (2, 64, 8), (8, 512, 32)])
def test_the_largest_picture_is_taken(slots: int, budget: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small max_seqs and prefill_budget are, an API's largest picture is computed. Planted: pools made
    without regard to pictures refuse it."""
    groups = (replace(SLIDING, bidirectional=True, page=page), replace(FULL, page=page))
    config = sized(slots, 2048, budget, cache=False)
    picture = PlacedItem(100, LARGEST_PICTURE, bytes(32), ((100, 100 + LARGEST_PICTURE),), "image", (), 0)

    def output() -> Output:
        pages = pool_pages(config, groups, 1 << 30)
        scheduler = scheduler_of(SchedulerConfig(groups, pages, slots, 2048, budget))
        scheduler.requests.add(request_of(1, [5] * 1500, 3, media=(picture,)))
        while scheduler.requests.unfinished:
            scheduler.commit(one_token_each(scheduler, scheduler.schedule()))
        return scheduler.requests.drain()[-1]

    assert max(get_args(SoftTokens)) == LARGEST_PICTURE
    assert output().finish is FinishReason.length
    monkeypatch.setattr(memory, "LARGEST_PICTURE", 1)
    assert output().invalid == (slots == 1)


def test_pictures_that_are_seen_one_way_need_no_pages_of_their_own() -> None:
    """A model that sees a picture causally cuts it like text, and its pools are as without pictures."""
    causal = memory._sliding_pages(SLIDING, sized(1, MAX_LEN, 16, cache=False))
    both_ways = memory._sliding_pages(replace(SLIDING, bidirectional=True), sized(1, MAX_LEN, 16, cache=False))
    assert causal == 33 + 1 + DEPTH + 1 < both_ways == (LARGEST_PICTURE - 2) // 32 + 2 + TAIL + 1


@pytest.mark.parametrize("spare", [-1, 0, 2 * FULL.page_bytes - 1])
def test_too_little_memory_is_refused(spare: int) -> None:
    """Where not even one page of full attention fits beside the windows, the ConfigError says what was needed and what there is."""
    assert asked(2 * FULL.page_bytes) == (WINDOWS, 2)
    with pytest.raises(ConfigError, match=r"does not fit: .* MiB are available .* 8 sequences \(max_seqs\)"):
        asked(spare)


@pytest.mark.parametrize("pages", [None, (40, 40)])
def test_weights_beyond_the_share_are_refused(pages: tuple[int, ...] | None) -> None:
    """A budget below zero is told as what weights and reserves take too much, with the settings that help; given pages must fit
    what there is, to the byte."""
    folder = ROOT / "deploy" / "models" / "public" / "31b"
    config = EngineConfig(model=str(folder), device="cuda", tp=2, memory_fraction=0.83, pages=pages)
    words = r"^weights do not fit: .* 3\.00 GiB more of a GPU than memory_fraction 0\.83 allows at tp 2; .* lower max_seqs$"
    with pytest.raises(ConfigError, match=words):
        pages_of(config, -3 << 30)
    if pages is not None:
        taken = sum(40 * group.page_bytes for group in config.kv_groups)
        assert pages_of(config, taken) == pages
        with pytest.raises(ConfigError, match=r"^pages take 0\.54 GiB of a rank, which has 0\.54 GiB for them$"):
            pages_of(config, taken - 1)


@pytest.mark.parametrize("widest", [1, 4])
def test_the_longest_sequence_runs_to_its_end(widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of `longest_sequence` tokens is served by empty pools whatever part of it is prompt; one token more is refused, and
    told how many fit. Planted fault: a bound that is one too high lets in what stands still."""
    groups = two_groups()
    pages = (20, 9)
    longest = longest_sequence(groups, pages)

    def ends(prompt: int, tokens: int) -> Output:
        scheduler = scheduler_of(SchedulerConfig(groups, pages, 2, 64, 16, widest - 1))
        machine = KVMachine(groups, pages, 2, 64, lambda prefix, position, seed: 3)
        scheduler.requests.add(request_of(1, [1] * prompt, tokens))
        finish(scheduler, machine)
        return scheduler.requests.drain()[-1]

    for prompt in (1, longest // 2, longest - 1):
        assert ends(prompt, longest - prompt).finish is FinishReason.length
        refusal = ends(prompt, longest - prompt + 1)
        assert (refusal.invalid, refusal.code) == (True, "context_length_exceeded")
        assert f"at most {longest} " in (refusal.error or "")
    monkeypatch.setattr("engine.core.scheduler.longest_sequence", lambda *_: longest + 1)
    assert ends(1, longest).finish is None
