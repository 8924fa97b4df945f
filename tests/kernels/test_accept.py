"""Which drafts stand, against the rule read off token by token."""

import random

import pytest
import torch
from torch import Tensor

from kernels.accept import accept
from tests.support import interpreter

pytestmark = pytest.mark.cpu


def standing(sampled: list[int], drafts: list[int], stop: set[int]) -> int:
    """How many of the sampled tokens stand, one after the other."""
    for count, (token, draft) in enumerate(zip(sampled, drafts, strict=False), start=1):
        if token in stop or token != draft:
            return count
    return len(sampled)


def case(width: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows whose drafts often stand, some with fewer drafts, some of padding; slots of which some have stop ids."""
    rng = random.Random(seed)
    rows, slots = 24, 30
    sampled = torch.tensor([[rng.randrange(4) for _ in range(width + 1)] for _ in range(rows)], dtype=torch.int32)
    drafts = torch.where(torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.8, sampled[:, :-1], 9)
    for row in range(0, rows, 3):
        drafts[row, rng.randint(0, width) :] = -1
    stop = torch.full((slots, 200), -1, dtype=torch.int32)
    stop[::4, 150], stop[1::4, 3] = 2, 1
    positions = torch.where(torch.arange(rows) % 7 == 6, -1, 5).int()
    return sampled, drafts.int(), torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:rows].int(), positions, stop


def check(width: int) -> None:
    """Every row's count is the rule's; that of drafts compared one place off, or of rows without their stop ids, is not."""
    sampled, drafts, slots, positions, stop = case(width, width)
    stops = [{i for i in stop[slot].tolist() if i >= 0} for slot in slots.tolist()]
    rows = zip(sampled.tolist(), drafts.tolist(), stops, (positions >= 0).tolist(), strict=True)
    want = [standing(*row) * live for *row, live in rows]
    assert accept(sampled, drafts, slots, positions, stop).tolist() == want
    assert accept(sampled, drafts.roll(1, 1).contiguous(), slots, positions, stop).tolist() != want or width == 1
    assert accept(sampled, drafts, slots, positions, torch.full_like(stop, -1)).tolist() != want


@pytest.mark.parametrize("width", [1, 3, 7])
def test_the_longest_prefix_stands(width: int) -> None:
    """Up to the first stop id or the first miss, with fewer drafts, and none of a row of padding."""
    check(width)


def test_edges() -> None:
    """No draft stands, all stand, a stop id among them ends the row, and one at the end of it changes nothing."""
    sampled = torch.tensor([[7, 8, 9], [7, 8, 9], [7, 8, 9], [7, 8, 9]], dtype=torch.int32)
    drafts = torch.tensor([[6, 8], [7, 8], [7, 8], [7, 8]], dtype=torch.int32)
    stop = torch.tensor([[-1], [-1], [7], [9]], dtype=torch.int32)
    slots = torch.arange(4, dtype=torch.int32)
    assert accept(sampled, drafts, slots, slots, stop).tolist() == [1, 3, 1, 3]
    with pytest.raises(AssertionError):
        accept(sampled, drafts[:, :1].contiguous(), slots, slots, stop)


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


interpreted_the_longest_prefix_stands = test_the_longest_prefix_stands
interpreted_edges = test_edges
