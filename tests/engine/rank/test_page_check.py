"""debug_pages on a rank: nothing to find in a real stream; every planted fault found in its step and named."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from torch import Tensor

from deploy.models.resolve import resolve
from engine.errors import PageViolation
from engine.geometry import KVGroup
from engine.plan import Admission, StepPlan, encode_plan, single_rows
from engine.protocol import SamplingParams
from engine.rank.attention import trtllm
from engine.rank.builder import Rank, build
from engine.rank.kv import KVCache
from engine.rank.page_check import PageCheck
from engine.rank.runner import Runner
from kernels.table_check import COPIED_ENTRY
from tests.conftest import Nano
from tests.golden.record import load
from tests.support.engine.plans import PageAppend, PageRelease, PrefillChunk
from tests.support.engine.ranks import Ranks, run, single
from tests.support.engine.recording import PAGES, config_of, tokens_of
from tests.support.flashinfer_calls import PROCESSORS, KernelStandIn, pinned

pytestmark = pytest.mark.cpu

STEP = 12  # by then three sequences decode
PLANS, RESULTS = load()
Plant = Callable[[Runner], None]


@pytest.fixture(scope="module")
def rank() -> Rank:
    return single(config_of(resolve("nano:31b"), 1, debug_pages=True))


def decoding(step: int) -> int:
    """A slot that decodes in plan `step`."""
    return next(plan for plan in PLANS if plan.step == step).rows[0][0]


def started(rank: Rank, steps: int) -> Runner:
    """A runner behind so many plans."""
    runner = build(rank, PAGES)
    for plan in PLANS[:steps]:
        run(runner, plan)
    return runner


def violation(runner: Runner, first: int, count: int = 1) -> str:
    """What one of `count` plans from index `first` on raises."""
    for plan in PLANS[first : first + count]:
        try:
            run(runner, plan)
        except PageViolation as error:
            return str(error)
    pytest.fail(f"no violation in {count} steps")


@pytest.fixture
def runner(rank: Rank) -> Runner:
    """A runner behind the plans before STEP."""
    return started(rank, STEP - 1)


def test_a_real_stream_has_no_violation(rank: Rank) -> None:
    """The golden stream, with its preemptions and prefixes, gives its tokens under the check."""
    runner = build(rank, PAGES)
    assert tokens_of([run(runner, plan) for plan in PLANS]) == tokens_of(RESULTS)


def stale_tail(runner: Runner) -> None:
    """The slot's last tenant left an entry behind its end."""
    runner.slots.cache.groups[1].table[decoding(STEP), -1] = 3


def copied_row(runner: Runner) -> None:
    """The longest row of the table was copied over another one, to the batch's maximum."""
    table = runner.slots.cache.groups[1].table
    longest = int((table != 0).sum(1).argmax())
    table[next(slot for slot in range(4) if slot != longest)] = table[longest]


def other_pools_id(runner: Runner) -> None:
    """The sliding group's entry holds the full group's page."""
    sliding, full = runner.slots.cache.groups
    slot = decoding(STEP)
    held = sliding.table[slot].nonzero().flatten().tolist()
    pages = full.table[slot].tolist()
    entry, page = next((at, page) for at in held for page in pages if page not in {0, int(sliding.table[slot, at])})
    sliding.table[slot, entry] = page


def freed_page(runner: Runner) -> None:
    """An entry names a page that nobody holds."""
    table = runner.slots.cache.groups[1].table
    slot = decoding(STEP)
    table[slot, 0] = next(page for page in range(1, PAGES[1]) if page not in table)


def out_of_range(runner: Runner) -> None:
    """An id that no pool has, in use: the kernels behind the check must not see it."""
    runner.slots.cache.groups[1].table[decoding(STEP), 0] = 2**31 - 7


