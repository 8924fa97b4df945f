"""Checkpoints as public quantisers write them, made of plain ones, and the plain ones that those stand for.

`saved` writes the names, shapes and dtypes of each format, and its config.json. `dequantised` reads such a folder by the formats'
definitions, without the engine, and writes its numbers in fp32.
"""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
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
from kernels.packed import fp8_matrix, unpacked

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


def in_words(nibbles: Tensor) -> Tensor:
    """0 to 15 [..., n] -> int32 [..., n / 8], the first in the lowest bits."""
    words = (nibbles.long().unflatten(-1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def int4(matrix: Tensor, group: int, *, symmetric: bool) -> Tensors:
    """[m, n] -> eight numbers of four bits a word, a scale for each `group` columns and, unless symmetric, a zero point."""
    groups = matrix.float().unflatten(-1, (-1, group))
    low = groups.amin(-1).clamp_max(0)
    high = groups.amax(-1).clamp_min(0)
    if symmetric:
        scale = torch.maximum(-low, high) / 7.5
        zero = torch.full_like(low, 8)
    else:
        scale = (high - low) / 15
        zero = (-low / scale.clamp_min(1e-9)).round().clamp(0, 15)
    scale = scale.clamp_min(1e-9).to(torch.bfloat16)
    nibbles = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    stored = {"weight_packed": in_words(nibbles.flatten(-2)), "weight_scale": scale, "weight_shape": torch.tensor(matrix.shape)}
    if not symmetric:
        stored["weight_zero_point"] = in_words(zero.T).T
    return stored


def _nibbles(words: Tensor) -> Tensor:
    """[..., n] of bytes or words of 32 bits -> their numbers of four bits [..., 2 n or 8 n], the lowest bits first."""
    places = 4 * torch.arange(2 * words.element_size())
    return (words.long()[..., None] >> places & 15).flatten(-2)


def e2m1(bits: int) -> float:
    """By the definition: a sign, two bits of an exponent whose bias is 1, a bit of mantissa."""
    exponent, mantissa = bits >> 1 & 3, bits & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if bits >> 3 else size


def _number_and_scale(stored: Tensors) -> tuple[Tensor, Tensor]:
    number = next(stored[name] for name in ("weight_packed", "weight") if name in stored)
    return number, next(stored[name] for name in ("weight_scale", "weight_scale_inv") if name in stored)


def _is_of_rows(number: Tensor, scale: Tensor) -> bool:
    """Whether there is a scale for each row, or one for all; else there is one for each block of 128 x 128."""
    return scale.ndim < 2 or scale.shape == (len(number), 1)


def values(stored: Tensors) -> Tensor:
    """The numbers of a matrix, fp32 [m, n]: those of each format by its definition."""
    number, scale = _number_and_scale(stored)
    scale = scale.float()
    if number.dtype == torch.int32:
        zero = _nibbles(stored["weight_zero_point"].T).T if "weight_zero_point" in stored else torch.full(scale.shape, 8)
        number = _nibbles(number)
        width = number.shape[1] // scale.shape[1]
        return (number - zero.repeat_interleave(width, 1)) * scale.repeat_interleave(width, 1)
    if number.dtype == torch.uint8:
        factor = stored["weight_scale_2"] if "weight_scale_2" in stored else 1 / stored["weight_global_scale"]
        table = torch.tensor([e2m1(bits) for bits in range(16)])
        return table[_nibbles(number)] * (scale * factor).repeat_interleave(16, 1)
    if not _is_of_rows(number, scale):
        scale = scale.repeat_interleave(128, 0)[: len(number)].repeat_interleave(128, 1)[:, : number.shape[1]]
    return number.float() * scale


def as_held(stored: Tensors) -> Tensor:
    """`values` as ranks hold them: those of four bits in floating point and of blocks are rounded once more, to e4m3 with a scale
    a row."""
    whole = values(stored)
    number, scale = _number_and_scale(stored)
    return whole if number.dtype == torch.int32 or _is_of_rows(number, scale) else unpacked(fp8_matrix(whole))


def _numbers(kind: str, strategy: str, **more: object) -> JsonObject:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **more}


def _group(weights: JsonObject, activations: JsonObject | None) -> JsonObject:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": weights, "input_activations": activations}}}  # fmt: skip


_FP4: JsonObject = _numbers("float", "tensor_group", group_size=16) | {"num_bits": 4}


def _int4(group: int, *, symmetric: bool = True) -> tuple[Quantiser, JsonObject]:
    weights = _numbers("int", "group", group_size=group) | {"num_bits": 4, "symmetric": symmetric}
    return partial(int4, group=group, symmetric=symmetric), _group(weights, None)


# Each format's quantiser, and what config.json says.
KINDS: dict[str, tuple[Quantiser, JsonObject]] = {
    "channel": (channel, _group(_numbers("float", "channel"), _numbers("float", "token", dynamic=True))),
    "tensor": (tensor_static, _group(_numbers("float", "tensor"), _numbers("float", "tensor"))),
    "int8": (int8, _group(_numbers("int", "channel"), _numbers("int", "token", dynamic=True))),
    "modelopt": (modelopt_static, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nvfp4": (nvfp4, _group(_FP4, _FP4 | {"dynamic": "local"})),
    "nvfp4a16": (nvfp4, _group(_FP4, None)),
    "nvfp4-modelopt": (nvfp4_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "blocks": (
        blocks,
        _group(_numbers("float", "block", block_structure=[128, 128]), _numbers("float", "group", group_size=128, dynamic=True)),
    ),
    "blocks-inverse": (
        blocks_inverse,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ),
    "int4-32": _int4(32),
    "int4-64": _int4(64),
    "int4-128": _int4(128),
    "int4-32-zero": _int4(32, symmetric=False),
    "mixed": (modelopt_static, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}),
}
_MIXED = ("FP8", modelopt_static), ("NVFP4", nvfp4_modelopt)  # of attention, and of MLPs and experts, in `mixed`


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


def fused(tensors: Tensors) -> Tensors:
    """The checkpoint's tensors with all experts of a layer in one, as `unfused` takes them."""
    found: Tensors = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if one is None:
            found[name] = tensor
        elif one[3] == "gate":
            pair = torch.cat((tensor, tensors[name.replace("gate_proj", "up_proj")]))
            experts.setdefault(f"{one[1]}.gate_up_proj", {})[int(one[2])] = pair
        elif one[3] == "down":
            experts.setdefault(f"{one[1]}.down_proj", {})[int(one[2])] = tensor
    return found | {name: torch.stack([each for _, each in sorted(matrices.items())]) for name, matrices in experts.items()}


def widths_of(folder: Path) -> dict[str, int]:
    """The columns of each matrix of a plain folder's text model, by its name; experts one by one."""
    whole = pieces(TENSORS, read_geometry(folder), weights=Quantisation(fused=False))
    return {name.removesuffix(".weight"): piece.fan_in for name, piece in whole.items() if piece.kind == "matrix"}


def saved(folder: Path, to: Path, targets: str = "re:.*", ignore: tuple[str, ...] = (), kind: str = "channel") -> Path:
    """The checkpoint in a format of KINDS, experts one by one; targets: of the matrices that are quantised."""
    said = json.loads(json.dumps(KINDS[kind][1])) | {"ignore": ["lm_head", *ignore]}
    tensors = unfused(_tensors(folder))
    for matrix in widths_of(folder):
        if not re.match(targets.removeprefix("re:"), f"{matrix}.weight") or matrix in ignore:
            continue
        quantiser = KINDS[kind][0]
        if kind == "mixed":
            algorithm, quantiser = _MIXED["mlp" in matrix or "experts" in matrix]
            said.setdefault("quantized_layers", {})[matrix] = {"quant_algo": algorithm}
        tensors |= {f"{matrix}.{suffix}": tensor for suffix, tensor in quantiser(tensors.pop(f"{matrix}.weight")).items()}
    if targets != "re:.*":
        said["config_groups"]["group_0"]["targets"] = [targets]
    config = json.loads((folder / "config.json").read_text())
    _write(folder, to, tensors, config | {"quantization_config": said})
    return to


def dequantised(folder: Path, to: Path, *, four_bits: bool = False) -> Path:
    """The plain checkpoint, in fp32, of the numbers that ranks hold of a folder in one of KINDS; experts in one tensor.

    four_bits: with `weights: nvfp4`"""
    tensors = _tensors(folder)
    for name in [name for name in tensors if re.search(r"\.weight_scale(_inv)?$", name)]:
        begin = name.rpartition(".")[0]
        ends = [each.removeprefix(f"{begin}.") for each in tensors if each.startswith(f"{begin}.")]
        is_kept = four_bits and not re.search(r"\.experts\.|per_layer", begin)
        held = values if is_kept else as_held
        tensors[f"{begin}.weight"] = held({end: tensors.pop(f"{begin}.{end}") for end in ends})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    _write(folder, to, fused(tensors), config)
    return to


def _tensors(folder: Path) -> Tensors:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _write(folder: Path, to: Path, tensors: Tensors, config: JsonObject) -> None:
    """The tensors and config.json; all other files and folders as they are in `folder`."""
    shutil.copytree(folder, to, ignore=lambda at, names: _replaced(names) if Path(at) == folder else ())
    (to / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")


def _replaced(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors") or name == "model.safetensors.index.json"]
