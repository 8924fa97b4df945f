"""Contiguous rows of page ids and lengths, against what a loop over positions says."""

import pytest
import torch

from kernels.slots import gather_pages
from tests.support import interpreter

pytestmark = pytest.mark.cpu

PAGE = 16
STALE = 77


@pytest.mark.parametrize("window", [None, 1, 40, 48, 1000])
def test_rows(window: int | None) -> None:
    """Each row names the pages that its query sees and nothing behind them, whatever lay there; a padding row has one null key."""
    table = torch.arange(3 * 12, dtype=torch.int32).view(3, 12) + 100
    slots = torch.tensor([2, 0, 1, 1, 2], dtype=torch.int32)
    positions = torch.tensor([190, 0, -1, 15, 16], dtype=torch.int32)
    tables, lengths = torch.full((5, 20), STALE, dtype=torch.int32), torch.full((5,), STALE, dtype=torch.int32)
    gather_pages(table, slots, positions, PAGE, window, tables, lengths)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        first = 0 if window is None else max(0, position - window + 1) // PAGE
        pages = table[slot, first : position // PAGE + 1].tolist() if position >= 0 else []
        assert tables[row].tolist() == pages + [0] * (20 - len(pages))
        assert lengths[row] == (position + 1 - first * PAGE if position >= 0 else 1)


def test_a_sliced_or_wide_table_is_refused() -> None:
    """A row stride that is not the width fails."""
    table, slots = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    wide, lengths = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(AssertionError):
        gather_pages(table, slots, slots, PAGE, None, wide[:, :8], lengths)


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


interpreted_rows = test_rows
