"""W8A8 folders in int8: products by their formula, drafts' rows, and experts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from engine.geometry import read_geometry
from engine.quantisation import read_quantisation
from engine.rank.int8 import Int8Weight
from engine.rank.load.loader import load
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Single
from engine.weight_formats import INT8
from kernels.linear import GEGLU, Epilogue, gelu_times
from tests.conftest import Nano
from tests.support.engine.quantised import int8, saved

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # fp32: exact sums, scaled in another order


def made(matrix: Tensor) -> Int8Weight:
    weight = Int8Weight(tuple(matrix.shape), torch.float32, CPU).stored_as(INT8)
    assert isinstance(weight, Int8Weight)
    stored = int8(matrix)
    weight.values.copy_(stored["weight"])
    weight.scale.copy_(stored["weight_scale"])
    return weight


def test_a_product_is_its_formula() -> None:
    """Of one row and of many, gated and with a factor; scales of other rows are 100 tolerances away. A row's result is the same to
    the bit whatever rows it is computed with, so a verification gives what decode gives."""
    torch.manual_seed(1)
    weight, x, up = made(torch.randn(48, 96) / 10), torch.randn(40, 96), torch.randn(40, 48)
    scale = x.abs().amax(1, keepdim=True) / 127
    expected = ((x / scale).round().double() @ weight.values.double().t() * (scale * weight.scale.t())).float()
    gate, other = expected.chunk(2, 1)
    cases: list[tuple[Epilogue, Tensor]] = [
        (Epilogue(), expected),
        (GEGLU, functional.gelu(gate, approximate="tanh") * other),
        (gelu_times(up), functional.gelu(expected, approximate="tanh") * up),
    ]
    for epilogue, wanted in cases:
        found = weight.product(x, epilogue)
        assert (found - wanted).abs().max() < TOLERANCE
        assert (found - wanted.roll(1, 1)).abs().max() > 100 * TOLERANCE
    whole = weight.product(x)
    assert torch.equal(weight.product(x[3:4]), whole[3:4])
    assert not torch.equal(weight.product(x[3:4]), whole[4:5])


def test_values_are_the_folders(nano: Nano, tmp_path: Path) -> None:
    """To the bit, an expert's too; not those of the next expert."""
    folder = saved(nano("26b-a4b"), tmp_path / "saved", kind="int8")
    tensors = load_file(folder / "model.safetensors")
    model = Gemma4(read_geometry(folder), Single(), torch.float32, CPU)
    load(model, TENSORS, folder, read_quantisation(folder))
    layer, block = "model.language_model.layers.0.", model.blocks[0]
    assert torch.equal(block.mlp.down.values, tensors[f"{layer}mlp.down_proj.weight"])
    assert torch.equal(block.experts.down.values[2], tensors[f"{layer}experts.2.down_proj.weight"])
    assert torch.equal(block.experts.down.scale[2], tensors[f"{layer}experts.2.down_proj.weight_scale"])
    assert not torch.equal(block.experts.down.values[3], tensors[f"{layer}experts.2.down_proj.weight"])
    scale = tensors[f"{layer}mlp.down_proj.weight_scale"]
    assert torch.equal(block.mlp.down.weight, block.mlp.down.values * scale)
    assert not torch.equal(block.mlp.down.weight, block.mlp.down.values * scale.roll(1, 0))
