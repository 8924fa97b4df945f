"""Filtered rows over a vocabulary of 262 144 on a GPU: the sorting reference's tokens, in a graph."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import sample
from kernels.candidates import block_peaks, candidates, choose_candidates
from kernels.filters import filtered_tokens, scaled_rows
from kernels.sampling_batch import SamplingBatch, SlotParameters
from tests.bench.timing import microseconds
from tests.support.engine.choose_reference import choose, choose_filtered

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
VOCAB, SOFTCAP = 262_144, 30.0
FILTERS = {  # top_k, top_p, min_p
    "gemma": (64, 0.95, 0.0), "top_k": (500, 1.0, 0.0), "top_p": (0, 0.9, 0.0), "min_p": (0, 1.0, 0.05),
    "wide": (100_000, 0.99, 0.0),
}  # fmt: skip


def parameters_of(rows: int, top_k: int, top_p: float, min_p: float) -> SlotParameters:
    integers, floats = torch.zeros(rows, 3, dtype=torch.int64), torch.ones(rows, 3)
    integers[:, 0] = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(rows))
    integers[:, 1], floats[:, 1], floats[:, 2] = top_k, top_p, min_p
    return SlotParameters(integers.to(DEVICE), floats.to(DEVICE), torch.full((rows, 16), -1, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_the_references(name: str, spread: float) -> None:
    """Peaked and flat rows give the tokens of the sorting reference, in all rows but for rounding at a cut's edge; of flat rows,
    where filters leave much out, those without filters are others. Printed: microseconds in a graph."""
    for rows in (1, 25, 100):
        torch.manual_seed(rows)
        logits = torch.randn(rows, VOCAB, device=DEVICE) * spread
        slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        positions = torch.full_like(slots, 7)
        parameters = parameters_of(rows, *FILTERS[name])
        seeds, top_k, _ = parameters.integers.unbind(1)
        temperature, top_p, min_p = parameters.floats.unbind(1)
        capped = sample.cap(logits, SOFTCAP)
        plain = choose(capped, temperature, seeds, positions.long() + 1)
        chosen = torch.stack([plain, torch.zeros_like(plain)], 1).int()
        tokens = torch.zeros((rows, 9), dtype=torch.int32, device=DEVICE)
        batch = SamplingBatch(slots, positions, parameters, tokens, torch.zeros(0, dtype=torch.int32, device=DEVICE), SOFTCAP)

        def run(logits: Tensor = logits, batch: SamplingBatch = batch, chosen: Tensor = chosen) -> Tensor:
            return filtered_tokens(scaled_rows(logits[None], batch, 0, VOCAB), batch, chosen)

        found = run()
        want = choose_filtered(capped, temperature, seeds, positions.long() + 1, top_k, top_p, min_p)
        wrong = int((found != want).sum())
        cut = int((plain != want).sum())
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
        logits = torch.randn(rows, VOCAB, device=DEVICE) * 3
        slots, empty = torch.arange(rows, dtype=torch.int32, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE)
        parameters = parameters_of(rows, top_k, 0.95, 0.0)
        tokens, chosen = torch.zeros((rows, 9), dtype=torch.int32, device=DEVICE), torch.zeros_like(slots)[:, None].repeat(1, 2)
        batch = SamplingBatch(slots, torch.full_like(slots, 7), parameters, tokens, empty, SOFTCAP)
        slices = [part.contiguous() for part in logits.chunk(ranks, dim=1)]

        def best(rank: int, batch: SamplingBatch = batch, slices: Sequence[Tensor] = slices) -> Tensor:
            return candidates(slices[rank], block_peaks(slices[rank], batch), batch, rank * VOCAB // ranks)

        gathered = torch.cat([best(rank) for rank in range(ranks)], dim=1)

        def run(batch: SamplingBatch = batch, chosen: Tensor = chosen, gathered: Tensor = gathered) -> Tensor:
            choose_candidates(gathered, batch, chosen)
            return chosen[:, 0]

        found = run().clone()
        seeds, capped, ahead = parameters.integers[:, 0], sample.cap(logits, SOFTCAP), torch.full_like(slots, 8).long()
        one, none = torch.ones(rows, device=DEVICE), torch.zeros(rows, device=DEVICE)
        kept = torch.full_like(seeds, top_k)
        want = choose_filtered(capped, one, seeds, ahead, kept, 0.95 * one, none)
        wrong = int((found != want).sum())
        print(f"top_k {top_k}, {rows} rows of {ranks} ranks: {wrong} tokens other")
        assert wrong <= rows // 50
        if rows >= 100 and top_k > 1:
            for other in ((kept // 2, 0.95 * one), (kept, one)):
                assert int((found != choose_filtered(capped, one, seeds, ahead, *other, none)).sum()) > 3 * wrong + 1
