"""Checkpoints as public quantisers write them, made of plain ones: names, shapes and dtypes of their tensors, and config.json."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from engine.geometry import read_geometry
from engine.protocol import JsonObject
from engine.quantisation import Quantisation
from engine.rank.load.slices import pieces
from engine.rank.models.gemma4_weights import TENSORS
from kernels.packed import fp8_matrix

E4M3 = torch.float8_e4m3fn
Tensors = dict[str, Tensor]  # of a matrix, by what follows its name
Quantiser = Callable[[Tensor], Tensors]


def channel(matrix: Tensor) -> Tensors:
    """[m, n] -> e4m3 with a scale a row."""
    packed = fp8_matrix(matrix)
    assert packed.scale is not None
    return {"weight": packed.values, "weight_scale": packed.scale[:, None]}


def tensor_static(matrix: Tensor) -> Tensors:
    """[m, n] -> e4m3 with one scale, and one for the activations."""
    scale = matrix.abs().amax().float() / 448
    return {"weight": (matrix / scale).to(E4M3), "weight_scale": scale.reshape(1), "input_scale": torch.ones(1)}


def modelopt_static(matrix: Tensor) -> Tensors:
    """The same with scales of no dimension."""
    return {name: tensor if name == "weight" else tensor.reshape(()) for name, tensor in tensor_static(matrix).items()}


def blocks(matrix: Tensor) -> Tensors:
    """[m, n] -> e4m3 with a scale for each block of 128 x 128."""
    m, n = matrix.shape
    padded = pad(matrix.float(), (0, -n % 128, 0, -m % 128)).unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
    scale = (padded.abs().amax((1, 3), keepdim=True) / 448).clamp_min(1e-12)
    return {"weight": (padded / scale).to(E4M3).flatten(2).flatten(0, 1)[:m, :n], "weight_scale": scale[:, 0, :, 0]}


def blocks_inverse(matrix: Tensor) -> Tensors:
    """The same as transformers names them."""
    made = blocks(matrix)
    return {"weight": made["weight"], "weight_scale_inv": made["weight_scale"]}


def nvfp4_modelopt(matrix: Tensor) -> Tensors:
    """[m, n] -> e2m1, two a byte, a scale in e4m3 for each 16 columns, and one for the matrix that multiplies."""
    groups = pad(matrix.float(), (0, -matrix.shape[1] % 16)).unflatten(1, (-1, 16))
    factor = groups.abs().amax() / (6 * 448)
    scale = (groups.abs().amax(2) / 6 / factor).clamp_min(2**-6).to(E4M3)
    ratios = groups / (scale.float() * factor)[..., None]
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    bits = (ratios.abs()[..., None] - numbers).abs().argmin(-1) + 8 * (ratios < 0)
    pairs = bits.flatten(1).unflatten(1, (-1, 2))
    return {
        "weight": (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8), "weight_scale": scale,
        "weight_scale_2": factor, "input_scale": torch.ones(()),
    }  # fmt: skip


def nvfp4(matrix: Tensor) -> Tensors:
    """The same of compressed-tensors, where the matrix's scale divides."""
    made = nvfp4_modelopt(matrix)
    return {
        "weight_packed": made["weight"], "weight_scale": made["weight_scale"],
        "weight_global_scale": 1 / made["weight_scale_2"].reshape(1), "input_global_scale": torch.ones(1),
    }  # fmt: skip


def int8(matrix: Tensor) -> Tensors:
    """[m, n] -> int8 with a scale a row."""
    scale = matrix.abs().amax(1, keepdim=True).float() / 127
    return {"weight": (matrix / scale).round().to(torch.int8), "weight_scale": scale}


def _numbers(kind: str, strategy: str, **more: object) -> JsonObject:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **more}


def _group(weights: JsonObject, activations: JsonObject) -> JsonObject:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": weights, "input_activations": activations}}}  # fmt: skip


_FP4: JsonObject = _numbers("float", "tensor_group", group_size=16) | {"num_bits": 4}
# Each format's quantiser, and what config.json says.
KINDS: dict[str, tuple[Quantiser, JsonObject]] = {
    "channel": (channel, _group(_numbers("float", "channel"), _numbers("float", "token", dynamic=True))),
    "tensor": (tensor_static, _group(_numbers("float", "tensor"), _numbers("float", "tensor"))),
    "int8": (int8, _group(_numbers("int", "channel"), _numbers("int", "token", dynamic=True))),
    "modelopt": (modelopt_static, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nvfp4": (nvfp4, _group(_FP4, _FP4 | {"dynamic": "local"})),
    "nvfp4-modelopt": (nvfp4_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "blocks": (
        blocks,
        _group(_numbers("float", "block", block_structure=[128, 128]), _numbers("float", "group", group_size=128, dynamic=True)),
    ),
    "blocks-inverse": (
        blocks_inverse,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
}


def unfused(tensors: Tensors) -> Tensors:
    """The checkpoint's tensors with experts one by one."""
    found = {}
    for name, tensor in tensors.items():
        begin, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if last == "gate_up_proj":
                gate, up = matrix.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            found |= {f"{begin}.{expert}.{kind}.weight": part for kind, part in parts.items()}
    return found


def saved(folder: Path, to: Path, targets: str = "re:.*", ignore: tuple[str, ...] = (), kind: str = "channel") -> Path:
    """The checkpoint in a format of KINDS, experts one by one; targets: of the matrices that are quantised."""
    quantiser, said = KINDS[kind]
    tensors = unfused({name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()})
    for name, piece in pieces(TENSORS, read_geometry(folder), weights=Quantisation(fused=False)).items():
        matrix = name.removesuffix(".weight")
        if piece.kind == "matrix" and re.match(targets.removeprefix("re:"), name) and matrix not in ignore:
            tensors |= {f"{matrix}.{suffix}": tensor for suffix, tensor in quantiser(tensors.pop(name)).items()}
    said = json.loads(json.dumps(said)) | {"ignore": ["lm_head", *ignore]}
    if targets != "re:.*":
        said["config_groups"]["group_0"]["targets"] = [targets]
    config = json.loads((folder / "config.json").read_text())
    to.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json" and path.is_file():
            shutil.copy(path, to)
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    return to
