"""Adjusted logits over a cut vocabulary: what is sampled must not depend on the cut, and no adjustment outlives its row or step."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.geometry import vocab_share
from engine.logit_adjustments import LogitAdjustments
from engine.plan import Admission
from engine.protocol import SamplingParams
from engine.rank.adjustments import Adjustments
from engine.rank.parallel import Single
from engine.rank.sampler import Sampler
from kernels.adjust import IN_PROMPT, MOST_COUNTED, adjust
from kernels.sampling_batch import SamplingBatch, SlotParameters
from tests.support import interpreter
from tests.support.engine.adjusted_logits import AdjustedSequence, error, random_sequence
from tests.support.engine.sampled_rows import Drawn, SampledRows, batch_of, drawn
from tests.support.engine.threads import ThreadParallel, run_ranks

pytestmark = pytest.mark.cpu

VOCAB, SLOTS = 200, 9
SOFTCAP = 30.0
STEP = 2**31 + 5  # a header's low word reads as negative from 2^31 on
CPU = torch.device("cpu")
Group = ThreadParallel | Single
TOLERANCE = 1e-4  # of fp32 logits up to 100


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool [n, vocabulary] -> int32 [n, ceil(vocabulary / 32)]."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def admission(slot: int, sequence: AdjustedSequence) -> Admission:
    params = SamplingParams(max_tokens=1, adjustments=sequence.wanted)
    return Admission(slot, 1, list(sequence.tokens), sequence.prompt, params)


@dataclass
class RankTables:
    """One rank's tables of SLOTS slots, without a model."""

    parallel: Group

    def __post_init__(self) -> None:
        self.share = vocab_share(VOCAB, self.parallel.size)
        self.ids = range(self.parallel.rank * self.share, (self.parallel.rank + 1) * self.share)
        self.adjustments = Adjustments(SLOTS, self.ids, CPU)
        self.tokens = torch.zeros(SLOTS, 100, dtype=torch.int32)

    def admit(self, sequences: dict[int, AdjustedSequence]) -> None:
        self.adjustments.admit([admission(slot, sequence) for slot, sequence in sequences.items()])

    def mask(self, sequences: dict[int, AdjustedSequence], step: int = STEP) -> None:
        masked = {slot: sequence.allowed for slot, sequence in sequences.items() if sequence.allowed is not None}
        if masked:
            self.adjustments.set_masks(step, np.array([*masked], np.int32), packed(np.stack([*masked.values()])))

    def batch(self, sequences: dict[int, AdjustedSequence], step: int = STEP, padding: int = 0) -> SamplingBatch:
        """A row a sequence, whose input is its last token, and rows of padding."""
        for slot, sequence in sequences.items():
            self.tokens[slot, : len(sequence.tokens)] = torch.tensor(sequence.tokens).int()
        positions = [len(sequence.tokens) - 1 for sequence in sequences.values()] + [-1] * padding
        slots = torch.tensor([*sequences, *[SLOTS - 1] * padding], dtype=torch.int32)
        parameters = SlotParameters(
            torch.zeros(SLOTS, 3, dtype=torch.int64), torch.ones(SLOTS, 3), torch.full((SLOTS, 1), -1, dtype=torch.int32)
        )
        batch = Sampler(self.parallel, VOCAB, SOFTCAP, (), CPU).batch(slots, torch.tensor(positions).int(), parameters, self.tokens)
        return replace(batch, adjustments=self.adjustments.tables, plan=torch.tensor([step]).int())

    def slice(self, logits: Tensor) -> Tensor:
        """Its own of whole logits, -inf behind the vocabulary's end."""
        padded = torch.nn.functional.pad(logits, (0, self.share * self.parallel.size - VOCAB), value=-torch.inf)
        return padded[:, self.ids.start : self.ids.stop].contiguous()

    def adjusted(self, logits: Tensor, sequences: dict[int, AdjustedSequence], parts: int = 1, step: int = STEP) -> Tensor:
        """Whole logits behind the cap, of every rank's slice."""
        mine = self.slice(logits)
        capped = adjust(mine, self.batch(sequences, step), self.ids.start, parts).capped
        assert capped is not None
        mine = torch.where(capped[:, None] != 0, mine, torch.where(mine == -torch.inf, mine, SOFTCAP * torch.tanh(mine / SOFTCAP)))
        return self.parallel.all_gather(mine)[:, :VOCAB]


