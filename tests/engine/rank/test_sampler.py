"""The sampler over a cut vocabulary: what it gives must not depend on the cut, the batch or the rank."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.filters
from engine.protocol import PromptLogprobs
from engine.rank.parallel import Single
from engine.rank.sampler import Sampled, Sampler, SamplingRows, TopLogprobs
from kernels.launch import launch
from kernels.sampling_batch import SlotParameters
from tests.support import interpreter
from tests.support.engine.threads import ThreadParallel, run_ranks

pytestmark = pytest.mark.cpu

VOCAB = 64
SOFTCAP = 30.0
CPU = torch.device("cpu")
SUPPRESS = (7, 50)


def rows_of(count: int, seed: int = 0) -> SamplingRows:
    """Every third row greedy, plain, filtered; every fourth wants logprobs; the first rows may not stop on ids 3 and 60."""
    generator = torch.Generator().manual_seed(seed)
    forbidden = torch.full((count, 3), -1)
    forbidden[: count // 2, :2] = torch.tensor([3, 60])
    return SamplingRows(
        positions=torch.randint(1, 5000, (count,), generator=generator),
        seeds=torch.randint(-(2**62), 2**62, (count,), generator=generator),
        temperature=torch.rand(count, generator=generator) + 0.5,
        top_k=torch.full((count,), 9),
        top_p=torch.full((count,), 0.9),
        min_p=torch.full((count,), 0.01),
        forbidden=forbidden,
        greedy=list(range(0, count, 3)),
        plain=list(range(1, count, 3)),
        filtered=list(range(2, count, 3)),
        logprobs=[3 if row % 4 == 0 else 0 if row % 4 == 1 else None for row in range(count)],
    )


def logits_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 6


def sample(parallel: ThreadParallel | Single, logits: Tensor, rows: SamplingRows) -> Sampled:
    """`logits` are whole; each rank samples from its slice."""
    share = VOCAB // parallel.size
    mine = logits[:, parallel.rank * share : (parallel.rank + 1) * share].contiguous()
    return Sampler(parallel, VOCAB, SOFTCAP, SUPPRESS, CPU).sample(mine, rows)


def same(first: Sampled, second: Sampled) -> bool:
    pairs = [(first.tokens, second.tokens), (first.nan, second.nan)]
    if first.logprobs is not None and second.logprobs is not None:
        one, other = first.logprobs, second.logprobs
        pairs += [(one.chosen, other.chosen), (one.ids, other.ids), (one.values, other.values)]
    return (first.logprobs is None) == (second.logprobs is None) and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("size", [2, 4])
def test_a_cut_vocabulary_gives_what_the_whole_gives(size: int) -> None:
    """Tokens, NaN flags and logprobs at TP 2 and 4 equal TP 1, on every rank, bit for bit."""
    rows, logits = rows_of(48), logits_of(48)
    whole = sample(Single(), logits, rows)
    for found in run_ranks(size, lambda parallel: sample(parallel, logits, rows)):
        assert same(found, whole)


def test_a_rank_that_gathers_in_another_order_is_seen() -> None:
    """Planted fault: with ranks 1 and 2 exchanged in the gather, most tokens differ."""

    class Crossed(ThreadParallel):
        def all_gather(self, x: Tensor) -> Tensor:
            parts = self._exchange(x)
            return torch.cat([parts[0], parts[2], parts[1], parts[3]], dim=-1)

    rows, logits = rows_of(48), logits_of(48)
    whole = sample(Single(), logits, rows)
    found = run_ranks(4, lambda parallel: sample(parallel, logits, rows), Crossed)[0]
    assert (found.tokens != whole.tokens)[rows.plain].float().mean() > 0.25


def test_rows_permuted_give_their_own_tokens() -> None:
    """The order of rows in a batch changes no row's token; exchanged seeds do."""
    rows, logits = rows_of(48), logits_of(48)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    place = order.argsort().tolist()
    moved = replace(
        rows,
        **{
            name: getattr(rows, name)[order]
            for name in ("positions", "seeds", "temperature", "top_k", "top_p", "min_p", "forbidden")
        },
        **{kind: sorted(place[row] for row in getattr(rows, kind)) for kind in ("greedy", "plain", "filtered")},
        logprobs=[rows.logprobs[row] for row in order.tolist()],
    )
    straight = sample(Single(), logits, rows).tokens
    assert torch.equal(sample(Single(), logits[order], moved).tokens, straight[order])
    assert not torch.equal(sample(Single(), logits[order], replace(moved, seeds=rows.seeds)).tokens, straight[order])


