"""Checkpoints in int4 as compressed-tensors writes them, and the same weights in plain: rounded a group at a time."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.geometry import read_geometry
from engine.quantisation import Quantisation
from engine.rank.load.slices import pieces
from engine.rank.models.gemma4_weights import TENSORS

Change = Callable[[str, dict[str, Tensor]], dict[str, Tensor]]  # of the tensors of a matrix, by its name


def in_words(nibbles: Tensor) -> Tensor:
    """0 to 15 [..., n] -> int32 [..., n / 8], the first in the lowest bits."""
    places = 4 * torch.arange(8)
    words = (nibbles.long().unflatten(-1, (-1, 8)) << places).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantised(matrix: Tensor, group: int, symmetric: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The stored tensors of a matrix [m, n], by the ends of their names, and its values, fp32."""
    groups = matrix.float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    if symmetric:
        scale, zero = torch.maximum(low.abs(), high.abs()) / 7.5, torch.full_like(low, 8)
    else:
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = (high - low) / 15
        zero = (-low / scale.clamp_min(1e-9)).round().clamp(0, 15)
    scale = scale.clamp_min(1e-9).to(torch.bfloat16)
    nibbles = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    values = ((nibbles - zero[..., None]) * scale.float()[..., None]).flatten(-2)
    stored = {"_packed": in_words(nibbles.flatten(-2)), "_scale": scale, "_shape": torch.tensor(matrix.shape)}
    if not symmetric:
        stored["_zero_point"] = in_words(zero.T).T
    return stored, values


def write(
    folder: Path, to: Path, group: int, *, symmetric: bool, ignore: tuple[str, ...] = (), change: Change = lambda _, stored: stored
) -> tuple[Path, Path]:
    """(int4, plain): the folder's model with rounded matrices, experts one by one in int4."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        begin, fused = name.rpartition(".")[0], tensors.pop(name)
        for expert, matrix in enumerate(fused):
            gate, *up = matrix.chunk(2) if name.endswith("gate_up_proj") else (matrix,)
            kinds = ("gate_proj", "up_proj") if up else ("down_proj",)
            tensors |= {f"{begin}.{expert}.{kind}.weight": part for kind, part in zip(kinds, (gate, *up), strict=True)}
    packed, plain = dict(tensors), dict(tensors)
    for name, piece in pieces(TENSORS, read_geometry(folder), weights=Quantisation(fused=False)).items():
        if piece.kind == "matrix" and name.removesuffix(".weight") not in ignore:
            stored, plain[name] = quantised(packed.pop(name), group, symmetric)
            packed |= {name + suffix: tensor for suffix, tensor in change(name, stored).items()}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "pack-quantized"}}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    config = json.loads((folder / "config.json").read_text())
    quantisation = {"quantization_config": said | {"ignore": ["lm_head", *ignore]}}
    for kind, held, more in (("int4", packed, quantisation), ("plain", plain, {})):
        (to / kind).mkdir(parents=True)
        (to / kind / "config.json").write_text(json.dumps(config | more))
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, to / kind / "model.safetensors")
    return to / "int4", to / "plain"
