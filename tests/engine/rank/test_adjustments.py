"""Adjusted logits over a cut vocabulary: what is sampled must not depend on the cut, and no adjustment outlives its row or step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.geometry import vocab_share
from engine.rank.adjustments import Adjustments
from engine.rank.parallel import Single
from engine.rank.sampler import Sampled, Sampler, SamplingRows
from kernels.adjust import PLAN_STEP
from kernels.sampling_batch import SlotParameters
from tests.support.engine.threads import ThreadParallel, run_ranks

pytestmark = pytest.mark.cpu

VOCAB, SLOTS, ROWS = 200, 9, 9
SOFTCAP = 30.0
STEP = 2**31 + 5  # a header's low word reads as negative from 2^31 on
CPU = torch.device("cpu")
Group = ThreadParallel | Single


def rows_of(seed: int) -> SamplingRows:
    """Greedy, plain and filtered rows in turn, all with logprobs."""
    generator = torch.Generator().manual_seed(seed)
    kinds = [list(range(first, ROWS, 3)) for first in range(3)]
    return SamplingRows(
        positions=torch.randint(1, 50, (ROWS,), generator=generator),
        seeds=torch.randint(-(2**62), 2**62, (ROWS,), generator=generator),
        temperature=torch.rand(ROWS, generator=generator) + 0.5,
        top_k=torch.full((ROWS,), 20),
        top_p=torch.full((ROWS,), 0.95),
        min_p=torch.zeros(ROWS),
        forbidden=torch.full((ROWS, 1), -1),
        greedy=kinds[0],
        plain=kinds[1],
        filtered=kinds[2],
        logprobs=[2] * ROWS,
    )


def logits_of(seed: int) -> Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def slices(logits: Tensor, parallel: Group) -> tuple[Tensor, range]:
    """A rank's own logits, -inf behind the vocabulary's end, and their ids."""
    share = vocab_share(VOCAB, parallel.size)
    padded = torch.nn.functional.pad(logits, (0, share * parallel.size - VOCAB), value=-torch.inf)
    ids = range(parallel.rank * share, (parallel.rank + 1) * share)
    return padded[:, ids.start : ids.stop].contiguous(), ids


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool [n, vocabulary] -> int32 [n, ceil(vocabulary / 32)]."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def plan_of(step: int) -> Tensor:
    plan = torch.zeros(16, dtype=torch.int32)
    plan[PLAN_STEP] = torch.tensor(step).int()
    return plan


def masked_sample(parallel: Group, seed: int, slots: np.ndarray, bits: np.ndarray, step: int = STEP) -> Sampled:
    """Rows of slots 8, 7 .. 0, of which `slots` have masks for STEP, sampled in `step`."""
    mine, ids = slices(logits_of(seed), parallel)
    adjustments = Adjustments(SLOTS, ids, CPU)
    adjustments.set_masks(STEP, slots, bits)
    sampler = Sampler(parallel, VOCAB, SOFTCAP, (), CPU)
    parameters = SlotParameters(torch.zeros(SLOTS, 3, dtype=torch.int64), torch.zeros(SLOTS, 3), torch.zeros(SLOTS, 1).int())
    index = torch.arange(SLOTS - 1, -1, -1, dtype=torch.int32)
    batch = sampler.batch(index, index, parameters, torch.zeros(SLOTS, 100, dtype=torch.int32))
    return sampler.sample(mine, rows_of(seed), replace(batch, adjustments=adjustments.tables, plan=plan_of(step)))


def masks_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots 2 .. 7, in disorder, and which ids each allows: a few."""
    generator = np.random.default_rng(seed)
    return generator.permutation(np.arange(2, 8)).astype(np.int32), generator.random((6, VOCAB)) < 0.1


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_masked_rows_keep_to_their_masks(size: int) -> None:
    """At TP 1 to 4, whose slices begin and end within words or beyond the vocabulary, masked rows of all kinds give what logits
    that are -inf elsewhere give, on every rank; the others what they give alone; logprobs are of the logits before the mask."""
    for seed in range(3):
        slots, allowed = masks_of(seed)
        rows = SLOTS - 1 - slots
        logits = torch.tanh(logits_of(seed) / SOFTCAP) * SOFTCAP
        logits[torch.from_numpy(rows)] = logits[torch.from_numpy(rows)].masked_fill(~torch.from_numpy(allowed), -torch.inf)
        want = Sampler(Single(), VOCAB, None, (), CPU).sample(logits, rows_of(seed))
        alone = Sampler(Single(), VOCAB, SOFTCAP, (), CPU).sample(logits_of(seed), rows_of(seed))
        bits = packed(allowed)
        for found in run_ranks(size, lambda parallel: masked_sample(parallel, seed, slots, bits)):  # noqa: B023 (run at once)
            assert found.tokens.tolist() == want.tokens.tolist()
            others = np.setdiff1d(np.arange(ROWS), rows)
            assert torch.equal(found.tokens[others], alone.tokens[others])
            assert found.logprobs is not None
            assert alone.logprobs is not None
            assert torch.equal(found.logprobs.values, alone.logprobs.values)
        assert want.tokens.tolist() != alone.tokens.tolist()


