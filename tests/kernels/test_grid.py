"""Sizes of grids and blocks."""

import pytest
import triton

from kernels.grid import cdiv, next_power_of_2

pytestmark = pytest.mark.cpu


def test_as_tritons() -> None:
    """They give what Triton's functions of these names give, but for the power of 2 from 0 on, where Triton's is 0."""
    numbers = [*range(1, 300), *(2**bits + by for bits in range(9, 31) for by in (-1, 0, 1))]
    assert all(next_power_of_2(n) == triton.next_power_of_2(n) for n in numbers)
    assert next_power_of_2(0) == 1
    assert all(cdiv(n, by) == triton.cdiv(n, by) for n in (0, *numbers[::3]) for by in (1, 2, 3, 32, 1024, 5376))
