"""Adjusted logits of slots with several rows: as if their drafts had come one by one, and counted once they stand.

The oracle is `adjust` with one row a slot, step by step; its formulas are held by tests.engine.rank.test_adjustments.
"""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.adjust import IN_PROMPT, MOST_COUNTED, adjust, count_accepted
from kernels.sampling_batch import BAD_WORDS, BIASED, PENALIZED, SamplingBatch, SlotAdjustments, SlotParameters
from tests.support import interpreter

pytestmark = pytest.mark.cpu

SLOTS, IDS, FIRST, WORDS = 5, 96, 32, 4
STEP, START = 7, 6  # of the step; generated tokens begin there


@dataclass
class Drafted:
    """Slots 1, 3, 0 with drafts behind their inputs, and a row of padding; a few ids, so that drafts repeat."""

    width: int

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.width + 1)
        self.slots = torch.tensor([1, 3, 0, 4], dtype=torch.int32)
        self.positions = torch.tensor([START + 4, START, START + 9, -1], dtype=torch.int32)
        self.history = torch.randint(31, 38, (SLOTS, 40), generator=draw, dtype=torch.int32)
        self.history[3, START + 1 : START + 40 : 2] = 36  # a rejected draft that would count
        counts = torch.zeros(SLOTS, IDS, dtype=torch.int16)
        counts[:, 1], counts[:, 3], counts[:, 5] = MOST_COUNTED - 1, -IN_PROMPT, 2 - IN_PROMPT
        flags = torch.tensor([PENALIZED, PENALIZED | BAD_WORDS | BIASED, 0, PENALIZED, 0], dtype=torch.int32)
        starts = torch.tensor([[START, START + 11], [START, START], [0, 0], [START, START], [0, 0]], dtype=torch.int32)
        bias_ids = torch.full((SLOTS, 2), -1, dtype=torch.int32)
        bias_ids[1, 0] = 34
        words, ends = torch.zeros(SLOTS, 4, dtype=torch.int32), torch.zeros(SLOTS, 2, dtype=torch.int32)
        words[1], ends[1] = torch.tensor([33, 35, 40, 0]), torch.tensor([2, 3])
        masks = torch.randint(-(2**31), 2**31 - 1, (16, WORDS), generator=draw, dtype=torch.int64).int()
        mask_rows = torch.full((SLOTS, 2), -1, dtype=torch.int32)
        mask_rows[3] = torch.tensor([STEP, 2])
        self.tables = SlotAdjustments(
            flags, bias_ids, torch.full((SLOTS, 2), 3.0), torch.tensor([[1.3, 0.5, 0.7]]).repeat(SLOTS, 1), counts, starts,
            torch.zeros(SLOTS, WORDS, dtype=torch.int32), words, ends, masks, mask_rows,
        )  # fmt: skip
        self.logits = torch.randn(4 * self.width, IDS, generator=draw) * 4

    def batch(self, slots: Tensor, positions: Tensor, width: int = 1, tables: SlotAdjustments | None = None) -> SamplingBatch:
        parameters = SlotParameters(torch.zeros(SLOTS, 3, dtype=torch.int64), torch.ones(SLOTS, 3), torch.full((SLOTS, 1), -1))
        plan = torch.zeros(16, dtype=torch.int32)
        plan[2] = STEP
        batch = SamplingBatch(slots, positions, parameters, self.history, torch.zeros(0, dtype=torch.int32), 30.0)
        return replace(batch, adjustments=tables or self.tables, plan=plan, step=2, width=width)

    def together(self) -> Tensor:
        """Logits of all rows in one launch."""
        steps = torch.arange(self.width, dtype=torch.int32)
        positions = torch.where(self.positions[:, None] < 0, -1, self.positions[:, None] + steps)
        logits = self.logits.clone()
        adjust(logits, self.batch(self.slots.repeat_interleave(self.width), positions.flatten().int(), self.width), FIRST, 2)
        return logits

    def one_by_one(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of a launch after the other; and the counts behind so many of them of each slot."""
        logits, tables = self.logits.view(4, self.width, IDS).clone(), copy.deepcopy(self.tables)
        counts = self.tables.counts.clone()
        for step in range(self.width):
            for row, count in enumerate(accepted.tolist()):
                if count == step:
                    counts[self.slots[row]] = tables.counts[self.slots[row]]
            mine = logits[:, step].contiguous()
            adjust(mine, self.batch(self.slots, torch.where(self.positions < 0, -1, self.positions + step).int(), 1, tables), FIRST)
            logits[:, step] = mine
            tables.mask_rows[3, 1] += 1
        for row, count in enumerate(accepted.tolist()):
            if count == self.width:
                counts[self.slots[row]] = tables.counts[self.slots[row]]
        return logits.flatten(0, 1), counts

    def count(self, accepted: Tensor) -> Tensor:
        """Counts behind the accepted inputs."""
        tables = copy.deepcopy(self.tables)
        begins = zip(self.slots, self.positions.clamp(min=0), strict=True)
        inputs = torch.stack([self.history[slot, at : at + self.width] for slot, at in begins])
        count_accepted(tables, self.slots, self.positions, inputs, accepted, FIRST)
        return tables.counts


def check(width: int) -> None:
    """All rows at once have the logits, and accepted inputs leave the counts, of one row after the other."""
    it = Drafted(width)
    before = it.tables.counts.clone()
    accepted = torch.tensor([width, width // 2, min(3, width), 0], dtype=torch.int32)
    want, counts = it.one_by_one(accepted)
    found = it.together()
    assert torch.equal(it.tables.counts, before), "a draft was stored"
    assert torch.allclose(found, want, rtol=0, atol=1e-5)
    assert torch.equal(it.count(accepted), counts)
    assert not torch.equal(it.count(accepted.clamp(max=1)), counts), "accepted drafts are not counted"
    assert not torch.equal(it.count(torch.full_like(accepted, width)), counts), "rejected drafts are counted"
    it.tables.starts[:, 1] = 1 << 20  # no input is counted
    assert not torch.allclose(it.together(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [2, 5, 8])
def test_drafts_adjust_as_if_accepted_and_count_once(width: int) -> None:
    """Repeated drafts, a count at its bound, inputs that were counted at admission, a mask of each row, and bad words."""
    check(width)


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize("width", [2, 8])
def interpreted_drafts_adjust_as_if_accepted_and_count_once(width: int) -> None:
    """The kernels' too."""
    check(width)