def test_a_mask_is_for_one_step() -> None:
    """In any other step than its own a mask is as if there were none; a mask set later takes its place."""
    slots, allowed = masks_of(0)
    bits = packed(allowed)
    alone = Sampler(Single(), VOCAB, SOFTCAP, (), CPU).sample(logits_of(0), rows_of(0))
    assert masked_sample(Single(), 0, slots, bits).tokens.tolist() != alone.tokens.tolist()
    for step in (STEP - 1, STEP + 1, 5):
        assert masked_sample(Single(), 0, slots, bits, step).tokens.tolist() == alone.tokens.tolist()
    adjustments = Adjustments(SLOTS, range(VOCAB), CPU)
    adjustments.set_masks(3, slots, bits)
    adjustments.set_masks(4, slots[:2], bits[2:4])
    asked = np.arange(SLOTS)
    assert [slot for slot, on in enumerate(adjustments.of(asked, 3)) if on] == sorted(slots[2:].tolist())
    assert [slot for slot, on in enumerate(adjustments.of(asked, 4)) if on] == sorted(slots[:2].tolist())
    assert not any(adjustments.of(asked, 5))


def test_masks_of_other_slots_or_words_are_seen() -> None:
    """Planted faults: masks given to each other's slots, or read a word, or a bit, further on, give other tokens."""
    slots, allowed = masks_of(0)
    tokens = masked_sample(Single(), 0, slots, packed(allowed)).tokens.tolist()
    for wrong in (np.roll(allowed, 1, axis=0), np.roll(allowed, 32, axis=1), np.roll(allowed, 1, axis=1)):
        assert masked_sample(Single(), 0, slots, packed(wrong)).tokens.tolist() != tokens


def test_a_masked_nan_is_a_nan() -> None:
    """A NaN where the mask has no bit silences its row."""
    slots, allowed = masks_of(0)
    logits = logits_of(0)
    logits[SLOTS - 1 - slots[0], int(np.flatnonzero(~allowed[0])[0])] = torch.nan
    assert _nan_rows(logits, slots, packed(allowed)) == [SLOTS - 1 - slots[0]]


def _nan_rows(logits: Tensor, slots: np.ndarray, bits: np.ndarray) -> list[int]:
    adjustments = Adjustments(SLOTS, range(VOCAB), CPU)
    adjustments.set_masks(STEP, slots, bits)
    sampler = Sampler(Single(), VOCAB, SOFTCAP, (), CPU)
    parameters = SlotParameters(torch.zeros(SLOTS, 3, dtype=torch.int64), torch.zeros(SLOTS, 3), torch.zeros(SLOTS, 1).int())
    index = torch.arange(SLOTS - 1, -1, -1, dtype=torch.int32)
    batch = sampler.batch(index, index, parameters, torch.zeros(SLOTS, 100, dtype=torch.int32))
    found = sampler.sample(logits, rows_of(0), replace(batch, adjustments=adjustments.tables, plan=plan_of(STEP)))
    return [int(row) for row in found.nan.nonzero()]
