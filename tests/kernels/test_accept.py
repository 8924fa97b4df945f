"""Which drafts stand, and where a drafter goes on, against the rule read off token by token."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.accept import DraftInputs, Verified, accept
from tests.support import interpreter

pytestmark = pytest.mark.cpu

ROWS, SLOTS, PADDING, DRAFTS, HIDDEN = 24, 30, 29, 3, 40


@dataclass
class Case:
    """Sequences of `width` rows, and tables of all slots."""

    rows: Verified
    stop: Tensor
    lengths: Tensor

    def accepted(self) -> tuple[list[int], DraftInputs, Tensor]:
        """How many stand; the drafter's rows, two more than sequences; lengths behind it."""
        count = len(self.rows.chosen) // self.rows.width + 2
        ids, slots, *positions = torch.full((3 + DRAFTS, count), 7, dtype=torch.int32)
        out, lengths = DraftInputs(ids, slots, torch.stack(positions), torch.zeros(count, HIDDEN)), self.lengths.clone()
        return accept(self.rows, self.stop, lengths, PADDING, out).tolist(), out, lengths


def standing(sampled: list[int], drafts: list[int], failed: list[int], stop: set[int]) -> int:
    """How many of the sampled tokens stand, one after the other."""
    for count, (token, draft, bad) in enumerate(zip(sampled, drafts, failed[1:], strict=False), start=1):
        if token in stop or token != draft or bad or failed[0]:
            return count
    return len(sampled)


def case(width: int, seed: int) -> Case:
    """Rows whose drafts often stand, some with fewer drafts, some without a token, some of padding; some slots have stop ids."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    chosen = torch.tensor([[rng.randrange(4), rng.random() < 0.05] for _ in range(ROWS * width)], dtype=torch.int32)
    begins = torch.tensor([rng.randrange(50) for _ in range(ROWS)])
    positions = begins[:, None] + torch.arange(width)
    sampled = chosen[:, 0].view(ROWS, width)
    ids = torch.where(torch.rand(ROWS, width, generator=generator) < 0.8, sampled.roll(1, 1), 9)
    for row in range(0, ROWS, 3):
        positions[row, rng.randint(1, width) :] = -1
    positions[::7] = -1
    slots = torch.randperm(SLOTS - 1, generator=generator)[:ROWS].repeat_interleave(width)
    stop = torch.full((SLOTS, 200), -1, dtype=torch.int32)
    stop[::2, 150], stop[1::2, 3] = 2, 1
    hidden = torch.randn(ROWS * width, HIDDEN, generator=generator)
    rows = Verified(chosen, ids.flatten().int(), slots.int(), positions.flatten().int(), hidden, width)
    return Case(rows, stop, torch.arange(SLOTS, dtype=torch.int32))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_longest_prefix_stands(width: int) -> None:
    """Up to the first stop id, miss or row without a token, with fewer drafts, and none of padding. The drafter goes on with the
    last token, where it is, from its row, and padding behind. Rows compared one place off, or without stop ids, differ."""
    it = case(width, width)
    rows, expected = it.rows, []
    for first in range(0, ROWS * width, width):
        mine = slice(first, first + width)
        drafts = torch.where(rows.positions[mine] >= 0, rows.ids[mine], -1).tolist()[1:]
        (sampled, failed), slot = rows.chosen[mine].T.tolist(), int(rows.slots[first])
        stops = {i for i in it.stop[slot].tolist() if i >= 0}
        expected.append(standing(sampled, drafts, failed, stops) if rows.positions[first] >= 0 else 0)
    found, out, lengths = it.accepted()
    assert found == [*expected, 0, 0]
    assert max(expected) == width
    for row, count in enumerate(expected):
        slot, last = int(rows.slots[row * width]), row * width + max(0, count - 1)
        assert out.slots[row] == slot
        assert lengths[slot] == slot + max(0, count - 1)
        at = int(rows.positions[row * width])
        assert out.positions[:, row].tolist() == [at + count - 1 + place if count else -1 for place in range(1 + DRAFTS)]
        if count:
            assert out.ids[row] == rows.chosen[last, 0]
            assert torch.equal(out.hidden[row], rows.hidden[last])
    assert out.slots[ROWS:].tolist() == [PADDING] * 2
    assert out.positions[:, ROWS:].tolist() == [[-1, -1]] * (1 + DRAFTS)
    assert out.ids[ROWS:].tolist() == [0, 0]
    if width > 1:
        shifted = rows._replace(ids=rows.ids.roll(1))
        assert replace(it, rows=shifted).accepted()[0] != found
        assert replace(it, stop=torch.full_like(it.stop, -1)).accepted()[0] != found


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


interpreted_the_longest_prefix_stands = test_the_longest_prefix_stands
