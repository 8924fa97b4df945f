"""debug_pages on a rank: nothing to find in a real stream; every planted fault found in its step, named, dumped and replayed."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from deploy.models.resolve import resolve
from engine.errors import ConfigError, PageViolation
from engine.geometry import KVGroup, kv_groups, read_geometry
from engine.plan import Admission, PageAppend, PageRelease, PrefillChunk, StepPlan, encode_plan, read_plan
from engine.protocol import SamplingParams
from engine.rank import attention
from engine.rank.attention import trtllm
from engine.rank.builder import Rank, build
from engine.rank.kv import GroupCache
from engine.rank.page_check import SAMPLED, PageCheck
from engine.rank.page_dump import PageDump, read_dump
from engine.rank.page_map import PageMap, rolled_back
from engine.rank.replay import replay_dump
from engine.rank.runner import Runner
from tests.conftest import Nano
from tests.golden.record import load
from tests.support.engine.ranks import Ranks, run, single
from tests.support.engine.recording import PAGES, config_of, tokens_of
from tests.support.flashinfer_calls import PROCESSORS, KernelStandIn, pinned

pytestmark = pytest.mark.cpu

STEP = 12  # by then three sequences decode
PLANS, RESULTS = load()
Plant = Callable[[Runner], None]


@pytest.fixture(scope="module")
def ranks() -> dict[str, Rank]:
    folder = resolve("nano:31b")
    return {mode: single(config_of(folder, 1, debug_pages=mode)) for mode in ("sample", "every")}


@pytest.fixture(autouse=True)
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dumps go into the test's own folder, those of its child processes too."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def decoding(step: int) -> int:
    """A slot that decodes in plan `step`."""
    return next(plan for plan in PLANS if plan.step == step).decodes[0]


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


def dump_of(message: str) -> PageDump:
    found = re.search(r"\(dump: (.*\.npz)\)$", message)
    assert found, message
    return read_dump(Path(found[1]))


@pytest.mark.parametrize("mode", ["sample", "every"])
def test_a_real_stream_has_no_violation(ranks: dict[str, Rank], mode: str) -> None:
    """The golden stream, with its preemptions and prefixes, gives its tokens under the check."""
    runner = build(ranks[mode], PAGES)
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
def test_a_planted_fault_is_found_in_its_step(ranks: dict[str, Rank], plant: Plant) -> None:
    """The step that would read it raises; slot, group, entry and owner are named; the dump, run again, shows the same."""
    runner = started(ranks["every"], STEP - 1)
    plant(runner)
    message = violation(runner, STEP - 1)
    assert message.startswith(f"step {STEP}: ")
    assert re.search(PLANTED[plant].format(slot=decoding(STEP)), message), message
    dump = dump_of(message)
    assert (dump.step, dump.rank, dump.pages) == (STEP, 0, PAGES)
    assert replay_dump(dump, resolve("nano:31b"), "cpu") == message.split(" (dump:")[0]


def test_a_sound_dump_shows_nothing(ranks: dict[str, Rank]) -> None:
    """The same dump with its tables put right runs through."""
    runner = started(ranks["every"], STEP - 1)
    stale_tail(runner)
    dump = dump_of(violation(runner, STEP - 1))
    dump.tables[:] = dump.expected
    assert replay_dump(dump, resolve("nano:31b"), "cpu") is None


@pytest.mark.parametrize("plant", [stale_tail, freed_page])
def test_sampling_finds_it_soon(ranks: dict[str, Rank], plant: Plant) -> None:
    """Sampled, a lasting fault is found within as many steps as there are shares."""
    runner = started(ranks["sample"], STEP - 1)
    plant(runner)
    violation(runner, STEP - 1, SAMPLED)


def test_what_rows_gather_is_checked(ranks: dict[str, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is right and a row whose page ids are not: the row and its position are named."""
    runner = started(ranks["every"], STEP - 1)
    gather = GroupCache.gather

    def wrong(self: GroupCache, slots: Tensor, positions: Tensor, out: Tensor) -> None:
        gather(self, slots, positions, out)
        out[0, 0] += 1

    monkeypatch.setattr(GroupCache, "gather", wrong)
    assert re.search(rf"row 0 at position \d+, slot {decoding(STEP)}, group \w+, entry \d+: reads", violation(runner, STEP - 1))


