"""Slot state as a fold over plans: against a model of it in dictionaries, over random plan streams."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from msgspec.structs import replace

from engine.geometry import KVGroup
from engine.plan import Admission, StepPlan, encode_plan, read_plan, single_rows
from engine.protocol import SamplingParams
from engine.rank.batch import ForwardBatch
from engine.rank.kv import GroupCache, KVCache
from engine.rank.parallel import Single
from engine.rank.sampler import ResultRows, Sampler
from engine.rank.slots import SlotState
from engine.rank.step import StepBuffers, chunks_of
from engine.step_shapes import StepShapes, StepSizes
from kernels.sampling_batch import SMALL_TOP_K
from tests.support.engine.plans import DecodeRow, PageAppend, PageRelease, PrefillChunk, decode_slots

pytestmark = pytest.mark.cpu

SLOTS, MAX_LEN, PAGES = 4, 256, 100
CPU = torch.device("cpu")
GROUPS = (KVGroup(0, "sliding", (0,), 1, 2, 64), KVGroup(1, "full", (1,), 1, 2, None))


class Rank:
    """Slot state and step buffers, as a runner holds them."""

    def __init__(self) -> None:
        caches = [GroupCache(group, PAGES, SLOTS + 1, MAX_LEN, CPU) for group in GROUPS]
        self.slots = SlotState(SLOTS, MAX_LEN, KVCache(caches), range(64), CPU)
        sizes = tuple(map(StepSizes.decoding, range(1, SLOTS + 1)))
        self.step = StepBuffers(self.slots, {}, StepShapes(sizes, SLOTS * MAX_LEN, MAX_LEN))

    def run(self, plan: StepPlan, padding: int = 0) -> ForwardBatch | None:
        """The plan, through its bytes, into the tables; its inputs, decode rows alone with `padding` rows behind them."""
        view = read_plan(encode_plan(plan))
        self.slots.admit(view.admissions)
        self.step.upload(view)
        self.step.apply()
        if not plan.chunks and not plan.rows:
            return None
        sizes = StepSizes.of(view) if plan.chunks else StepSizes.decoding(len(plan.rows) + padding)
        return self.step.batch(sizes)[0]

    def results(self, plan: StepPlan) -> ResultRows:
        """How the rows of the plan's results sample."""
        return self.slots.result_rows(read_plan(encode_plan(plan)).result_slots, plan.step)


@dataclass
class SlotSequence:
    """What one slot should hold."""

    tokens: list[int] = field(default_factory=list)
    number: int = 0
    computed: int = 0


class SlotModel:
    """Draws random plans and keeps the expected state the slow way."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.sequences = [SlotSequence() for _ in range(SLOTS)]
        self.tables = [[{} for _ in range(SLOTS)] for _ in GROUPS]
        self.step = 0

    def plan(self) -> StepPlan:
        self.step += 1
        plan = StepPlan(self.step)
        for slot in range(SLOTS):
            self._slot(slot, plan)
        self.rng.shuffle(plan.chunks)
        order = self.rng.sample(range(len(plan.rows)), len(plan.rows))
        plan.rows[:] = [plan.rows[at] for at in order]
        return plan

    def _slot(self, slot: int, plan: StepPlan) -> None:
        sequence, rng = self.sequences[slot], self.rng
        if rng.random() < 0.3:
            self._release(slot, plan)
        if sequence.number == 0 or rng.random() < 0.1 or sequence.computed > MAX_LEN - 3:
            tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
            sequence = self.sequences[slot] = SlotSequence(tokens, self.step * 10 + slot)
            plan.admissions.append(Admission(slot, sequence.number, list(tokens), len(tokens), SamplingParams(max_tokens=1)))
            for table in self.tables:
                table[slot] = {}
        for group, table in enumerate(self.tables):
            for index in rng.sample(range(MAX_LEN // 32), rng.randrange(3)):
                page = rng.randrange(1, PAGES)
                plan.appends.append(PageAppend(group, slot, index, page))
                table[slot][index] = page
        self._work(slot, sequence, plan)

    def _release(self, slot: int, plan: StepPlan) -> None:
        group, first, count = self.rng.randrange(len(GROUPS)), self.rng.randrange(4), self.rng.randint(1, 4)
        plan.releases.append(PageRelease(group, slot, first, count))
        for index in range(first, first + count):
            self.tables[group][slot].pop(index, None)

    def _work(self, slot: int, sequence: SlotSequence, plan: StepPlan) -> None:
        left = len(sequence.tokens) - sequence.computed
        if left > 1 or (left and not sequence.computed):
            size = self.rng.randint(1, left)
            end = sequence.computed + size
            plan.chunks.append(PrefillChunk(slot, sequence.computed, end, end - 1 if size == left else end))
        elif self.rng.random() < 0.7:
            plan.rows.append(DecodeRow(slot))

    def expect(self, plan: StepPlan) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Advance the sequences; (slot, position, token) of each row, and the rows whose logits are wanted."""
        inputs = []
        wanted = []
        for chunk in plan.chunks:
            sequence = self.sequences[chunk.slot]
            inputs += [(chunk.slot, at, sequence.tokens[at]) for at in range(chunk.start, chunk.end)]
            wanted += [len(inputs) - 1] if chunk.end == len(sequence.tokens) else []
            sequence.computed = chunk.end
        for slot in decode_slots(plan):
            sequence = self.sequences[slot]
            wanted.append(len(inputs))
            inputs.append((slot, sequence.computed, sequence.tokens[sequence.computed]))
            sequence.computed += 1
        return inputs, wanted