def test_sampling_again_gives_the_same() -> None:
    """There is no state: the same call gives the same tokens; another position gives others."""
    rows, logits = rows_of(48), logits_of(48)
    first = sample(Single(), logits, rows)
    assert same(sample(Single(), logits, rows), first)
    later = sample(Single(), logits, replace(rows, positions=rows.positions + 1)).tokens
    assert (later != first.tokens)[rows.plain].float().mean() > 0.3
    assert torch.equal(later[rows.greedy], first.tokens[rows.greedy])


def test_columns_behind_the_vocabulary_are_never_drawn() -> None:
    """Where the last rank has more columns than the vocabulary, -inf, tokens and logprobs are those of the vocabulary alone; were
    the columns zero instead, they would be others."""
    rows, logits = rows_of(48), logits_of(48) / 6
    whole = Sampler(Single(), VOCAB - 11, SOFTCAP, SUPPRESS, CPU).sample(logits[:, :-11], rows)

    def padded(value: float, vocabulary: int) -> list[Sampled]:
        filled = logits.clone()
        filled[:, -11:] = value
        cut = lambda rank: filled.chunk(4, 1)[rank].contiguous()  # noqa: E731
        return run_ranks(4, lambda parallel: Sampler(parallel, vocabulary, SOFTCAP, SUPPRESS, CPU).sample(cut(parallel.rank), rows))

    assert all(same(found, whole) for found in padded(-torch.inf, VOCAB - 11))
    assert not same(padded(0.0, VOCAB)[0], whole)


@pytest.mark.parametrize("size", [1, 4])
def test_greedy_takes_the_best_allowed_and_the_lowest_of_equals(size: int) -> None:
    """Greedy is the argmax of the uncapped logits, lowest id first, also where the tie lies on several ranks."""
    logits = torch.zeros(3, VOCAB)
    logits[0, [20, 40, 41]] = 5.0
    logits[1, [20, 40]] = torch.tensor([2000.0, 2001.0])  # the cap would make them equal
    logits[2, [7, 3, 60, 44]] = torch.tensor([9.0, 8.0, 7.0, 6.0])  # suppressed, may not stop, may not stop, allowed
    rows = replace(rows_of(3), greedy=[0, 1, 2], plain=[], filtered=[], logprobs=[None] * 3)
    rows = replace(rows, forbidden=torch.tensor([[-1, -1], [-1, -1], [3, 60]]))
    for found in run_ranks(size, lambda parallel: sample(parallel, logits, rows)):
        assert found.tokens.tolist() == [20, 40, 44]
        assert found.logprobs is None
    free = replace(rows, forbidden=torch.full((3, 2), -1))
    assert sample(Single(), logits, free).tokens.tolist() == [20, 40, 3]


def test_forbidden_ids_are_never_drawn() -> None:
    """Ids suppressed or masked as stop ids never come, though they hold most of the mass; allowed, they do."""
    logits = torch.zeros(900, VOCAB)
    logits[:, [3, 60, *SUPPRESS]] = 6.0
    rows = replace(rows_of(900), forbidden=torch.tensor([[3, 60]]).expand(900, -1))
    tokens = sample(Single(), logits, rows).tokens
    assert not torch.isin(tokens, torch.tensor([3, 60, *SUPPRESS])).any()
    free = sample(Single(), logits, replace(rows, forbidden=torch.full((900, 1), -1))).tokens
    assert torch.isin(free, torch.tensor([3, 60])).float().mean() > 0.8
    assert not torch.isin(free, torch.tensor(SUPPRESS)).any()


