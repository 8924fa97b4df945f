"""Folders in formats that ranks hold as fp8 with a scale a row: cuts through blocks, and scales without use."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.quantisation import read_quantisation
from engine.rank.builder import load_rank
from engine.rank.parallel import Single
from engine.rank.weight import Weight
from engine.weight_formats import FORMATS
from tests.conftest import Nano
from tests.support.engine.format_model import model, write_base
from tests.support.engine.quantised import saved
from tests.support.engine.recording import config_of
from tests.support.engine.threads import run_ranks

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
LAYER = "model.language_model.layers.0."


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
    whole = model(folder, Single(), read_quantisation(folder)).blocks[0].mlp
    ranks = [rank.blocks[0].mlp for rank in run_ranks(tp, lambda parallel: model(folder, parallel, read_quantisation(folder)))]
    share = len(whole.gate_up.values) // 2 // tp
    assert share % 128
    down = torch.cat([rank.down.values.float() for rank in ranks], 1)
    gate = torch.cat([rank.gate_up.values[:share].float() * rank.gate_up.scale[:share] for rank in ranks])
    expected = (whole.gate_up.values.float() * whole.gate_up.scale)[: share * tp]
    assert torch.equal(down, whole.down.values.float())
    assert torch.equal(gate, expected)
    assert not torch.equal(gate, expected.roll(1, 0))


def test_packing_at_load_is_for_the_formats_that_have_it(nano: Nano) -> None:
    """Of a plain folder fp8 is made; int8 would need a folder."""
    groups = read_quantisation(nano("31b"), "fp8").groups
    assert [weights.reader for _, weights in groups] == [FORMATS["fp8"][0].packer]
    with pytest.raises(CheckpointError, match="not quantised; Quartet loads int8 weights"):
        read_quantisation(nano("31b"), "int8")


@pytest.mark.parametrize("kind", ["blocks", "int4-32"])
def test_random_weights(tmp_path: Path, kind: str) -> None:
    """A folder's shape is drawn as what a rank holds, with the deviation of plain weights."""
    folder = saved(write_base(tmp_path / "31b", "31b"), tmp_path / "saved", kind=kind)
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
    model(folder, Single(), read_quantisation(folder))
    for wrong in (f"{LAYER}self_attn.x_scale", f"{ignored}.input_scale"):
        save_file(tensors | scales | {wrong: torch.ones(1)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{wrong} is unexpected"):
            model(folder, Single(), read_quantisation(folder))


def test_experts_in_one_tensor_are_plain(nano: Nano, tmp_path: Path) -> None:
    """An fp8 folder whose experts stayed one bf16 tensor of three dimensions, which is no `Linear`."""
    folder = saved(nano("26b-a4b"), tmp_path / "saved")
    tensors = load_file(folder / "model.safetensors")
    plain = {name: tensor for path in nano("26b-a4b").glob("*.safetensors") for name, tensor in load_file(path).items()}
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    save_file(rest | {name: tensor for name, tensor in plain.items() if ".experts." in name}, folder / "model.safetensors")
    block = model(folder, Single(), read_quantisation(folder)).blocks[0]
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
    blocks = model(folder, Single(), read_quantisation(folder)).blocks
    assert type(blocks[0].mlp.down) is Weight
    assert type(blocks[1].mlp.down).__name__ == "Fp8Weight"
    layers[names[0]] = {"quant_algo": "W4A8_AWQ"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    with pytest.raises(CheckpointError, match="modelopt, W4A8_AWQ"):
        read_quantisation(folder)