def test_a_wrong_length_is_found(ranks: dict[str, Rank]) -> None:
    """A row whose length has jumped needs pages that it does not have."""
    runner = started(ranks["every"], STEP - 1)
    runner.slots.lengths[decoding(STEP)] += 64
    assert "needs a page and has none" in violation(runner, STEP - 1)


def test_two_steps_out(ranks: dict[str, Rank]) -> None:
    """With the next step launched already, the first of the two raises, and its dump is of before both."""
    runner = started(ranks["every"], STEP - 1)
    stale_tail(runner)
    first, _ = (runner.launch(encode_plan(plan)) for plan in PLANS[STEP - 1 : STEP + 1])
    with pytest.raises(PageViolation, match=f"step {STEP}: ") as raised:
        first.result()
    dump = dump_of(str(raised.value))
    again = started(ranks["every"], STEP - 1)
    assert (dump.lengths == again.slots.lengths.numpy()).all()
    assert pages_of(again).map.flat.tolist() == dump.expected.tolist()


def pages_of(runner: Runner) -> PageCheck:
    assert runner.pages is not None
    return runner.pages


# ---- FlashInfer's parts, which copy page ids into rows of their own


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, ranks: dict[str, Rank]) -> Rank:
    """A rank whose attention is FlashInfer's parts over a stand-in for its kernels, every table checked."""
    monkeypatch.setattr(attention, "wrong_device", lambda *_: None)
    monkeypatch.setattr(trtllm, "load", lambda *_, **__: pinned("0.7.2.post1", KernelStandIn()))
    monkeypatch.setattr(trtllm, "processors", lambda _: PROCESSORS)
    monkeypatch.setattr(trtllm, "check_group", lambda *_: None)
    rank = ranks["every"]
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
    pages = pages_of(runner)
    slot = decoding(STEP)
    own, other = (int(pages.map.tables[index][slot].max()) for index in (group.index, 1 - group.index))
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
    check, armed = PageCheck.check_copies, list[Runner]()

    def wrong(self: PageCheck, group: KVGroup, copies: Tensor, *places: Any) -> None:
        if armed and group.name == name:
            plant(armed[0], group, copies)
        check(self, group, copies, *places)

    monkeypatch.setattr(PageCheck, "check_copies", wrong)
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
    if plant is copied_stale_tail:
        assert replay_dump(dump_of(message), resolve("nano:31b"), "cpu") is None  # the dump's tables are right


@pytest.mark.parametrize("plant", [copied_stale_tail, copied_poison])
def test_a_fault_in_a_chunks_copy_is_found(flashinfer: Rank, monkeypatch: pytest.MonkeyPatch, plant: CopyPlant) -> None:
    """The rows that prefill reads are held against the plans too."""
    at = next(at for at, plan in enumerate(PLANS) if plan.chunks and not plan.decodes)
    message = violation(with_plant(monkeypatch, flashinfer, at, "full", plant), at)
    assert re.search(COPIED[plant].format(group="full"), message), message


# ---- plans that contradict those before them


def folded(steps: int) -> PageMap:
    made = PageMap(groups_of_nano(), PAGES, 5, (8, 8))
    for plan in PLANS[:steps]:
        made.fold(read_plan(encode_plan(plan)))
    return made


def groups_of_nano() -> tuple[KVGroup, ...]:
    return kv_groups(read_geometry(resolve("nano:31b")), 1)


def holder(pages: PageMap, group: int = 1) -> tuple[int, int, int]:
    """Slot, entry and page of a decoding sequence."""
    slot = decoding(STEP)
    entry = int(pages.tables[group][slot].nonzero()[0][0])
    return slot, entry, int(pages.tables[group][slot, entry])