def compare(slots: SlotState, model: SlotModel) -> None:
    """Tables, tokens and lengths are the model's; the padding's slot stays as it was."""
    assert not slots.tokens[SLOTS].any()
    assert slots.lengths[SLOTS] == 0
    for cache, table in zip(slots.cache, model.tables, strict=True):
        expected = torch.zeros_like(cache.table)
        for slot, entries in enumerate(table):
            for index, page in entries.items():
                expected[slot, index] = page
        assert torch.equal(cache.table, expected)
    for slot, sequence in enumerate(model.sequences):
        assert slots.tokens[slot, : len(sequence.tokens)].tolist() == sequence.tokens
        assert slots.lengths[slot] == sequence.computed


def run_plans(seed: int, plant_fault: Callable[[StepPlan], StepPlan]) -> None:
    """Sixty random plans; the state runs what `plant_fault` makes of each, the model the plan itself."""
    rank, model = Rank(), SlotModel(seed)
    slots = rank.slots
    for _ in range(60):
        plan = model.plan()
        batch = rank.run(plant_fault(plan))
        inputs, wanted = model.expect(plan)
        if batch is not None:
            assert list(zip(batch.slots.tolist(), batch.positions.tolist(), batch.ids.tolist(), strict=True)) == inputs
            assert batch.logit_rows is None or batch.logit_rows.tolist() == wanted
            assert [(chunk.slot, chunk.start) for chunk in batch.chunks] == [inputs[chunk.offset][:2] for chunk in batch.chunks]
            rows = rank.results(plan)
            assert rows.slots.tolist() == plan.result_slots
            assert rows.numbers.tolist() == [model.sequences[slot].number for slot in plan.result_slots]
            sampled = [model.rng.randrange(1000) for _ in plan.result_slots]
            index = torch.tensor(wanted, dtype=torch.int64)
            slots.tokens[batch.slots[index].long(), batch.positions[index].long() + 1] = torch.tensor(sampled, dtype=torch.int32)
            for slot, token in zip(plan.result_slots, sampled, strict=True):
                model.sequences[slot].tokens.append(token)
        compare(slots, model)


@pytest.mark.parametrize("seed", range(8))
def test_state_is_the_fold_of_its_plans(seed: int) -> None:
    """Over random plans, tables, tokens, lengths, inputs and row numbers equal a dictionary's; nothing is left of old sequences."""
    run_plans(seed, lambda plan: plan)


@pytest.mark.parametrize("section", ["releases", "admissions", "appends"])
def test_a_dropped_section_is_seen(section: str) -> None:
    """Planted faults: plans without their releases, admissions or appends leave another state than the model's."""
    with pytest.raises(AssertionError):
        run_plans(1, lambda plan: replace(plan, **{section: []}))


def test_sampling_parameters_live_with_their_tenant() -> None:
    """Rows carry their own sequence's parameters to the bit of fp32; a new sequence's replace them whole, stop ids included."""
    rank = Rank()
    seed = -(2**63) + 12345
    first = SamplingParams(
        max_tokens=1, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=seed, min_tokens=2, stop_ids=tuple(range(30)),
        logprobs=4, prompt_logprobs=3,
    )  # fmt: skip
    second = SamplingParams(max_tokens=1, stop_ids=(9,), min_tokens=1)
    plan = StepPlan(
        1,
        admissions=[Admission(0, 1, [5, 6], 2, first), Admission(2, 2, [5, 6, 7], 3, second)],
        chunks=[PrefillChunk(2, 0, 3, 2), PrefillChunk(0, 0, 2, 1)],
    )
    rank.run(plan)
    rows, parameters = rank.results(plan), rank.slots.parameters
    assert (rows.small_top_k, rows.filtered, rows.reported, rows.alternatives) == (True, [], [1], 4)
    assert rows.logprobs == [None, 4]
    assert parameters.integers[[2, 0]].tolist() == [[0, 0, 4], [seed, 5, 4]]
    assert torch.equal(parameters.floats[[2, 0]], torch.tensor([[0.0, 1.0, 0.0], [0.7, 0.9, 0.1]]))
    assert set(parameters.stop[0].tolist()) == {-1, *range(30)}
    assert list(rank.slots.prompt_scorings) == [0]
    again = StepPlan(2, admissions=[Admission(0, 3, [1], 1, second)], chunks=[PrefillChunk(0, 0, 1, 0)])
    rank.run(again)
    rows = rank.results(again)
    assert (rows.small_top_k, rows.filtered, rows.reported, rows.alternatives) == (False, [], [], 0)
    assert set(parameters.stop[0].tolist()) == {-1, 9}
    assert not rank.slots.prompt_scorings
    assert parameters.integers[0].tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("params", "small", "other"),
    [
        ({"top_k": SMALL_TOP_K}, True, []),
        ({"top_k": 64, "top_p": 0.95, "min_p": 0.1}, True, []),
        ({"top_k": SMALL_TOP_K + 1}, False, [0]),
        ({"top_p": 0.9}, False, [0]),
        ({"min_p": 0.1}, False, [0]),
        ({"top_k": 5, "temperature": 0.0}, False, []),
        ({}, False, []),
    ],
)
def test_which_op_filters_a_row(params: dict[str, float], small: bool, other: list[int]) -> None:
    """A top_k up to SMALL_TOP_K is decided by candidates, whatever cuts behind it; other filters by whole logits; greedy and plain
    rows by neither."""
    rank = Rank()
    sampling = SamplingParams(**({"max_tokens": 1, "temperature": 1.0} | params))
    plan = StepPlan(1, admissions=[Admission(1, 1, [5, 6], 2, sampling)], chunks=[PrefillChunk(1, 0, 2, 1)])
    rank.run(plan)
    rows = rank.results(plan)
    assert (rows.small_top_k, rows.filtered, rows.reported) == (small, other, [])