def logits_of(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 8


def sequences_of(seed: int, count: int = 6) -> dict[int, AdjustedSequence]:
    """Of the highest slots but one, which is the padding's."""
    generator = np.random.default_rng(seed)
    return {SLOTS - 2 - at: random_sequence(generator, VOCAB) for at in range(count)}


def expected(logits: Tensor, sequences: dict[int, AdjustedSequence]) -> Tensor:
    return torch.stack([sequence.logits(row, SOFTCAP) for row, sequence in zip(logits, sequences.values(), strict=True)])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_slices_are_adjusted_as_the_whole_is(size: int) -> None:
    """At TP 1 to 4, whose slices begin and end within words or beyond the vocabulary, adjusted logits are the formulas' on whole
    logits, and bit for bit those of TP 1."""
    for seed in range(8):
        sequences, logits = sequences_of(seed), logits_of(6, seed)

        def run(parallel: Group) -> Tensor:
            rank = RankTables(parallel)
            rank.admit(sequences)  # noqa: B023 (run at once)
            rank.mask(sequences)  # noqa: B023
            return rank.adjusted(logits, sequences)  # noqa: B023

        alone = run(Single())
        assert error(alone.double(), expected(logits, sequences)) < TOLERANCE
        for found in run_ranks(size, run) if size > 1 else ():
            assert torch.equal(found, alone)


def without_words(sequence: AdjustedSequence) -> AdjustedSequence:
    return replace(sequence, wanted=msgspec.structs.replace(sequence.wanted, bad_words=()))


FAULTS: dict[str, Callable[[AdjustedSequence], AdjustedSequence]] = {
    "the prompt is counted as generated": lambda it: replace(it, prompt=0),
    "generated tokens are not counted": lambda it: replace(it, prompt=len(it.tokens)),
    "no bad words": without_words,
    "no mask": lambda it: replace(it, allowed=None),
    "the history is a token short": lambda it: replace(it, tokens=it.tokens[:-1], prompt=min(it.prompt, len(it.tokens) - 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    """Planted faults: a sequence that differs in one respect has other logits, by far."""
    worst = 0.0
    for seed in range(8):
        sequences, logits = sequences_of(seed), logits_of(6, seed)
        wrong = {slot: FAULTS[fault](sequence) for slot, sequence in sequences.items()}
        rank = RankTables(Single())
        rank.admit(wrong)
        rank.mask(wrong)
        worst = max(worst, error(rank.adjusted(logits, wrong).double(), expected(logits, sequences)))
    assert worst > 100 * TOLERANCE


def test_a_bias_on_another_rank_is_seen() -> None:
    """Planted fault: tables of the slice beside its own give a rank other logits."""
    sequences, logits = sequences_of(0), logits_of(6, 0)

    def run(parallel: Group) -> Tensor:
        rank = RankTables(parallel)
        rank.adjustments = Adjustments(SLOTS, range(rank.ids.stop, rank.ids.stop + rank.share), CPU)
        rank.admit(sequences)
        return rank.adjusted(logits, sequences)

    assert error(run_ranks(2, run)[0].double(), expected(logits, sequences)) > 100 * TOLERANCE


@pytest.mark.parametrize("size", [1, 2])
def test_counts_follow_what_is_generated(size: int) -> None:
    """Over random steps, in which sequences decode, are preempted and come back, or give way to others, each row's logits are the
    formulas'. A count forgotten once is seen."""

    def run(parallel: Group, forget: int | None) -> float:
        generator, rank, worst = np.random.default_rng(5), RankTables(parallel), 0.0
        sequences = {}
        for step in range(40):
            for slot in range(3):
                if slot not in sequences or generator.random() < 0.1:
                    new = random_sequence(generator, VOCAB)
                    if slot in sequences and generator.random() < 0.5:
                        new = sequences[slot]  # it comes back, with all its tokens
                    elif generator.random() < 0.3:
                        new = AdjustedSequence(new.tokens, new.prompt)
                    sequences[slot] = replace(new, allowed=None)
                    rank.admit({slot: sequences[slot]})
            logits = logits_of(len(sequences), step)
            if step == forget:
                rank.adjustments.tables.counts[:] &= ~3
            worst = max(worst, error(rank.adjusted(logits, sequences, step=step).double(), expected(logits, sequences)))
            sequences = {slot: it.longer(int(generator.choice(it.tokens))) for slot, it in sequences.items() if len(it.tokens) < 90}
        return worst

    assert max(run_ranks(size, lambda parallel: run(parallel if size > 1 else Single(), None))) < TOLERANCE
    if size == 1:
        assert run(Single(), 20) > 100 * TOLERANCE


def test_a_slot_forgets_its_last_tenant() -> None:
    """A sequence that adjusts nothing, in the slot of one that did, has the logits of a slot that nobody had; the first had not."""
    rank, logits = RankTables(Single()), logits_of(1, 7)
    first = AdjustedSequence([1, 2, 2], 1, LogitAdjustments(bias=((3, 9.0),), frequency_penalty=1.5, bad_words=((4,),)))
    rank.admit({5: first})
    fresh = RankTables(Single()).adjusted(logits, {5: AdjustedSequence([1, 2], 1)})
    assert not torch.equal(rank.adjusted(logits, {5: first}), fresh)
    rank.adjustments.admit([Admission(5, 2, [1, 2], 1, SamplingParams(max_tokens=1))])
    assert rank.adjustments.are_adjusted(np.array([5]), STEP) == [False]
    assert torch.equal(rank.adjusted(logits, {5: AdjustedSequence([1, 2], 1)}), fresh)


def test_a_count_ends_at_its_bound() -> None:
    """An id that was generated more often than a count can say counts as the most that it can, at admission and behind it, and
    never as one of the prompt's."""
    often = AdjustedSequence([1, *[2] * (MOST_COUNTED + 5)], 1, LogitAdjustments(frequency_penalty=0.1, repetition_penalty=2.0))
    rank = RankTables(Single())
    rank.admit({5: often})
    assert rank.adjustments.tables.counts[5, [1, 2, 3]].tolist() == [-IN_PROMPT, MOST_COUNTED, 0]
    few = AdjustedSequence([1, 2, 2], 1, often.wanted)
    rank.admit({5: few})
    rank.adjustments.tables.counts[5, 2] = MOST_COUNTED
    rank.adjusted(logits_of(1, 0), {5: few.longer(2)})
    assert rank.adjustments.tables.counts[5, [1, 2, 3]].tolist() == [-IN_PROMPT, MOST_COUNTED, 0]
    rank.adjustments.tables.counts[5, 2] = MOST_COUNTED - 1
    rank.adjusted(logits_of(1, 0), {5: few.longer(2)})
    assert rank.adjustments.tables.counts[5, 2] == MOST_COUNTED


# ---- what is sampled


def rows_of(batch: SamplingBatch, seed: int, logprobs: int | None = 2) -> SampledRows:
    """Greedy, plain, with a small top_k and with other filters in turn."""
    count = len(batch.slots)
    generator, kind = torch.Generator().manual_seed(seed), torch.arange(count) % 4
    return SampledRows(
        positions=batch.positions.long() + 1,
        seeds=torch.randint(-(2**62), 2**62, (count,), generator=generator),
        temperature=(torch.rand(count, generator=generator) + 0.5).masked_fill(kind == 0, 0.0),
        top_k=torch.where(kind == 2, 20, 0),
        top_p=torch.where(kind >= 2, 0.95, 1.0),
        min_p=torch.zeros(count),
        forbidden=torch.full((count, 1), -1),
        logprobs=[logprobs] * count,
    )


def with_parameters(batch: SamplingBatch, rows: SampledRows) -> SamplingBatch:
    """The batch, whose slots sample as `rows` say."""
    parameters = batch.parameters._replace(integers=batch.parameters.integers.clone(), floats=batch.parameters.floats.clone())
    for table, own in ((parameters.integers, rows.parameters.integers), (parameters.floats, rows.parameters.floats)):
        table[batch.slots.long()] = own
    return replace(batch, parameters=parameters)


def sampled(parallel: Group, sequences: dict[int, AdjustedSequence], logits: Tensor, step: int = STEP) -> Drawn:
    """By a rank whose masks are for STEP."""
    rank = RankTables(parallel)
    rank.admit(sequences)
    rank.mask(sequences)
    batch = rank.batch(sequences, step)
    rows = rows_of(batch, 3)
    return drawn(Sampler(parallel, VOCAB, SOFTCAP, (), CPU), rank.slice(logits), rows, with_parameters(batch, rows))


def plain(sequences: dict[int, AdjustedSequence], logits: Tensor, softcap: float | None) -> Drawn:
    """Of whole logits that nothing adjusts."""
    batch = replace(RankTables(Single()).batch(sequences), adjustments=None, softcap=softcap)
    rows = rows_of(batch, 3)
    return drawn(Sampler(Single(), VOCAB, softcap, (), CPU), logits, rows, with_parameters(batch, rows))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_are_of_the_adjusted_logits(size: int) -> None:
    """Rows of all kinds give the tokens of the formulas' logits, on every rank; rows without adjustments what they give alone;
    logprobs are of the logits before them."""
    changed = 0
    for seed in range(4):
        sequences, logits = sequences_of(seed), logits_of(6, seed)
        sequences[SLOTS - 4] = AdjustedSequence([1, 2, 3], 2)
        want, alone = plain(sequences, expected(logits, sequences).float(), None), plain(sequences, logits, SOFTCAP)
        for found in run_ranks(size, lambda parallel: sampled(parallel, sequences, logits)):  # noqa: B023 (run at once)
            assert found.tokens.tolist() == want.tokens.tolist()
            for one, other in zip(found.logprobs, alone.logprobs, strict=True):
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
                assert abs(one.top[0][1] - other.top[0][1]) < TOLERANCE
        assert want.tokens[2] == alone.tokens[2]
        changed += int((want.tokens != alone.tokens).sum())
    assert changed >= 8


def test_a_mask_is_for_one_step() -> None:
    """In any other step than its own a mask is as if there were none; a mask set later takes its place."""
    sequences = {slot: replace(it, wanted=LogitAdjustments()) for slot, it in sequences_of(1).items()}
    logits = logits_of(6, 1)
    alone = plain(sequences, logits, SOFTCAP).tokens.tolist()
    assert sampled(Single(), sequences, logits).tokens.tolist() != alone
    for step in (STEP - 1, STEP + 1, 5):
        assert sampled(Single(), sequences, logits, step).tokens.tolist() == alone
    adjustments, bits = Adjustments(SLOTS, range(VOCAB), CPU), np.zeros((3, -(-VOCAB // 32)), np.int32)
    adjustments.set_masks(3, np.array([6, 2, 4], np.int32), bits)
    adjustments.set_masks(4, np.array([4], np.int32), bits[:1])
    of = lambda step: np.flatnonzero(adjustments.are_adjusted(np.arange(SLOTS), step)).tolist()  # noqa: E731
    assert (of(3), of(4), of(5)) == ([2, 6], [4], [])


def test_masks_of_other_slots_or_words_are_seen() -> None:
    """Planted faults: masks given to each other's slots, or read a word, or a bit, further on, give other tokens."""
    generator, logits = np.random.default_rng(2), logits_of(6, 2)
    allowed = generator.random((6, VOCAB)) < 0.1

    def tokens(masks: np.ndarray) -> list[int]:
        sequences = {slot: AdjustedSequence([1, 2], 1, allowed=mask) for slot, mask in enumerate(masks)}
        return sampled(Single(), sequences, logits).tokens.tolist()

    right = tokens(allowed)
    assert all(allowed[row, token] for row, token in enumerate(right))
    for wrong in (np.roll(allowed, 1, axis=0), np.roll(allowed, 32, axis=1), np.roll(allowed, 1, axis=1)):
        assert tokens(wrong) != right


def test_a_forbidden_nan_is_a_nan() -> None:
    """A NaN where mask, bias, allowed ids or a bad word let nothing come silences its row, and no other."""
    ways = [
        AdjustedSequence([1, 2], 1, allowed=np.arange(VOCAB) != 70),
        AdjustedSequence([1, 2], 1, LogitAdjustments(bias=((70, -float("inf")),))),
        AdjustedSequence([1, 2], 1, LogitAdjustments(allowed_ids=(5, 6))),
        AdjustedSequence([1, 2], 1, LogitAdjustments(bad_words=((70,),))),
    ]
    sequences, logits = dict(enumerate([way for way in ways for _ in range(2)])), logits_of(8, 0)
    logits[1::2, 70] = torch.nan
    found = sampled(Single(), sequences, logits)
    assert found.nan.nonzero().flatten().tolist() == [1, 3, 5, 7]
    assert 70 not in found.tokens[::2]


@pytest.mark.parametrize("size", [1, 2])
def test_a_row_that_may_give_nothing_is_told_apart(size: int) -> None:
    """Rows of any kind whose constraints leave no id are flagged, without a token and without a NaN; no other row is."""
    nothing = LogitAdjustments(allowed_ids=(5, 150), bad_words=((5,), (2, 150)))
    one = LogitAdjustments(allowed_ids=(5,))
    sequences = {slot: AdjustedSequence([1, 2], 1, nothing if slot < 3 else one) for slot in range(6)}
    for found in run_ranks(size, lambda parallel: sampled(parallel, sequences, logits_of(6, 0))):
        assert found.empty.tolist() == [True] * 3 + [False] * 3
        assert found.tokens.tolist() == [0, 0, 0, 5, 5, 5]
        assert not found.nan.any()


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """In standard deviations above what is expected; ids of less than five expected draws together."""
    wanted = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    few = wanted < 5
    counts, wanted = (torch.cat([x[~few], x[few].sum()[None]]) for x in (counts, wanted))
    statistic = float(((counts - wanted) ** 2 / wanted.clamp(min=1e-9)).sum())
    return (statistic - len(wanted) + 1) / (2 * (len(wanted) - 1)) ** 0.5


def test_what_is_drawn_follows_the_formula() -> None:
    """1500 draws with penalties, bias and a ban have the distribution of the formula, behind it temperature; with the temperature
    before the penalties, or without them, they have not."""
    tokens = [3, 3, 9, 9, 9, 20, 21, 22, 20, 20, 20, 21]
    wanted = LogitAdjustments(
        repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5, bias=((9, 2.5), (30, -float("inf")), (40, 1.0))
    )
    it = AdjustedSequence(tokens, 6, wanted)
    raw, draws, temperature = logits_of(1, 4)[0] / 8, 1500, 0.6
    raw[[3, 9, 20, 21, 30]] += 3
    rank = RankTables(Single())
    rank.admit({0: it})
    batch = rank.batch({0: it})
    adjusted = raw[None].clone()
    assert adjust(adjusted, batch, 0).capped is not None
    many = replace(batch, slots=torch.arange(draws).int(), positions=batch.positions.repeat(draws))
    rows = replace(rows_of(many, 0, None), temperature=torch.full((draws,), temperature))
    rows = replace(rows, top_k=torch.zeros(draws, dtype=torch.int64), top_p=torch.ones(draws))
    sampler = Sampler(Single(), VOCAB, SOFTCAP, (), CPU)
    capped_rows = replace(batch_of(sampler, rows), capped=torch.ones(draws, dtype=torch.int32))
    tokens_drawn = drawn(sampler, adjusted.repeat(draws, 1), rows, capped_rows).tokens
    assert chi_square(tokens_drawn, (it.logits(raw, SOFTCAP) / temperature).softmax(-1)) < 4
    capped = SOFTCAP * torch.tanh(raw.double() / SOFTCAP)
    late = it.logits(SOFTCAP * torch.atanh(capped / temperature / SOFTCAP), SOFTCAP)
    assert chi_square(tokens_drawn, late.softmax(-1)) > 20
    assert chi_square(tokens_drawn, (capped / temperature).softmax(-1)) > 20


# ---- the kernel


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize(("rank", "size", "parts"), [(0, 1, 4), (2, 3, 2)])
def interpreted_slices_are_the_formulas(rank: int, size: int, parts: int) -> None:
    """The kernel's slices are the formulas', in one part or several, cut within a word or padded; -inf stays behind the
    vocabulary's end; padding and unadjusted rows keep their bits."""
    sequences, logits = sequences_of(rank), logits_of(8, rank)
    sequences[0] = AdjustedSequence([1, 2, 3], 2)
    it = RankTables(OneOf(rank, size))
    it.admit(sequences)
    it.mask(sequences)
    before = dict(sequences)
    for _ in range(2):  # the second counts its inputs
        mine = it.slice(logits)
        raw = mine.clone()
        capped = adjust(mine, it.batch(before, padding=1), it.ids.start, parts).capped
        assert capped is not None
        assert [bool(on) for on in capped] == [*(adjusts(sequence) for sequence in before.values()), False]
        want = expected(logits[:7], before)[:, it.ids.start : it.ids.stop]
        for row in range(8):
            if not capped[row]:
                assert torch.equal(mine[row], raw[row])
            else:
                assert error(mine[row, : want.shape[1]].double(), want[row]) < TOLERANCE, row
                assert mine[row, want.shape[1] :].isneginf().all()
        before = {slot: sequence.longer(sequence.tokens[-2]) for slot, sequence in before.items()}


def adjusts(sequence: AdjustedSequence) -> bool:
    return sequence.allowed is not None or sequence.wanted != LogitAdjustments()


def interpreted_a_count_ends_at_its_bound() -> None:
    """The kernel's too."""
    test_a_count_ends_at_its_bound()


class OneOf(Single):
    """A rank without its peers."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def interpreted_every_kind_of_adjusted_rows() -> None:
    """Kernels give the tokens of the formulas' logits to adjusted and unadjusted rows of all kinds, and logprobs of the logits
    before them. Biases against these tokens give others; where none may come, no row has one."""
    sequences, logits = sequences_of(0), logits_of(6, 0) / 4
    sequences[SLOTS - 4] = AdjustedSequence([1, 2, 3], 2)
    capped = SOFTCAP * torch.tanh(logits / SOFTCAP)
    found = sampled(Single(), sequences, logits)
    tokens = rows_of(RankTables(Single()).batch(sequences), 3).tokens(expected(logits, sequences).float())
    assert found.tokens.tolist() == tokens
    logprobs = torch.log_softmax(capped, -1)
    for row, reported in enumerate(found.logprobs):
        assert abs(reported.chosen - logprobs[row, tokens[row]]) < TOLERANCE
        assert [token for token, _ in reported.top] == logprobs[row].topk(2).indices.tolist()
    nothing = replace(sequences[SLOTS - 2], allowed=np.zeros(VOCAB, np.bool_))
    silent = sampled(Single(), dict.fromkeys(range(4), nothing), logits[:4])
    assert silent.empty.all()
    assert silent.tokens.tolist() == [0] * 4
    banned = zip(sequences.items(), tokens, strict=True)
    other = {slot: replace(it, wanted=LogitAdjustments(bias=((token, -50.0),))) for (slot, it), token in banned}
    assert sampled(Single(), other, logits).tokens.tolist() != tokens