CONTRADICTIONS = {
    "range": (lambda m: StepPlan(99, appends=[PageAppend(1, 0, 7, 6)]), "gets page 6 of a pool of 6"),
    "null": (lambda m: StepPlan(99, appends=[PageAppend(0, 0, 7, 0)]), "gets page 0 of a pool"),
    "outside": (lambda m: StepPlan(99, appends=[PageAppend(0, 0, 8, 1)]), "entry 8 lies outside a table of"),
    "append": (lambda m: StepPlan(99, appends=[PageAppend(1, *holder(m)[:2], 1)]), r"holds page \d+ and gets page 1"),
    "release": (lambda m: StepPlan(99, releases=[PageRelease(1, decoding(STEP), 7, 1)]), "is released and holds no page"),
    "positions": (lambda m: StepPlan(99, chunks=[PrefillChunk(decoding(STEP), 1, 2, 2)]), "its chunk begins at 1"),
    "coverage": (
        lambda m: StepPlan(99, releases=[PageRelease(1, *holder(m)[:2], 1)], decodes=[decoding(STEP)]),
        "holds no page, and positions",
    ),
    "ownership": (
        lambda m: StepPlan(99, appends=[PageAppend(1, 4, 0, holder(m)[2])], decodes=[decoding(STEP)]),
        r"slot \d runs on, but its page \d+ of group full went to slot 4, entry 0, in plan 99",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_contradiction_is_refused(kind: str) -> None:
    """Each kind of wrong plan raises with its place; the plan that comes in truth does not."""
    plan, why = CONTRADICTIONS[kind]
    pages = folded(STEP - 1)
    with pytest.raises(PageViolation, match=why):
        pages.fold(read_plan(encode_plan(plan(pages))))
    folded(STEP)


def test_a_contradiction_is_dumped_and_replayed(ranks: dict[str, Rank]) -> None:
    """A page given to another while its holder runs: the step does not start, and the dump says the same again."""
    runner = started(ranks["every"], STEP - 1)
    slot, _, page = holder(pages_of(runner).map)
    thief = StepPlan(STEP, appends=[PageAppend(1, 4, 0, page)], decodes=[slot])
    with pytest.raises(PageViolation, match=f"plan {STEP}: slot {slot} runs on") as raised:
        runner.launch(encode_plan(thief))
    dump = dump_of(str(raised.value))
    assert replay_dump(dump, resolve("nano:31b"), "cpu") == str(raised.value).split(" (dump:")[0]


def test_shared_prefixes_are_allowed() -> None:
    """A page may be named twice at one entry, whole within what the later sequence found cached; one entry further it may not."""
    def attach(entry: int, cached: int) -> StepPlan:
        pages = folded(STEP - 1)
        page = holder(pages)[2]
        admission = Admission(4, 99, [1] * 80, 80, SamplingParams(max_tokens=1), cached=cached)
        plan = StepPlan(99, admissions=[admission], appends=[PageAppend(1, 4, entry, page)], decodes=[decoding(STEP)])
        pages.fold(read_plan(encode_plan(plan)))
        return plan

    attach(0, 32)
    for entry, cached in ((1, 64), (0, 31)):
        with pytest.raises(PageViolation, match="runs on, but"):
            attach(entry, cached)


def test_plans_are_taken_back() -> None:
    """What the last plans changed can be undone: tables are as they were before them."""
    before, after = folded(STEP - 1), folded(STEP + 1)
    assert rolled_back(after.flat, [undo for undo in after.undo if undo.step >= STEP]).tolist() == before.flat.tolist()


def test_a_file_that_is_no_dump_is_refused(tmp_path: Path) -> None:
    """Other files are refused by name."""
    path = tmp_path / "x.npz"
    path.write_bytes(b"PK\x03\x04nothing")
    with pytest.raises(ConfigError, match=r"x\.npz: no page dump"):
        read_dump(path)
    torch.save({}, path)
    with pytest.raises(ConfigError, match=r"x\.npz: no page dump"):
        read_dump(path)


def test_a_violation_ends_the_process(nano: Nano, tmp_path: Path) -> None:
    """Two real ranks: each stops at the plan that is wrong, says why in a sentence, and ends."""
    config = config_of(nano("31b"), 2, debug_pages="every")
    with Ranks(config) as ranks:
        ranks.boot(PAGES)
        for plan in PLANS[:2]:
            ranks.submit(plan)
            ranks.result()
        ranks.submit(StepPlan(3, appends=[PageAppend(1, 0, 7, PAGES[1])], decodes=[0]))
        assert ranks.wait() == [1, 1]
        for text in ranks.stderr():
            assert "plan 3: slot 0, group full, entry 7 gets page 6 of a pool of 6 (dump: " in text, text
    assert len(list(tmp_path.glob("*.npz"))) == 2
