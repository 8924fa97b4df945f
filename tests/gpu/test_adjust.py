"""Adjusted logits on a GPU: the reference's values over a quarter of 262 144 ids, and masks of a step while another samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.plan import Admission
from engine.protocol import SamplingParams
from engine.rank.adjustments import Adjustments
from kernels.adjust import adjust
from kernels.choose import parts_of
from kernels.launch import plain_torch, processors
from kernels.sampling_batch import SamplingBatch, SlotParameters
from tests.support.engine.adjusted_logits import error, random_sequence

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
VOCAB, SHARE, FIRST, SOFTCAP = 262_144, 65_536, 131_072, 30.0
TOLERANCE = 1e-4  # of fp32 logits up to 100
STEP = 7


def case(rows: int, *, adjusted: bool = True) -> tuple[Tensor, SamplingBatch, Adjustments]:
    """Logits, and rows of random adjustments, most of them masked too."""
    generator = np.random.default_rng(rows)
    sequences = [random_sequence(generator, VOCAB, ids=40) for _ in range(rows)]
    adjustments = Adjustments(rows, range(FIRST, FIRST + SHARE), DEVICE)
    tokens = torch.zeros(rows, 64, dtype=torch.int32)
    for slot, sequence in enumerate(sequences):
        here = generator.integers(FIRST, FIRST + SHARE, 4).tolist()  # inputs of the steps to come
        tokens[slot, : len(sequence.tokens) + 4] = torch.tensor([*sequence.tokens, *here])
    if adjusted:
        params = [SamplingParams(max_tokens=1, adjustments=sequence.wanted) for sequence in sequences]
        adjustments.admit([Admission(at, 1, it.tokens, it.prompt, params[at]) for at, it in enumerate(sequences)])
        bits = generator.integers(-(2**31), 2**31, (rows, VOCAB // 32)).astype(np.int32)
        adjustments.set_masks(STEP, np.arange(0, rows, 2, dtype=np.int32), bits[::2])
    plan = torch.full((16,), STEP, dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([len(sequence.tokens) - 1 for sequence in sequences], dtype=torch.int32, device=DEVICE)
    parameters = SlotParameters(
        torch.zeros(rows, 3, dtype=torch.int64, device=DEVICE), torch.ones(rows, 3, device=DEVICE),
        torch.full((rows, 1), -1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    batch = SamplingBatch(slots, positions, parameters, tokens.to(DEVICE), slots[:0], SOFTCAP, adjustments.tables, plan)
    return torch.randn(rows, SHARE, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 8, batch, adjustments


@pytest.mark.parametrize("rows", [1, 32, 100])
def test_values_are_the_references(rows: int) -> None:
    """The kernel's logits and counts are plain torch's, also where inputs are counted; with the counts of the step before they are
    not."""
    logits, batch, adjustments = case(rows)
    parts = parts_of(SHARE, rows, processors(DEVICE))
    for step in range(3):
        batch = replace(batch, positions=batch.positions + (step > 0))
        counts = adjustments.tables.counts.clone()
        found, want, late = logits.clone(), logits.clone(), logits.clone()
        adjust(found, batch, FIRST, parts)
        after = adjustments.tables.counts.clone()
        adjustments.tables.counts.copy_(counts)
        with plain_torch():
            adjust(want, batch, FIRST)
            assert torch.equal(adjustments.tables.counts, after)
            adjustments.tables.counts.copy_(counts)
            adjust(late, replace(batch, positions=batch.positions - 1), FIRST)
        adjustments.tables.counts.copy_(after)
        assert error(found, want) < TOLERANCE
        assert error(late, want) > 100 * TOLERANCE or rows < 32


@pytest.mark.parametrize("early", [False, True])
def test_masks_go_up_behind_the_step_before(early: bool) -> None:
    """While the device still has a step to sample, the masks of the next one are set: both steps get their own. Sent up beside what
    was before that step, as a planted fault does, they replace masks that it has not read."""
    logits, batch, adjustments = case(4, adjusted=False)
    bits = np.zeros((2, 4, VOCAB // 32), np.int32)
    bits[0, :, FIRST // 32 :], bits[1, :, FIRST // 32 + 7 :] = 1, 2
    slots, found = np.arange(4, dtype=np.int32), []
    plans = [torch.full((16,), step, dtype=torch.int32, device=DEVICE) for step in (STEP, STEP + 1)]
    ended = torch.cuda.Event()
    ended.record()
    torch.cuda.synchronize()
    for step, plan in enumerate(plans, STEP):
        adjustments.set_masks(step, slots, bits[step - STEP], after=ended)
        torch.cuda._sleep(100_000_000)
        found.append(logits.clone())
        adjust(found[-1], replace(batch, plan=plan), FIRST, 16)
        if not early:
            ended.record()
    allowed = [(~each.isneginf()).nonzero()[:, 1].unique().tolist() for each in found]
    want = [list(range(0, SHARE, 32)), list(range(7 * 32 + 1, SHARE, 32))]
    assert (allowed == want) is not early
