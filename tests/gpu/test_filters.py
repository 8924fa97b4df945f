"""Filtered rows over a vocabulary of 262 144 on a GPU: the sorting reference's tokens, in a graph."""

import pytest
import torch
from torch import Tensor

from kernels import sample
from kernels.candidates import block_peaks, candidates, choose_candidates
from kernels.filters import filtered_tokens, scaled_rows
from kernels.sampling_batch import SamplingBatch, SlotParameters
from tests.bench.timing import microseconds
from tests.support.engine.choose_reference import choose_filtered

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
VOCAB, SOFTCAP = 262_144, 30.0
FILTERS = {  # top_k, top_p, min_p
    "gemma": (64, 0.95, 0.0), "top_k": (500, 1.0, 0.0), "top_p": (0, 0.9, 0.0), "min_p": (0, 1.0, 0.05),
    "wide": (100_000, 0.99, 0.0),
}  # fmt: skip


def batch_of(rows: int, top_k: int, top_p: float, min_p: float) -> SamplingBatch:
    """Rows that sample so, a slot each."""
    integers, floats = torch.zeros(rows, 3, dtype=torch.int64), torch.ones(rows, 3)
    integers[:, 0] = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(rows))
    integers[:, 1], floats[:, 1], floats[:, 2] = top_k, top_p, min_p
    stop = torch.full((rows, 16), -1, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    tokens = torch.zeros((rows, 9), dtype=torch.int32, device=DEVICE)
    parameters = SlotParameters(integers.to(DEVICE), floats.to(DEVICE), stop)
    return SamplingBatch(slots, torch.full_like(slots, 7), parameters, tokens, slots[:0], SOFTCAP)


def sorted_out(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Tokens of the sorting reference."""
    (seeds, top_k, _), (temperature, top_p, min_p) = batch.parameters.integers.unbind(1), batch.parameters.floats.unbind(1)
    return choose_filtered(sample.cap(logits, SOFTCAP), temperature, seeds, batch.positions.long() + 1, top_k, top_p, min_p)


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_the_references(name: str, spread: float) -> None:
    """Peaked and flat rows give the tokens of the sorting reference, in all rows but for rounding at a cut's edge; of flat rows,
    where filters leave much out, those without filters are others. Printed: microseconds in a graph."""
    for rows in (1, 25, 100):
        torch.manual_seed(rows)
        logits, batch = torch.randn(rows, VOCAB, device=DEVICE) * spread, batch_of(rows, *FILTERS[name])
        plain = sorted_out(logits, batch_of(rows, 0, 1.0, 0.0))
        chosen = torch.stack([plain, torch.zeros_like(plain)], 1).int()

        def run(logits: Tensor = logits, batch: SamplingBatch = batch, chosen: Tensor = chosen) -> Tensor:
            return filtered_tokens(scaled_rows(logits[None], batch, 0, VOCAB), batch, chosen)

        found = run()
        expected = sorted_out(logits, batch)
        wrong, cut = int((found != expected).sum()), int((plain != expected).sum())
        captured: list[Tensor] = []
        us = microseconds(lambda run=run, captured=captured: captured.append(run()), DEVICE)  # type: ignore[misc]
        assert torch.equal(captured[-1], found)
        print(f"{name}, {rows} rows, spread {spread}: {us:.0f} us; {cut} rows cut, {wrong} tokens other")
        assert wrong <= rows // 50
        assert cut > 2 * wrong or rows < 100 or spread > 1


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("top_k", [1, 64, 128])
def test_candidates_hold_what_a_small_top_k_keeps(top_k: int, ranks: int) -> None:
    """Tokens of the default request, and of the least and the largest small top_k, are those of the sorting reference; with half
    the k, or without top_p, some are others."""
    for rows in (1, 100, 256):
        torch.manual_seed(rows)
        logits, batch = torch.randn(rows, VOCAB, device=DEVICE) * 3, batch_of(rows, top_k, 0.95, 0.0)
        best = []
        for rank, part in enumerate(logits.chunk(ranks, dim=1)):
            mine = part.contiguous()
            best.append(candidates(mine, block_peaks(mine, batch), batch, rank * VOCAB // ranks))
        chosen = torch.zeros((rows, 2), dtype=torch.int32, device=DEVICE)
        choose_candidates(torch.cat(best, dim=1), batch, chosen)
        wrong = int((chosen[:, 0] != sorted_out(logits, batch)).sum())
        print(f"top_k {top_k}, {rows} rows of {ranks} ranks: {wrong} tokens other")
        assert wrong <= rows // 50
        if rows >= 100 and top_k > 1:
            for other in ((top_k // 2, 0.95), (top_k, 1.0)):
                assert int((chosen[:, 0] != sorted_out(logits, batch_of(rows, *other, 0.0))).sum()) > 3 * wrong + 1