@pytest.mark.parametrize("place", [0, 33, VOCAB - 1])
def test_a_nan_on_one_rank_silences_the_row_on_all(place: int) -> None:
    """A NaN anywhere in a row flags that row, and no other, on every rank, whatever its kind."""
    rows, logits = rows_of(12), logits_of(12)
    clean = sample(Single(), logits, rows)
    bad = [0, 4, 8]  # greedy, plain, filtered
    logits[bad, place] = torch.nan
    for found in run_ranks(4, lambda parallel: sample(parallel, logits, rows)):
        assert found.nan.nonzero().flatten().tolist() == bad
        assert not found.tokens[bad].any()
        good = ~found.nan
        assert torch.equal(found.tokens[good], clean.tokens[good])
    assert not clean.nan.any()


def test_logprobs_are_of_capped_unmasked_logits() -> None:
    """Logprobs come before every mask and temperature, of the capped logits, to 1e-5; of the uncapped ones they are far off."""
    rows, logits = rows_of(12), logits_of(12) * 5
    found = sample(Single(), logits, rows)
    assert found.logprobs is not None
    assert list(found.logprobs.rows) == [0, 1, 4, 5, 8, 9]
    exact = (torch.tanh(logits.double() / SOFTCAP) * SOFTCAP).log_softmax(-1)[list(found.logprobs.rows)]
    tokens = found.tokens[list(found.logprobs.rows)][:, None]
    assert (found.logprobs.chosen[:, None] - exact.gather(1, tokens)).abs().max() < 1e-5
    assert torch.equal(found.logprobs.ids, exact.topk(3).indices)
    assert (found.logprobs.values - exact.topk(3).values).abs().max() < 1e-5
    uncapped = logits.double().log_softmax(-1)[list(found.logprobs.rows)]
    assert (found.logprobs.chosen[:, None] - uncapped.gather(1, tokens)).abs().max() > 1e-3


# ---- every kind, by kernels


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("alternatives", [0, 5])
def test_logprobs_of_known_tokens_do_not_depend_on_the_cut(size: int, alternatives: int) -> None:
    """Logprob, rank and alternatives of given tokens, from slices of which the last are not filled, are those of the whole row to
    1e-5; of the tokens one on they are off by far."""
    vocabulary, rows = VOCAB - 5, 40
    logits, ids = logits_of(rows), torch.arange(rows) * 7 % vocabulary
    logits[:, vocabulary:] = -torch.inf

    def body(parallel: ThreadParallel | Single) -> Tensor:
        share = VOCAB // parallel.size
        mine = logits[:, parallel.rank * share : (parallel.rank + 1) * share].contiguous()
        return Sampler(parallel, vocabulary, SOFTCAP, SUPPRESS, CPU).token_logprobs(mine, ids, alternatives)

    found = [body(Single())] if size == 1 else run_ranks(size, body)
    assert all(torch.equal(each, found[0]) for each in found)
    reported = PromptLogprobs(1, alternatives, found[0].numpy().tobytes()).entries()
    right = (torch.tanh(logits[:, :vocabulary].double() / SOFTCAP) * SOFTCAP).log_softmax(-1)
    best = right.topk(alternatives, dim=-1)
    for row, (rank, logprobs) in enumerate(reported):
        assert abs(logprobs.chosen - right[row, ids[row]].item()) < 1e-5
        assert rank == (right[row] >= right[row, ids[row]]).sum()
        assert [token for token, _ in logprobs.top] == best.indices[row].tolist()
        assert torch.allclose(torch.tensor([value for _, value in logprobs.top]).double(), best.values[row], atol=1e-5)
    off = [abs(logprobs.chosen - right[row, (ids[row] + 1) % vocabulary].item()) for row, (_, logprobs) in enumerate(reported)]
    assert max(off) > 1e-3


