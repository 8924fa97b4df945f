"""Folders in formats that ranks hold as fp8 with a scale a row: values, cuts through blocks, and scales without use."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.geometry import read_geometry
from engine.quantisation import read_quantisation
from engine.rank.builder import load_rank
from engine.rank.load.loader import load
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS
from engine.rank.parallel import Parallel, Single
from engine.rank.weight import Weight
from tests.conftest import Nano
from tests.support.engine.quantised import saved
from tests.support.engine.recording import config_of
from tests.support.engine.threads import run_ranks

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
BLOCK_ERROR = 1 / 16 + 1e-6  # of an element, of which e4m3 keeps four binary digits when it is rounded once more
SMALLEST = 2**-10  # of a row's scale: half the step between the smallest e4m3 numbers
LAYER = "model.language_model.layers.0."


def model(folder: Path, parallel: Parallel) -> Gemma4:
    made = Gemma4(read_geometry(folder), parallel, torch.float32, CPU)
    load(made, TENSORS, folder, read_quantisation(folder))
    return made


def dequantised(folder: Path, name: str) -> Tensor:
    """A matrix of the folder's by the format's definition: each element times the scale of its block."""
    tensors = load_file(folder / "model.safetensors")
    values = tensors[f"{name}.weight"].double()
    scale = next(tensors[f"{name}.{suffix}"] for suffix in ("weight_scale", "weight_scale_inv") if f"{name}.{suffix}" in tensors)
    if scale.numel() == 1:
        return values * scale.double()
    return values * scale.double().repeat_interleave(128, 0)[: len(values)].repeat_interleave(128, 1)[:, : values.shape[1]]


@pytest.mark.parametrize("kind", ["tensor", "modelopt"])
@pytest.mark.parametrize("member", ["31b", "26b-a4b"])
def test_a_scale_for_a_matrix_becomes_that_of_each_row(nano: Nano, tmp_path: Path, member: str, kind: str) -> None:
    """The numbers are the folder's exactly; with another scale they are not."""
    folder = saved(nano(member), tmp_path / "saved", kind=kind)
    made = model(folder, Single())
    down = made.blocks[0].mlp.down
    assert type(down).__name__ == "Fp8Weight"
    found = down.values.double() * down.scale.double()
    expected = dequantised(folder, f"{LAYER}mlp.down_proj")
    assert torch.equal(found, expected)
    assert not torch.equal(found, dequantised(folder, f"{LAYER}self_attn.o_proj")[: len(found), : found.shape[1]])
    if member == "26b-a4b":
        experts = made.blocks[0].experts
        up = experts.gate_up.values[3].double() * experts.gate_up.scale[3].double()
        names = [f"{LAYER}experts.3.{part}_proj" for part in ("gate", "up")]
        assert torch.equal(up, torch.cat([dequantised(folder, name) for name in names]))
        assert not torch.equal(up, torch.cat([dequantised(folder, name) for name in reversed(names)]))


def e2m1(bits: int) -> float:
    """By the definition: a sign, two bits of an exponent whose bias is 1, a bit of mantissa."""
    sign, exponent, mantissa = (-1) ** (bits >> 3), bits >> 1 & 3, bits & 1
    return sign * (2 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)


def nvfp4_values(folder: Path, name: str, *, inverted: bool = False) -> Tensor:
    """A matrix of the folder's by the format's definition; inverted: its scale divides where it multiplies."""
    tensors = load_file(folder / "model.safetensors")
    factor = tensors.get(f"{name}.weight_scale_2")
    packed = tensors.get(f"{name}.weight_packed", tensors.get(f"{name}.weight"))
    assert packed is not None
    if factor is None:
        factor = 1 / tensors[f"{name}.weight_global_scale"]
    factor = factor.double().reshape(())
    numbers = [[e2m1(byte >> shift & 15) for byte in row for shift in (0, 4)] for row in packed.tolist()]
    scale = tensors[f"{name}.weight_scale"].double() * (1 / factor if inverted else factor)
    return torch.tensor(numbers, dtype=torch.float64) * scale.repeat_interleave(16, 1)


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4-modelopt"])
@pytest.mark.parametrize("member", ["31b", "26b-a4b"])
def test_nvfp4_is_packed_again(nano: Nano, tmp_path: Path, member: str, kind: str) -> None:
    """Each element is within the stated error of the folder's, experts' too; gate for up, shifted groups and an inverted scale of
    the matrix are far off."""
    folder = saved(nano(member), tmp_path / "saved", kind=kind)
    made = model(folder, Single()).blocks[0]
    weight, names = made.mlp.down, [f"{LAYER}mlp.down_proj"]
    if member == "26b-a4b":
        weight, names = made.experts.gate_up, [f"{LAYER}experts.3.{part}_proj" for part in ("gate", "up")]
    values, scale = (each if each.ndim == 2 else each[3] for each in (weight.values, weight.scale))
    found = values.double() * scale.double()

    def excess(other: Tensor) -> float:
        return ((found - other).abs() / (BLOCK_ERROR * other.abs() + SMALLEST * scale.double())).max().item()

    expected = torch.cat([nvfp4_values(folder, name) for name in names])
    assert excess(expected) <= 1
    assert excess(expected.roll(16, 1)) > 100
    assert excess(torch.cat([nvfp4_values(folder, name, inverted=True) for name in names])) > 10
    if len(names) > 1:
        assert excess(torch.cat([nvfp4_values(folder, name) for name in reversed(names)])) > 100


