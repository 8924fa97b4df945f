"""Attention within pictures of many sizes and the rotary embedding by two axes: the kernels against plain torch."""

import pytest
import torch
from torch import Tensor

from kernels import ragged_attention
from kernels.axial_rope import axial_tables, head_norm, norm_axial_rope
from kernels.launch import plain_torch
from kernels.norm import rms_norm
from kernels.qkv import inverse_frequencies
from tests.support import interpreter

pytestmark = pytest.mark.cpu

SIZES = (9, 1, 40, 18)  # rows of each picture
TOLERANCE = 2e-6  # fp32
FAULT = 100 * TOLERANCE


def heads(d: int, count: int = 3) -> list[Tensor]:
    """q, k, v, or as many."""
    generator = torch.Generator().manual_seed(d)
    return [torch.randn(sum(SIZES), 2, d, generator=generator) * d**-0.25 for _ in range(count)]


def starts(sizes: tuple[int, ...] = SIZES) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).int()


def interpreted_attention() -> None:
    """Heads of 64 and of 72; planted fault: the first picture sees a row of the second."""
    for d in (64, 72):
        q, k, v = heads(d)
        with plain_torch():
            right = ragged_attention.ragged_attention(q, k, v, starts(), max(SIZES))
        found = ragged_attention.ragged_attention(q, k, v, starts(), max(SIZES))
        assert (found - right).abs().max() < TOLERANCE, d
        shifted = ragged_attention.ragged_attention(q, k, v, starts((10, 0, 40, 18)), max(SIZES))
        assert (shifted - right).abs().max() > FAULT


def interpreted_rope() -> None:
    """Heads of 64 and of 72; planted fault: x and y swapped."""
    for d in (64, 72):
        (q,), weight = heads(d, 1), torch.rand(d) + 0.5
        x, y = torch.arange(sum(SIZES)), torch.arange(sum(SIZES)) * 7 % 50
        frequencies = inverse_frequencies(100.0, d // 4, d // 2)
        tables = axial_tables(x, y, frequencies)
        with plain_torch():
            right = norm_axial_rope(q, weight, *tables, 1e-6)
        assert (norm_axial_rope(q, weight, *tables, 1e-6) - right).abs().max() < TOLERANCE, d
        assert (norm_axial_rope(q, weight, *axial_tables(y, x, frequencies), 1e-6) - right).abs().max() > FAULT
        assert (head_norm(q, 1e-6) - rms_norm(q, None, 1e-6)).abs().max() < TOLERANCE


def test_under_the_interpreter() -> None:
    """Both kernels give what plain torch gives, and faults are seen."""
    interpreter.run(__file__)