PLANTED = {
    stale_tail: r"slot {slot}, group full, entry \d+: names page 3, expected no page; .*page 3",
    copied_row: r"slot \d, group full, entry \d+: (names|reads) page \d+, expected (no )?page.*; page \d+ is slot \d's entry \d",
    other_pools_id: r"slot {slot}, group sliding, entry \d+: reads page \d+, expected page \d+; (page \d+ is|nobody|its pool has)",
    freed_page: r"slot {slot}, group full, entry 0: reads page \d+, expected page \d+; nobody holds page \d+",
    out_of_range: r"slot {slot}, group full, entry 0: reads page 2147483641, expected page \d+; its pool has \d+ pages",
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_found_in_its_step(runner: Runner, plant: Plant) -> None:
    """The step that would read it raises; slot, group, entry and owner are named."""
    plant(runner)
    message = violation(runner, STEP - 1)
    assert message.startswith(f"step {STEP}: ")
    assert re.search(PLANTED[plant].format(slot=decoding(STEP)), message), message


def test_what_rows_gather_is_checked(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is right and a row whose page ids are not: the row and its position are named."""
    gather = KVCache.gather

    def wrong(self: KVCache, slots: Tensor, positions: Tensor, pages: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for page_ids in gather(self, slots, positions, pages):
            page_ids[0, 0] += 1
        return pages

    monkeypatch.setattr(KVCache, "gather", wrong)
    assert re.search(rf"row 0 at position \d+, slot {decoding(STEP)}, group \w+, entry \d+: reads", violation(runner, STEP - 1))


def test_a_wrong_length_is_found(runner: Runner) -> None:
    """A row whose length has jumped needs pages that it does not have."""
    runner.slots.lengths[decoding(STEP)] += 64
    assert "needs a page and has none" in violation(runner, STEP - 1)


def test_two_steps_out(runner: Runner) -> None:
    """With the next step launched already, the first of the two raises."""
    stale_tail(runner)
    first, _ = (runner.launch(encode_plan(plan)) for plan in PLANS[STEP - 1 : STEP + 1])
    with pytest.raises(PageViolation, match=f"step {STEP}: "):
        first.result()


# ---- FlashInfer's parts, which copy page ids into rows of their own


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, rank: Rank) -> Rank:
    """A rank whose attention is FlashInfer's parts over a stand-in for its kernels, every table checked."""
    monkeypatch.setattr(trtllm, "load", lambda *_, **__: pinned("0.7.2.post1", KernelStandIn()))
    monkeypatch.setattr(trtllm, "processors", lambda _: PROCESSORS)
    monkeypatch.setattr(trtllm, "check_group", lambda *_: None)
    return replace(rank, config=msgspec.structs.replace(rank.config, attention="trtllm_mha"))


CopyPlant = Callable[[Runner, KVGroup, Tensor], None]


def copied_stale_tail(runner: Runner, group: KVGroup, copies: Tensor) -> None:
    """The last tenant of the memory left an id behind a row's end."""
    copies[0, -1] = 3


def copied_longest_row(runner: Runner, group: KVGroup, copies: Tensor) -> None:
    """The longest row was copied over another, to the batch's maximum."""
    longest = int((copies != 0).sum(1).argmax())
    copies[1 - longest if longest < 2 else 0] = copies[longest]


def copied_other_pools_id(runner: Runner, group: KVGroup, copies: Tensor) -> None:
    """A row of one group holds the id that the other group has at that entry."""
    slot = decoding(STEP)
    own, other = (int(runner.slots.cache.groups[index].table[slot].max()) for index in (group.index, 1 - group.index))
    copies[0, 0] = other if other != own else own + 1


def copied_poison(runner: Runner, group: KVGroup, copies: Tensor) -> None:
    """An id that no pool has, in use: FlashInfer must not see it."""
    copies[0, 0] = 2**31 - 7


COPY = "entry \\d+: attention's copy names page"
COPIED = {
    copied_stale_tail: rf"row 0 at position \d+, slot \d, group {{group}}, {COPY} 3, expected no page; .*page 3",
    copied_longest_row: rf"row \d at position \d+, slot \d, group {{group}}, {COPY} \d+, .*; page \d+ is slot \d's entry \d",
    copied_other_pools_id: rf"row 0 at position \d+, slot \d, group {{group}}, {COPY} \d+, expected page \d+; (page|nobody|its)",
    copied_poison: rf"row 0 at .*, slot \d, group {{group}}, {COPY} 2147483641, expected page \d+; its pool has \d+ pages",
}


def with_plant(monkeypatch: pytest.MonkeyPatch, rank: Rank, steps: int, name: str, plant: CopyPlant) -> Runner:
    """A runner behind so many plans. From then on a group's copied rows, which FlashInfer reads next, are wrong: behind the gather,
    as the check is asked."""
    compare, armed = PageCheck.compare, list[Runner]()

    def wrong(self: PageCheck, kind: int, group: KVGroup, copies: Tensor, *places: Any) -> None:
        if armed and kind == COPIED_ENTRY and group.name == name:
            plant(armed[0], group, copies)
        compare(self, kind, group, copies, *places)

    monkeypatch.setattr(PageCheck, "compare", wrong)
    armed.append(runner := started(rank, steps))
    return runner


def test_flashinfers_copies_are_right(flashinfer: Rank) -> None:
    """The golden stream's first steps, mixed ones among them, give their tokens by FlashInfer's parts under the check."""
    runner = build(flashinfer, PAGES)
    assert tokens_of([run(runner, plan) for plan in PLANS[: STEP + 4]]) == tokens_of(RESULTS[: STEP + 4])


@pytest.mark.parametrize(("plant", "name"), list(zip(COPIED, ["sliding", "full"] * 2, strict=True)))
def test_a_fault_in_a_copy_is_found_in_its_step(
    flashinfer: Rank, monkeypatch: pytest.MonkeyPatch, plant: CopyPlant, name: str
) -> None:
    """Row, slot, group, entry and owner are named in the step that would have read it; the page table, which is right, is not."""
    message = violation(with_plant(monkeypatch, flashinfer, STEP - 1, name, plant), STEP - 1)
    assert message.startswith(f"step {STEP}: ")
    assert re.search(COPIED[plant].format(group=name), message), message
    assert len(re.findall("names page", message)) == len(re.findall("copy names page", message))


@pytest.mark.parametrize("plant", [copied_stale_tail, copied_poison])
def test_a_fault_in_a_chunks_copy_is_found(flashinfer: Rank, monkeypatch: pytest.MonkeyPatch, plant: CopyPlant) -> None:
    """The rows that prefill reads are held against the plans too."""
    at = next(at for at, plan in enumerate(PLANS) if plan.chunks and not plan.rows)
    message = violation(with_plant(monkeypatch, flashinfer, at, "full", plant), at)
    assert re.search(COPIED[plant].format(group="full"), message), message


# ---- plans that name what is not there


@pytest.mark.parametrize(("append", "why"), [
    (PageAppend(1, 0, 7, 6), "group full, entry 7 gets page 6; its pool has 6 pages"),
    (PageAppend(0, 0, 7, 0), "group sliding, entry 7 gets page 0; its pool has"),
    (PageAppend(0, 0, 8, 1), "entry 8 gets page 1; .*, its table 8 entries"),
])  # fmt: skip
def test_an_append_out_of_range_is_refused(rank: Rank, append: PageAppend, why: str) -> None:
    """No page of its pool, the null page, no entry of the table: the step does not start."""
    runner = build(rank, PAGES)
    with pytest.raises(PageViolation, match=f"plan 1: slot 0, {why}" if "group" in why else why):
        runner.launch(encode_plan(StepPlan(1, appends=[append])))


def test_a_slot_that_changes_its_sequence_in_one_plan(runner: Runner) -> None:
    """Released, admitted anew and appended to twice at one entry: the last append is what both tables hold."""
    slot = decoding(STEP)
    entries = runner.slots.cache.groups[1].table[slot].count_nonzero().item()
    admission = Admission(slot, 99, [1] * 8, 8, SamplingParams(max_tokens=1))
    plan = StepPlan(
        STEP, releases=[PageRelease(1, slot, 0, entries)], admissions=[admission],
        appends=[PageAppend(1, slot, 0, 1), PageAppend(1, slot, 0, 2), PageAppend(0, slot, 0, 1)],
        chunks=[PrefillChunk(slot, 0, 8, 7)],
    )  # fmt: skip
    run(runner, plan)
    run(runner, StepPlan(STEP + 1, rows=single_rows([slot])))
    assert runner.slots.cache.groups[1].table[slot, :2].tolist() == [2, 0]


def test_a_violation_ends_the_process(nano: Nano) -> None:
    """Two real ranks: each stops at the plan that is wrong, says why in a sentence, and ends."""
    config = config_of(nano("31b"), 2, debug_pages=True)
    with Ranks(config) as ranks:
        ranks.boot(PAGES)
        for plan in PLANS[:2]:
            ranks.submit(plan)
            ranks.result()
        ranks.submit(StepPlan(3, appends=[PageAppend(1, 0, 7, PAGES[1])], rows=single_rows([0])))
        assert ranks.wait() == [1, 1]
        for text in ranks.stderr():
            assert "plan 3: slot 0, group full, entry 7 gets page 6; its pool has 6 pages, its table 8 entries" in text, text
