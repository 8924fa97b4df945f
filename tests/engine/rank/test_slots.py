"""Slot state as a fold over plans: against a model of it in dictionaries, over random plan streams."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from engine.geometry import KVGroup
from engine.plan import Admission, PageAppend, PageRelease, PrefillChunk, StepPlan, decode_plan, encode_plan
from engine.protocol import SamplingParams
from engine.rank.kv import GroupCache, KVCache
from engine.rank.slots import SlotState
from kernels.slots import clear, put, take

pytestmark = pytest.mark.cpu

SLOTS, MAX_LEN, PAGES = 4, 256, 100
CPU = torch.device("cpu")
GROUPS = (KVGroup(0, "sliding", (0,), 1, 2, 64), KVGroup(1, "full", (1,), 1, 2, None))


def state() -> SlotState:
    caches = [GroupCache(group, PAGES, SLOTS, MAX_LEN, torch.float32, CPU) for group in GROUPS]
    return SlotState(SLOTS, MAX_LEN, KVCache(caches), CPU)


def run(slots: SlotState, plan: StepPlan) -> None:
    slots.apply(decode_plan(encode_plan(plan)))


@dataclass
class Tenant:
    """What one slot should hold."""

    tokens: list[int] = field(default_factory=list)
    number: int = 0
    computed: int = 0


class Book:
    """Draws random plans and keeps the expected state the slow way."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tenants = [Tenant() for _ in range(SLOTS)]
        self.tables = [[{} for _ in range(SLOTS)] for _ in GROUPS]
        self.step = 0

    def plan(self) -> StepPlan:
        self.step += 1
        plan = StepPlan(self.step)
        for slot in range(SLOTS):
            self._slot(slot, plan)
        self.rng.shuffle(plan.chunks)
        self.rng.shuffle(plan.decodes)
        return plan

    def _slot(self, slot: int, plan: StepPlan) -> None:
        tenant, rng = self.tenants[slot], self.rng
        if rng.random() < 0.3:
            self._release(slot, plan)
        if tenant.number == 0 or rng.random() < 0.1 or tenant.computed > MAX_LEN - 3:
            tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
            tenant = self.tenants[slot] = Tenant(tokens, self.step * 10 + slot)
            plan.admissions.append(Admission(slot, tenant.number, list(tokens), len(tokens), SamplingParams(max_tokens=1)))
            for table in self.tables:
                table[slot] = {}
        for group, table in enumerate(self.tables):
            for _ in range(rng.randrange(3)):
                index, page = rng.randrange(MAX_LEN // 32), rng.randrange(1, PAGES)
                plan.appends.append(PageAppend(group, slot, index, page))
                table[slot][index] = page
        self._work(slot, tenant, plan)

    def _release(self, slot: int, plan: StepPlan) -> None:
        group, first, count = self.rng.randrange(len(GROUPS)), self.rng.randrange(4), self.rng.randint(1, 4)
        plan.releases.append(PageRelease(group, slot, first, count))
        for index in range(first, first + count):
            self.tables[group][slot].pop(index, None)

    def _work(self, slot: int, tenant: Tenant, plan: StepPlan) -> None:
        left = len(tenant.tokens) - tenant.computed
        if left > 1 or (left and not tenant.computed):
            size = self.rng.randint(1, left)
            end = tenant.computed + size
            plan.chunks.append(PrefillChunk(slot, tenant.computed, end, end - 1 if size == left else end))
        elif self.rng.random() < 0.7:
            plan.decodes.append(slot)

    def expect(self, plan: StepPlan) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Advance the tenants; (slot, position, token) of each row, and the rows whose logits are wanted."""
        inputs: list[tuple[int, int, int]] = []
        wanted = []
        for chunk in plan.chunks:
            tenant = self.tenants[chunk.slot]
            inputs += [(chunk.slot, at, tenant.tokens[at]) for at in range(chunk.start, chunk.end)]
            wanted += [len(inputs) - 1] if chunk.end == len(tenant.tokens) else []
            tenant.computed = chunk.end
        for slot in plan.decodes:
            tenant = self.tenants[slot]
            wanted.append(len(inputs))
            inputs.append((slot, tenant.computed, tenant.tokens[tenant.computed]))
            tenant.computed += 1
        return inputs, wanted


def compare(slots: SlotState, book: Book) -> None:
    for cache, table in zip(slots.cache, book.tables, strict=True):
        expected = torch.zeros_like(cache.table)
        for slot, entries in enumerate(table):
            for index, page in entries.items():
                expected[slot, index] = page
        assert torch.equal(cache.table, expected)
    for slot, tenant in enumerate(book.tenants):
        assert slots.tokens[slot, : len(tenant.tokens)].tolist() == tenant.tokens
        assert slots.lengths[slot] == slots.bounds[slot] == tenant.computed


def play(seed: int, meddle: Callable[[StepPlan], StepPlan]) -> None:
    """Sixty random plans; the state runs what `meddle` makes of each, the book the plan itself."""
    slots, book = state(), Book(seed)
    for _ in range(60):
        plan = book.plan()
        run(slots, meddle(plan))
        batch = slots.batch(plan)
        inputs, wanted = book.expect(plan)
        assert list(zip(batch.slots.tolist(), batch.positions.tolist(), batch.ids.tolist(), strict=True)) == inputs
        assert batch.logit_rows.tolist() == wanted
        assert batch.decode_bounds == tuple(book.tenants[slot].computed for slot in plan.decodes)
        assert [(chunk.slot, chunk.start) for chunk in batch.chunks] == [inputs[chunk.offset][:2] for chunk in batch.chunks]
        rows = slots.rows(plan)
        assert rows.slots == tuple(plan.result_slots)
        assert rows.numbers == tuple(book.tenants[slot].number for slot in rows.slots)
        sampled = [book.rng.randrange(1000) for _ in rows.slots]
        slots.store(rows, torch.tensor(sampled, dtype=torch.int64))
        for slot, token in zip(rows.slots, sampled, strict=True):
            book.tenants[slot].tokens.append(token)
        compare(slots, book)
        slots.check()


@pytest.mark.parametrize("seed", range(8))
def test_state_is_the_fold_of_its_plans(seed: int) -> None:
    """Over random plans, tables, tokens, lengths, inputs and row numbers equal a dictionary's; nothing is left of old tenants."""
    play(seed, lambda plan: plan)


@pytest.mark.parametrize("section", ["releases", "admissions", "appends"])
def test_a_dropped_section_is_seen(section: str) -> None:
    """Planted faults: plans without their releases, admissions or appends leave another state than the book's."""
    with pytest.raises(AssertionError):
        play(1, lambda plan: replace(plan, **{section: []}))


def test_sampling_parameters_live_with_their_tenant() -> None:
    """Rows carry their own tenant's parameters to the bit of fp32; a new tenant's replace them whole, stop ids included."""
    slots = state()
    seed = -(2**63) + 12345
    first = SamplingParams(
        max_tokens=1, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=seed, min_tokens=2, stop_ids=tuple(range(30)), logprobs=4
    )
    second = SamplingParams(max_tokens=1, stop_ids=(9,), min_tokens=1)
    plan = StepPlan(
        1,
        admissions=[Admission(0, 1, [5, 6], 2, first), Admission(2, 2, [5, 6, 7], 3, second)],
        chunks=[PrefillChunk(2, 0, 3, 2), PrefillChunk(0, 0, 2, 1)],
    )
    run(slots, plan)
    slots.batch(plan)
    sampling = slots.rows(plan).sampling
    assert (sampling.greedy, sampling.plain, sampling.filtered) == ([0], [], [1])
    assert sampling.positions.tolist() == [3, 2]
    assert sampling.seeds.tolist() == [0, seed]
    assert sampling.top_k.tolist() == [0, 5]
    wanted = torch.tensor([[0.0, 1.0, 0.0], [0.7, 0.9, 0.1]])
    assert torch.equal(torch.stack([sampling.temperature, sampling.top_p, sampling.min_p], 1), wanted)
    assert sampling.logprobs == [None, 4]
    assert set(sampling.forbidden[1].tolist()) == {-1, *range(30)}
    again = StepPlan(2, admissions=[Admission(0, 3, [1], 1, second)], chunks=[PrefillChunk(0, 0, 1, 0)])
    run(slots, again)
    slots.batch(again)
    sampling = slots.rows(again).sampling
    assert sampling.greedy == [0]
    assert set(sampling.forbidden[0].tolist()) == {-1, 9}
    assert sampling.seeds.tolist() == [0]


def test_stop_ids_are_masked_until_min_tokens_are_out() -> None:
    """With min_tokens 2, exactly the first two generated tokens may not be stop ids, also after a preemption."""
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_ids=(9,))
    for done in range(4):  # tokens generated before this admission
        slots = state()
        known = 3 + done
        plan = StepPlan(1, admissions=[Admission(1, 1, [4] * known, 3, params)], chunks=[PrefillChunk(1, 0, known, known - 1)])
        masked = []
        for step in range(4):
            run(slots, plan)
            slots.batch(plan)
            masked.append(bool((slots.rows(plan).sampling.forbidden == 9).any()))
            plan = StepPlan(2 + step, decodes=[1])
        assert masked == [done + more < 2 for more in range(4)]


