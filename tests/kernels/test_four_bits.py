"""Weights of four bits: words, and products in the interpreter against fp64 of the weights that the format's page describes."""

import pytest
import torch
from torch import Tensor

from kernels.four_bits import interleaved
from kernels.linear import GEGLU, NONE, _run
from kernels.packed import PackedMatrix, unpacked
from kernels.tiles import Tile
from tests.kernels.test_linear import product
from tests.support import interpreter
from tests.support.dtypes import both_dtypes
from tests.support.engine.quantised import in_words
from tests.support.judge.oracle import error

pytestmark = pytest.mark.cpu

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # weights, and the result, are rounded to bf16
TILES = [
    Tile("gemv", 2, 2, 128),
    Tile("gemm", 16, 32, 128, stages=2),
    Tile("gemm", 16, 16, 256, stages=2, swap=True),
    Tile("gemm", 32, 16, 128, stages=2, swap=True),
]


def case(m: int, n: int, group: int, zeros: bool, dtype: torch.dtype) -> tuple[PackedMatrix, Tensor]:
    """Random weights as kernels read them, and their values, fp64, from the format's formula alone."""
    generator = torch.Generator().manual_seed(m + group)
    nibbles = torch.randint(0, 16, (m, n), generator=generator)
    zero = torch.randint(0, 16, (m, n // group), generator=generator) if zeros else torch.full((m, n // group), 8)
    scale = ((torch.rand(m, n // group, generator=generator) + 0.5) / (5 * n**0.5)).to(dtype)
    values = (nibbles - zero.repeat_interleave(group, 1)).double() * scale.double().repeat_interleave(group, 1)
    packed = PackedMatrix(interleaved(in_words(nibbles)), scale, "int4", in_words(zero.T).T.contiguous() if zeros else None)
    return packed, values


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@both_dtypes
@pytest.mark.parametrize(("group", "zeros"), [(32, False), (64, True), (128, True)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def interpreted_products(tile: Tile, gated: bool, group: int, zeros: bool, dtype: torch.dtype) -> None:
    """Also where no tile divides the sizes; groups shifted by one, zero points left out and swapped halves show."""
    weight, values = case(48, 384, group, zeros, dtype)
    assert weight.scale is not None
    rows = 2 * tile.rows if tile.kind == "gemv" else tile.rows - 3
    x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = _run(tile, x, weight, x.new_empty(len(x), 48 // (1 + gated)), GEGLU if gated else NONE)
    faults = [weight._replace(scale=weight.scale.roll(1, 1)), weight._replace(values=weight.values.roll(1, 1))]
    faults += [weight._replace(zero=None)] if zeros else []
    cancelled = 10 if tile.kind == "gemv" else 1  # what it takes from a sum is thirty times what is left
    assert error(out, product(x, values, gated)) < cancelled * TOLERANCE[dtype]
    for fault in faults:
        assert error(out, product(x, unpacked(fault), gated)) > 4 * TOLERANCE[dtype]
    if gated:
        assert error(out, product(x, values.roll(24, 0), gated)) > 4 * TOLERANCE[dtype]


@both_dtypes
@pytest.mark.parametrize(("group", "zeros"), [(32, False), (128, True)])
def test_values_are_the_formulas(group: int, zeros: bool, dtype: torch.dtype) -> None:
    weight, values = case(16, 256, group, zeros, dtype)
    assert torch.equal(unpacked(weight), values.to(dtype))