@pytest.mark.parametrize("kind", ["blocks", "blocks-inverse"])
def test_blocks_are_packed_again(nano: Nano, tmp_path: Path, kind: str) -> None:
    """Each element is within the stated error of the folder's; with the scales of another row of blocks it is 100 errors off."""
    folder = saved(nano("31b"), tmp_path / "saved", kind=kind)
    rescaled(folder, ".down_proj", "mlp")
    down = model(folder, Single()).blocks[0].mlp.down
    expected = dequantised(folder, f"{LAYER}mlp.down_proj")
    found = down.values.double() * down.scale.double()

    def excess(other: Tensor) -> float:
        return ((found - other).abs() / (BLOCK_ERROR * other.abs() + SMALLEST * down.scale.double())).max().item()

    print(f"{kind}: {excess(expected):.2g} of the stated error; scales of other rows {excess(expected.roll(128, 0)):.2g}")
    assert excess(expected) <= 1
    assert excess(expected.roll(128, 0)) > 100


def rescaled(folder: Path, *parts: str) -> None:
    """Gives the first row of blocks of the matrices with these parts in their names scales 64 times as large."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if all(part in name for part in parts) and "_scale" in name:
            tensor[0] *= 64
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("member", "tp"), [("31b", 2), ("26b-a4b", 2), ("31b", 4)])
def test_ranks_cut_through_blocks(nano: Nano, tmp_path: Path, member: str, tp: int) -> None:
    """A rank's part is that part of the whole matrix packed, to the bit, where its rows or columns begin within a block."""
    folder = saved(nano(member), tmp_path / "saved", kind="blocks")
    rescaled(folder, ".mlp.")
    whole = model(folder, Single()).blocks[0].mlp
    ranks = [rank.blocks[0].mlp for rank in run_ranks(tp, lambda parallel: model(folder, parallel))]
    share = len(whole.gate_up.values) // 2 // tp
    assert share % 128
    down = torch.cat([rank.down.values.float() for rank in ranks], 1)
    gate = torch.cat([rank.gate_up.values[:share].float() * rank.gate_up.scale[:share] for rank in ranks])
    expected = (whole.gate_up.values.float() * whole.gate_up.scale)[: share * tp]
    assert torch.equal(down, whole.down.values.float())
    assert torch.equal(gate, expected)
    assert not torch.equal(gate, expected.roll(1, 0))


def test_random_weights(nano: Nano, tmp_path: Path) -> None:
    """A folder's shape is drawn as what a rank holds, with the deviation of plain weights."""
    folder = saved(nano("31b"), tmp_path / "saved", kind="blocks")
    config = msgspec.structs.replace(config_of(folder, 1), load_format="dummy")
    down = load_rank(config, Single(), CPU, checked=False).model.get_submodule("blocks.0.mlp.down")
    assert isinstance(down, Weight)
    assert down.weight.std().item() == pytest.approx(down.shape[1] ** -0.5, rel=0.03)


def test_scales_of_kv_are_read_past(nano: Nano, tmp_path: Path) -> None:
    """Scales of KV pages, by each of their names, are explained in a quantised folder; another tensor, and a scale of activations
    of a plain matrix, are not."""
    ignored = f"{LAYER}mlp.down_proj"
    folder = saved(nano("31b"), tmp_path / "saved", kind="tensor", ignore=(ignored,))
    tensors = load_file(folder / "model.safetensors")
    names = ("k_scale", "v_scale", "q_scale", "kv_scale", "k_proj.k_scale", "v_proj.v_scale", "q_proj.output_scale")
    scales = {f"{LAYER}self_attn.{name}": torch.ones(1) for name in names}
    save_file(tensors | scales, folder / "model.safetensors")
    model(folder, Single())
    for wrong in (f"{LAYER}self_attn.x_scale", f"{ignored}.input_scale"):
        save_file(tensors | scales | {wrong: torch.ones(1)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{wrong} is unexpected"):
            model(folder, Single())


def test_experts_in_one_tensor_are_plain(nano: Nano, tmp_path: Path) -> None:
    """An fp8 folder whose experts stayed one bf16 tensor of three dimensions, which is no `Linear`."""
    folder = saved(nano("26b-a4b"), tmp_path / "saved")
    tensors = load_file(folder / "model.safetensors")
    plain = {name: tensor for path in nano("26b-a4b").glob("*.safetensors") for name, tensor in load_file(path).items()}
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    save_file(rest | {name: tensor for name, tensor in plain.items() if ".experts." in name}, folder / "model.safetensors")
    block = model(folder, Single()).blocks[0]
    assert type(block.experts.down) is Weight
    assert type(block.mlp.down).__name__ == "Fp8Weight"


def test_layers_each_with_a_format_of_its_own(nano: Nano, tmp_path: Path) -> None:
    """ModelOpt's mixed folders name each matrix and its format; what they do not name is plain. One that is not read
    is named."""
    folder = saved(nano("31b"), tmp_path / "saved", kind="modelopt", ignore=(f"{LAYER}mlp.down_proj",))
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    names = [name.removesuffix(".weight_scale") for name in tensors if name.endswith("weight_scale")]
    layers = {name: {"quant_algo": "FP8"} for name in names}
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    blocks = model(folder, Single()).blocks
    assert type(blocks[0].mlp.down) is Weight
    assert type(blocks[1].mlp.down).__name__ == "Fp8Weight"
    layers[names[0]] = {"quant_algo": "W4A8_AWQ"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    with pytest.raises(CheckpointError, match="modelopt, W4A8_AWQ"):
        read_quantisation(folder)