def test_an_entry_outside_its_pool_is_found() -> None:
    """The debug check names the group of a page number that its pool does not have."""
    slots = state()
    run(slots, StepPlan(1, appends=[PageAppend(1, 0, 0, PAGES - 1)]))
    slots.check()
    run(slots, StepPlan(2, appends=[PageAppend(1, 0, 0, PAGES)]))
    with pytest.raises(AssertionError, match="group full"):
        slots.check()


def test_the_last_of_equal_appends_counts() -> None:
    """Two appends to one entry in one plan leave the later page."""
    slots = state()
    run(slots, StepPlan(1, appends=[PageAppend(0, 1, 2, page) for page in (5, 6, 7)]))
    assert next(iter(slots.cache)).table[1].tolist() == [0, 0, 7, 0, 0, 0, 0, 0]


def test_flat_writes_and_reads() -> None:
    """put, take and clear are plain indexing of (row, column) pairs, and refuse a table that is not contiguous."""
    table = torch.zeros((3, 5), dtype=torch.int32)
    rows, columns = torch.tensor([0, 2, 2]), torch.tensor([4, 0, 3])
    put(table, rows, columns, torch.tensor([7, 8, 9]))
    assert table.tolist() == [[0, 0, 0, 0, 7], [0, 0, 0, 0, 0], [8, 0, 0, 9, 0]]
    assert take(table, rows, columns).tolist() == [7, 8, 9]
    assert take(table, rows, columns - torch.tensor([1, 0, 0])).tolist() != [7, 8, 9]
    clear(table, torch.tensor([2]))
    assert table.tolist() == [[0, 0, 0, 0, 7], [0] * 5, [0] * 5]
    with pytest.raises(RuntimeError):
        put(table.t(), rows, rows, rows)
