"""The sampler over a cut vocabulary: what it gives must not depend on the cut, the batch or the rank."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.rank.sampler
import kernels.adjust
import kernels.candidates
import kernels.choose
import kernels.filters
from engine.protocol import PromptLogprobs
from engine.rank.parallel import Single
from engine.rank.sampler import Sampler
from kernels.launch import launch
from tests.support import interpreter
from tests.support.engine.sampled_rows import CPU, Drawn, SampledRows, cut, drawn
from tests.support.engine.threads import ThreadParallel, run_ranks

pytestmark = pytest.mark.cpu

VOCAB = 64
SOFTCAP = 30.0
SUPPRESS = (7, 50)


def rows_of(count: int, seed: int = 0, kind: str | None = None) -> SampledRows:
    """Greedy, plain, and with the filters that a small top_k begins, and others, in turn, or of one kind; every fourth row reports
    logprobs, and another fourth its token's alone; the first rows may not stop on ids 3 and 60."""
    generator = torch.Generator().manual_seed(seed)
    forbidden = torch.full((count, 3), -1)
    forbidden[: count // 2, :2] = torch.tensor([3, 60])
    kinds = [kind or ("greedy", "plain", "small", "other")[row % 4] for row in range(count)]
    of = lambda value, other, *names: torch.tensor([value if name in names else other for name in kinds])  # noqa: E731
    return SampledRows(
        positions=torch.randint(1, 5000, (count,), generator=generator),
        seeds=torch.randint(-(2**62), 2**62, (count,), generator=generator),
        temperature=(torch.rand(count, generator=generator) + 0.5) * of(0.0, 1.0, "greedy"),
        top_k=of(9, 0, "small"),
        top_p=of(0.9, 1.0, "small", "other"),
        min_p=of(0.01, 0.0, "small", "other"),
        forbidden=forbidden,
        logprobs=[3 if row % 4 == 0 else 0 if row % 4 == 1 else None for row in range(count)],
    )


def logits_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 6


def capped(logits: Tensor) -> Tensor:
    return torch.tanh(logits / SOFTCAP) * SOFTCAP


def sample(parallel: ThreadParallel | Single, logits: Tensor, rows: SampledRows, vocabulary: int = VOCAB) -> Drawn:
    """`logits` are whole; each rank samples from its slice."""
    return drawn(Sampler(parallel, vocabulary, SOFTCAP, SUPPRESS, CPU), cut(logits, parallel), rows)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_cut_vocabulary_gives_what_the_whole_gives(size: int) -> None:
    """Rows of all kinds, in a number that the ranks do not divide, give the tokens of whole logits on every rank, and all ranks the
    same bits; logprobs are TP 1's to 1e-5."""
    rows, logits = rows_of(47), logits_of(47)
    alone = sample(Single(), logits, rows)
    ranks = run_ranks(size, lambda parallel: sample(parallel, logits, rows)) if size > 1 else [alone]
    assert alone.tokens.tolist() == rows.tokens(capped(logits), SUPPRESS, logits)
    for found in ranks:
        assert found.same(ranks[0])
        assert torch.equal(found.tokens, alone.tokens)
        for one, other in zip(found.logprobs, alone.logprobs, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert abs(one.chosen - other.chosen) < 1e-5


def test_a_rank_that_gathers_in_another_order_is_seen() -> None:
    """Planted fault: with ranks 1 and 2 exchanged in the gather, filtered tokens differ: equal ids stand in another order."""

    class Crossed(ThreadParallel):
        def all_gather(self, x: Tensor) -> Tensor:
            parts = self._exchange(x)
            return torch.cat([parts[0], parts[2], parts[1], parts[3]], dim=-1)

    rows, logits = rows_of(48), logits_of(48)
    whole = sample(Single(), logits, rows)
    found = run_ranks(4, lambda parallel: sample(parallel, logits, rows), Crossed)[0]
    assert (found.tokens != whole.tokens)[rows.special.filtered].float().mean() > 0.25


@pytest.mark.parametrize("size", [1, 4])
def test_no_row_depends_on_who_stands_beside_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of a mixed batch gives, to the bit, the token, flags and logprobs that it gives alone; also where few rows are
    worked on at once. Planted fault: told that other rows filter or report, the sampler gives others."""
    rows, logits = rows_of(17), logits_of(17)
    logits[6, 3] = torch.nan

    def run(parallel: ThreadParallel | Single) -> list[Drawn]:
        return [sample(parallel, logits, rows), *(sample(parallel, logits[[row]], rows.at([row])) for row in range(17))]

    def ranks() -> list[list[Drawn]]:
        return run_ranks(size, run) if size > 1 else [run(Single())]

    for pieces in (1 << 24, 3 * VOCAB // size):
        monkeypatch.setattr(engine.rank.sampler, "PIECE_LOGITS", pieces)
        for mixed, *alone in ranks():
            assert mixed.tokens.tolist() == [int(one.tokens) for one in alone]
            assert mixed.nan.tolist() == [bool(one.nan) for one in alone] == [row == 6 for row in range(17)]
            for row, found in zip(rows.special.reported, mixed.logprobs, strict=True):
                (one,) = alone[row].logprobs
                assert (one.chosen, one.top) == (found.chosen, found.top[: rows.logprobs[row]])
    rows, logits = rows_of(48), logits_of(48) / 6
    right = sample(Single(), logits, rows)
    for wrong in ({"filtered": tuple(range(0, 48, 4))}, {"small_top_k": False}, {"reported": tuple(range(24))}):
        special = replace(rows.special, **wrong)
        found = drawn(Sampler(Single(), VOCAB, SOFTCAP, SUPPRESS, CPU), logits, rows, special=special)
        assert not found.same(right), wrong


@pytest.mark.parametrize("kind", ["greedy", "plain", "small"])
def test_only_rows_that_ask_for_whole_logits_pay_for_them(kind: str) -> None:
    """A batch without other filters exchanges no logits, and one row with them those of one row, whoever stands beside it; were all
    rows of a batch with one of them filtered so, all would be sent."""
    sent = []

    class Counted(ThreadParallel):
        def exchange_rows(self, x: Tensor) -> Tensor:
            sent.append(len(x))
            return super().exchange_rows(x)

    rows, logits = rows_of(9, kind=kind), logits_of(9)
    run_ranks(2, lambda parallel: sample(parallel, logits, rows), Counted)
    assert not sent
    one = replace(rows, **{name: value.clone() for name, value in vars(rows).items() if isinstance(value, Tensor)})
    one.temperature[4], one.top_k[4], one.top_p[4] = 1.0, 0, 0.8
    mixed = run_ranks(2, lambda parallel: sample(parallel, logits, one), Counted)[0]
    assert sent == [2, 2]  # a row and its padding, on each rank
    assert [int(token) for row, token in enumerate(mixed.tokens) if row != 4] == [
        int(token) for row, token in enumerate(sample(Single(), logits, rows).tokens) if row != 4
    ]
    everything = replace(one.special, filtered=tuple(range(9)))
    run_ranks(2, lambda it: drawn(Sampler(it, VOCAB, SOFTCAP, SUPPRESS, CPU), cut(logits, it), one, special=everything), Counted)
    assert sent[2:] == [10, 10]


def test_columns_behind_the_vocabulary_are_never_drawn() -> None:
    """Where the last rank has more columns than the vocabulary, -inf, tokens are those of the vocabulary alone; were the columns
    zero instead, they would be others."""
    rows, logits = rows_of(48), logits_of(48) / 6
    whole = sample(Single(), logits[:, :-11], rows, VOCAB - 11)

    def padded(value: float, vocabulary: int) -> list[Drawn]:
        filled = logits.clone()
        filled[:, -11:] = value
        return run_ranks(4, lambda parallel: sample(parallel, filled, rows, vocabulary))

    assert all(torch.equal(found.tokens, whole.tokens) for found in padded(-torch.inf, VOCAB - 11))
    assert not torch.equal(padded(0.0, VOCAB)[0].tokens, whole.tokens)


@pytest.mark.parametrize("size", [1, 4])
def test_greedy_takes_the_best_allowed_and_the_lowest_of_equals(size: int) -> None:
    """Greedy is the argmax of the uncapped logits, lowest id first, also where the tie lies on several ranks."""
    logits = torch.zeros(3, VOCAB)
    logits[0, [20, 40, 41]] = 5.0
    logits[1, [20, 40]] = torch.tensor([2000.0, 2001.0])  # the cap would make them equal
    logits[2, [7, 3, 60, 44]] = torch.tensor([9.0, 8.0, 7.0, 6.0])  # suppressed, may not stop, may not stop, allowed
    rows = replace(rows_of(3, kind="greedy"), logprobs=[None] * 3, forbidden=torch.tensor([[-1, -1], [-1, -1], [3, 60]]))
    for found in run_ranks(size, lambda parallel: sample(parallel, logits, rows)):
        assert found.tokens.tolist() == [20, 40, 44]
        assert not found.logprobs
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
    rows, logits = rows_of(16), logits_of(16)
    clean = sample(Single(), logits, rows)
    bad = [0, 5, 10, 15]  # greedy, plain, small top_k, other filters
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
    assert list(rows.special.reported) == [0, 1, 4, 5, 8, 9]
    exact, uncapped = (x.double().log_softmax(-1)[list(rows.special.reported)] for x in (capped(logits), logits))
    tokens, best = found.tokens[list(rows.special.reported)], exact.topk(3)
    off = 0.0
    for row, reported in enumerate(found.logprobs):
        assert abs(reported.chosen - exact[row, tokens[row]]) < 1e-5
        assert [token for token, _ in reported.top] == best.indices[row].tolist()
        assert max(abs(value - want) for (_, value), want in zip(reported.top, best.values[row].tolist(), strict=True)) < 1e-5
        off = max(off, abs(reported.chosen - uncapped[row, tokens[row]].item()))
    assert off > 1e-3


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


# ---- by kernels


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize("size", [1, 2, 4])
def interpreted_every_kind_is_the_reference(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, flags and logprobs of mixed rows, in a number that the ranks do not divide, equal plain torch's on every rank; with
    other filters they do not. A NaN on one rank silences its row."""
    one_at_a_time = threading.Lock()

    def guarded(*args: Any, **options: Any) -> None:
        with one_at_a_time:
            launch(*args, **options)

    for module in (kernels.choose, kernels.candidates, kernels.filters):
        monkeypatch.setattr(module, "launch", guarded)
    rows, logits = rows_of(17), logits_of(17) / 4
    clean = rows.tokens(capped(logits), SUPPRESS, logits)
    logits[5, 3] = torch.nan
    for found in run_ranks(size, lambda parallel: sample(parallel, logits, rows)):
        assert found.tokens.tolist() == [*clean[:5], 0, *clean[6:]]
        assert found.nan.nonzero().flatten().tolist() == [5]
    tight = replace(rows, top_k=rows.top_k.clamp(max=1))
    assert sample(Single(), logits, tight).tokens.tolist() != found.tokens.tolist()
