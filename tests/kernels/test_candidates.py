"""Candidates of rows with a small top_k give the sorting reference's tokens over whole logits, whatever the cut and the ties."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import sample
from kernels.candidates import block_peaks, candidates, choose_candidates
from kernels.choose import ROW_HAS_NAN
from kernels.launch import plain_torch
from kernels.sampling_batch import SMALL_TOP_K, SamplingBatch
from tests.support import interpreter
from tests.support.engine.sampled_rows import SampledRows

pytestmark = pytest.mark.cpu

VOCAB, SOFTCAP = 12_000, 30.0
FILTERS = (  # top_k, top_p, min_p
    (64, 0.95, 0.0), (1, 1.0, 0.0), (SMALL_TOP_K, 1.0, 0.0), (SMALL_TOP_K, 0.5, 0.0), (20, 0.8, 0.1), (100, 1e-9, 0.0),
    (7, 1.0, 0.9), (50, 0.999, 1e-3),
)  # fmt: skip
TIED = 3  # a row of few distinct values: more equal ones than anybody sends


def rows_of(seed: int) -> tuple[Tensor, SampledRows]:
    """Whole logits [10, VOCAB] and how rows sample: one a filter, one that is greedy, one that draws from everything."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(10, VOCAB, generator=generator) * 3
    logits[TIED] = logits[TIED].round()
    logits[0, 100:200] = -torch.inf
    logits[5, torch.randperm(VOCAB, generator=generator)[50:]] = -torch.inf  # fewer than candidates
    top_k, top_p, min_p = zip(*FILTERS, (5, 1.0, 0.0), (0, 1.0, 0.0), strict=True)
    temperature = torch.rand(10, generator=generator) + 0.5
    temperature[8] = 0.0
    return logits, SampledRows(
        positions=torch.randint(1, 80, (10,), generator=generator),
        seeds=torch.randint(-(2**62), 2**62, (10,), generator=generator),
        temperature=temperature,
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        forbidden=torch.full((10, 1), -1),
        logprobs=[None] * 10,
    )


def drawn(logits: Tensor, rows: SampledRows, ranks: int, nan: int | None = None) -> list[int]:
    """Tokens of the rows with a small top_k; the others keep theirs, 77, and so does the one with a NaN."""
    slots = torch.arange(10, dtype=torch.int32).flip(0)
    parameters = rows.at(range(9, -1, -1)).parameters  # row i in slot 9 - i
    tokens, chosen = torch.zeros(10, 100, dtype=torch.int32), torch.tensor([[77, 0]] * 10, dtype=torch.int32)
    batch = SamplingBatch(slots, rows.positions.int() - 1, parameters, tokens, slots[:0], SOFTCAP)
    if nan is not None:
        chosen[nan, 1] = ROW_HAS_NAN
    found, share = [], -(-VOCAB // ranks)
    for rank in range(ranks):
        mine = torch.full((10, share), -torch.inf)
        own = logits[:, rank * share : (rank + 1) * share]
        mine[:, : own.shape[1]] = own
        found.append(candidates(mine, block_peaks(mine, batch), batch, rank * share))
        with plain_torch():
            assert torch.equal(found[-1][[2, TIED], :, 1], candidates(mine, mine, batch, rank * share)[[2, TIED], :, 1])
    choose_candidates(torch.cat(found, dim=1), batch, chosen)
    for row in set(range(8)) - {nan}:
        assert tokens[slots[row], rows.positions[row]] == chosen[row, 0]
    return chosen[:, 0].tolist()


def wanted(logits: Tensor, rows: SampledRows) -> list[int]:
    return [*rows.tokens(sample.cap(logits, SOFTCAP).masked_fill(logits.isneginf(), -torch.inf))[:8], 77, 77]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_reference_gives_the_tokens_of_whole_logits(ranks: int) -> None:
    """Plain torch's candidates of every rank hold what the filters keep, ties and slices with few ids included."""
    for seed in range(4):
        logits, rows = rows_of(seed)
        assert drawn(logits, rows, ranks) == wanted(logits, rows)


def test_faults_are_seen() -> None:
    """Planted faults: other filters, another position, or a rank's logits one id on, give other tokens."""
    logits, rows = rows_of(1)
    right = wanted(logits, rows)
    for wrong in (replace(rows, top_k=rows.top_k.clamp(max=2)), replace(rows, positions=rows.positions + 1)):
        assert drawn(logits, wrong, 2) != right
    assert drawn(logits.roll(1, 1), rows, 2) != right


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize(("ranks", "nan"), [(1, 7), (3, 6)])
def interpreted_tokens_are_the_references(ranks: int, nan: int) -> None:
    """Kernels give the tokens of whole logits too; a row that is flagged keeps its own, and would have had another."""
    logits, rows = rows_of(ranks)
    right = wanted(logits, rows)
    assert right[nan] != 77
    assert drawn(logits, rows, ranks, nan) == [*right[:nan], 77, *right[nan + 1 :]]


def interpreted_small_slices() -> None:
    """Where a slice has fewer ids, or blocks, than candidates, all are sent, and nothing behind them comes."""
    logits, rows = rows_of(3)
    few = torch.full_like(logits, -torch.inf)
    few[:, : SMALL_TOP_K - 9] = logits[:, : SMALL_TOP_K - 9]
    few[5, 0] = 0.0
    parameters, slots = rows.parameters, torch.arange(10, dtype=torch.int32)
    for n in (SMALL_TOP_K - 9, 4 * 64 + 5):
        chosen, tokens = torch.tensor([[77, 0]] * 10, dtype=torch.int32), torch.zeros(10, 100, dtype=torch.int32)
        batch = SamplingBatch(slots, rows.positions.int() - 1, parameters, tokens, slots[:0], SOFTCAP)
        mine = few[:, :n].contiguous()
        best = candidates(mine, block_peaks(mine, batch), batch, 0)
        choose_candidates(best, batch, chosen)
        assert chosen[:, 0].tolist() == wanted(few, rows)