def slot_parameters(rows: SamplingRows) -> SlotParameters:
    """The rows' parameters, row i in slot i, with the filters of filtered rows alone and greedy rows at temperature 0."""
    count = len(rows.positions)
    integers, floats = torch.zeros(count, 3, dtype=torch.int64), torch.ones(count, 3)
    filtered = list(rows.filtered)
    integers[:, 0], integers[:, 2] = rows.seeds, 10_000
    integers[filtered, 1] = rows.top_k[filtered]
    floats[:, 0], floats[:, 2] = rows.temperature, 0.0
    floats[filtered, 1], floats[filtered, 2] = rows.top_p[filtered], rows.min_p[filtered]
    floats[list(rows.greedy), 0] = 0.0
    return SlotParameters(integers, floats, rows.forbidden.int().contiguous())


def every_kind(parallel: ThreadParallel | Single, logits: Tensor, rows: SamplingRows, **planted: Any) -> tuple[Tensor, TopLogprobs]:
    """Tokens and flags of `logits`, whole, of which each rank has its slice; the same behind each row's input in the token table.

    A choice over ranks spins, which no interpreter of one process can run: with several, greedy and plain tokens are the
    reference's."""
    share, count = VOCAB // parallel.size, len(logits)
    sampler = Sampler(parallel, VOCAB, SOFTCAP, SUPPRESS, CPU)
    if parallel.size > 1:
        plain = replace(rows, plain=sorted([*rows.plain, *rows.filtered]), filtered=[])
        alone = sample(Single(), logits, plain)
        chosen = torch.stack([alone.tokens, alone.nan.long()], 1).int()
        sampler.maxima = lambda *_: chosen.clone()  # type: ignore[method-assign]
    mine = logits[:, parallel.rank * share : (parallel.rank + 1) * share].contiguous()
    slots, positions = torch.arange(count, dtype=torch.int32), rows.positions.int() - 1
    tokens = torch.zeros(count, 5001, dtype=torch.int32)
    batch = sampler.batch(slots, positions, slot_parameters(replace(rows, **planted)), tokens)
    found, top = sampler.every_kind(mine, batch, None, 3)
    assert torch.equal(tokens[slots.long(), rows.positions], found[:, 0])
    assert top is not None
    return found, top


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize("size", [1, 2, 4])
def interpreted_every_kind_is_the_reference(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, flags and logprobs of mixed rows, in a number that the ranks do not divide, equal the reference's on every rank; with
    other filters they do not. A NaN on one rank silences its row."""
    one_at_a_time = threading.Lock()

    def guarded(*args: Any, **options: Any) -> None:
        with one_at_a_time:
            launch(*args, **options)

    monkeypatch.setattr(kernels.filters, "launch", guarded)
    rows, logits = rows_of(17), logits_of(17) / 4
    logits[5, 3] = torch.nan
    want = sample(Single(), logits, replace(rows, logprobs=[3] * 17))
    assert want.logprobs is not None
    sound = [row for row in range(17) if row != 5]

    def ranks(**planted: Tensor) -> list[tuple[Tensor, TopLogprobs]]:
        return run_ranks(size, lambda parallel: every_kind(parallel if size > 1 else Single(), logits, rows, **planted))

    for chosen, top in ranks():
        assert chosen.tolist() == torch.stack([want.tokens, want.nan.long()], 1).tolist()
        assert torch.equal(top.ids[sound], want.logprobs.ids[sound])
        assert (top.chosen - want.logprobs.chosen)[sound].abs().max() < 1e-5
        assert (top.values - want.logprobs.values)[sound].abs().max() < 1e-5
    assert ranks(top_k=torch.full((17,), 1))[0][0].tolist() != chosen.tolist()