def test_stop_ids_are_masked_until_min_tokens_are_out() -> None:
    """With min_tokens 2, exactly the first two generated tokens may not be stop ids, also after a preemption."""
    params, sampler = SamplingParams(max_tokens=9, min_tokens=2, stop_ids=(9,)), Sampler(Single(), 10, None, (), CPU)
    for done in range(4):  # tokens generated before this admission
        rank = Rank()
        known = 3 + done
        plan = StepPlan(1, admissions=[Admission(1, 1, [4] * known, 3, params)], chunks=[PrefillChunk(1, 0, known, known - 1)])
        masked = []
        for step in range(4):
            batch = rank.run(plan)
            assert batch is not None
            row = slice(None) if batch.logit_rows is None else batch.logit_rows
            rows = sampler.batch(batch.slots[row], batch.positions[row], rank.slots.parameters, rank.slots.tokens)
            chosen, _ = sampler.sample(torch.arange(10.0)[None], rows, None)
            masked.append(chosen[0, 0] != 9)
            plan = StepPlan(2 + step, rows=single_rows([1]))
        assert masked == [done + more < 2 for more in range(4)]


def test_padding_rows_change_nothing() -> None:
    """Rows behind the plan's decodes name the padding's slot and no position, and advance no length."""
    rank = Rank()
    rank.run(StepPlan(1, admissions=[Admission(0, 1, [5, 6], 2, SamplingParams(max_tokens=1), cached=1)]))
    batch = rank.run(StepPlan(2, rows=single_rows([0])), padding=2)
    assert batch is not None
    assert (batch.slots.tolist(), batch.positions.tolist()) == ([0, SLOTS, SLOTS], [1, -1, -1])
    assert rank.slots.lengths.tolist() == [2, 0, 0, 0, 0]


def test_the_largest_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan as long as a record of the ring is applied, the last append to each entry; planted fault: where its appends alone are
    longer there is no room."""
    admission, appends = Admission(0, 1, [5], 1, SamplingParams(max_tokens=1)), [(1, 0, at % 8, 1 + at) for at in range(90)]
    plan = StepPlan(1, admissions=[admission], appends=appends)
    monkeypatch.setattr("engine.rank.step.MAX_RECORD", len(encode_plan(plan)))
    rank = Rank()
    rank.run(plan)
    assert rank.slots.cache.groups[1].table[0, :8].tolist() == [89, 90, *range(83, 89)]
    monkeypatch.setattr("engine.rank.step.MAX_RECORD", 4 * len(read_plan(encode_plan(plan)).fixed) - 4)
    with pytest.raises(ValueError, match="broadcast"):
        Rank().run(plan)


def test_chunks_have_the_spans_that_they_name() -> None:
    """Each chunk gets its own of the plan's spans; planted fault: the next one's."""
    chunks = [PrefillChunk(0, 0, 9, 9, 0, 2), PrefillChunk(1, 0, 4, 4, 2, 0), PrefillChunk(2, 0, 8, 8, 2, 1)]
    plan = read_plan(encode_plan(StepPlan(1, chunks=chunks, spans=[(1, 4), (5, 9), (2, 6)])))
    assert [chunk.spans for chunk in chunks_of(plan)] == [((1, 4), (5, 9)), (), ((2, 6),)]
    shifted = read_plan(encode_plan(StepPlan(1, chunks=[chunks[0]._replace(first_span=1)], spans=[(1, 4), (5, 9), (2, 6)])))
    assert chunks_of(shifted)[0].spans == ((5, 9), (2, 6))
