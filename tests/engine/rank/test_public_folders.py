"""Public quantised folders by their headers alone: every tensor's name, dtype and shape as published (facts of July to September
2026), data left out. Each resolves without an unexplained tensor, or its format is refused by name as long as nothing reads it."""

import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.models.resolve import MEMBERS, local_folder
from engine.errors import CheckpointError
from engine.geometry import parse_config
from engine.protocol import JsonObject
from engine.quantisation import Quantisation, read_quantisation
from engine.rank.load.slices import pieces
from engine.rank.load.tensor_files import checked_headers
from engine.rank.models.gemma4_weights import TENSORS

pytestmark = pytest.mark.cpu

WIDTHS = {"F8_E4M3": 1, "U8": 1, "I8": 1, "BF16": 2, "I32": 4, "F32": 4, "I64": 8}
Header = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name
Parts = Callable[[int, int], Header]  # of a matrix [o, i], by what follows its name


def channel(o: int, i: int) -> Header:
    return {"weight": ("F8_E4M3", (o, i)), "weight_scale": ("BF16", (o, 1))}


def blocks(o: int, i: int) -> Header:
    return {"weight": ("F8_E4M3", (o, i)), "weight_scale": ("BF16", (-(-o // 128), -(-i // 128)))}


def static(o: int, i: int) -> Header:
    return {"weight": ("F8_E4M3", (o, i)), "weight_scale": ("F32", ()), "input_scale": ("F32", ())}


def nvfp4_modelopt(o: int, i: int) -> Header:
    return {"weight": ("U8", (o, i // 2)), "weight_scale": ("F8_E4M3", (o, i // 16)),
            "weight_scale_2": ("F32", ()), "input_scale": ("F32", ())}  # fmt: skip


def nvfp4(o: int, i: int) -> Header:
    return {"weight_packed": ("U8", (o, i // 2)), "weight_scale": ("F8_E4M3", (o, i // 16)),
            "weight_global_scale": ("F32", (1,)), "input_global_scale": ("F32", (1,))}  # fmt: skip


def w4a16(o: int, i: int) -> Header:
    return {"weight_packed": ("I32", (o, i // 8)), "weight_scale": ("BF16", (o, i // 32)), "weight_shape": ("I64", (2,))}


def group(weights: JsonObject, activations: JsonObject | None = None, **more: object) -> JsonObject:
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", **more, "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}}}  # fmt: skip


def numbers(bits: int, kind: str, strategy: str, **more: object) -> JsonObject:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


TOKEN = numbers(8, "float", "token", dynamic=True)
FP8 = group(numbers(8, "float", "channel"), TOKEN, format="float-quantized")
FP8_BLOCKS = group(
    numbers(8, "float", "block", block_structure=[128, 128]), numbers(8, "float", "group", group_size=128, dynamic=True)
)
FP4 = numbers(4, "float", "tensor_group", group_size=16)
NVFP4 = group(FP4, FP4 | {"dynamic": "local"}, format="nvfp4-pack-quantized")
W4A16 = group(numbers(4, "int", "group", group_size=32), format="pack-quantized")
IGNORED = ["lm_head", "re:.*router.*", "re:.*vision_tower.*", "re:.*embed_vision.*"]
LAYERS = "model.language_model.layers"
NVIDIA_31B = "nvidia/Gemma-4-31B-IT-NVFP4"
NVIDIA_26B = "nvidia/Gemma-4-26B-A4B-NVFP4"
NOT_MLP = ["lm_head", "model.embed_vision*", "model.vision_tower*", *(f"{LAYERS}.{layer}.self_attn*" for layer in range(60))]
NOT_EXPERTS = ["lm_head", *(f"{LAYERS}.{layer}.{part}*" for layer in range(30) for part in ("mlp", "router", "self_attn"))]

# Member, the tensors of a quantised matrix, which matrices are quantised, config.json, names that the plain folder lacks.
FOLDERS: dict[str, tuple[str, Parts, str, JsonObject, Header]] = {
    "RedHatAI/gemma-4-31B-it-FP8-dynamic": ("31b", channel, "", FP8 | {"ignore": IGNORED}, {}),
    "RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic": ("26b-a4b", channel, "", FP8 | {"ignore": IGNORED}, {}),
    "RedHatAI/gemma-4-E4B-it-FP8-dynamic": ("e4b", channel, "", FP8 | {"ignore": IGNORED}, {}),
    "RedHatAI/gemma-4-31B-it-FP8-block": ("31b", blocks, "", FP8_BLOCKS | {"ignore": IGNORED}, {}),
    "an FP8 folder of ModelOpt, experts alone": (
        "26b-a4b", static, "experts", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": NOT_EXPERTS}, {}),
    NVIDIA_31B: (
        "31b", nvfp4_modelopt, "mlp", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": NOT_MLP}, {}),
    NVIDIA_26B: (
        "26b-a4b", nvfp4_modelopt, "experts", {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": NOT_EXPERTS}, {}),
    "RedHatAI/gemma-4-12B-it-NVFP4": ("12b", nvfp4, "", NVFP4 | {"ignore": IGNORED}, {}),
    "google/gemma-4-31B-it-qat-w4a16-ct": (
        "31b", w4a16, "", W4A16 | {"ignore": IGNORED}, {"lm_head.weight": ("BF16", (262144, 5376))}),
    "google/gemma-4-E4B-it-qat-w4a16-ct": ("e4b", w4a16, "", W4A16 | {"ignore": IGNORED}, {}),
}  # fmt: skip


def header_of(member: str, parts: Parts, quantised: str, more: Header) -> Header:
    """The text model's tensors, experts one by one; quantised: a part of the names of quantised matrices."""
    geometry = parse_config(json.loads((folder_of(member) / "config.json").read_text()), member)
    header: Header = {}
    for name, piece in pieces(TENSORS, geometry, weights=Quantisation(fused=False)).items():
        matrix = name.removesuffix(".weight")
        if piece.kind == "matrix" and quantised in name:
            o, i = piece.shape
            header |= {f"{matrix}.{suffix}": stored for suffix, stored in parts(o, i).items()}
        else:
            header[name] = ("BF16", piece.shape)
    return header | more


def folder_of(member: str) -> Path:
    assert member in MEMBERS
    return local_folder(f"dummy:{member}")


def written(to: Path, member: str, said: JsonObject, header: Header) -> Path:
    """A folder with two shards whose data are holes."""
    config = json.loads((folder_of(member) / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    names = list(header)
    half = len(names) // 2
    index = {}
    for number, part in enumerate((names[:half], names[half:])):
        shard, entries, end = f"model-{number}.safetensors", {}, 0
        for name in part:
            dtype, shape = header[name]
            size = WIDTHS[dtype]
            for length in shape:
                size *= length
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
            index[name] = shard
        text = json.dumps(entries).encode()
        with (to / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return to


def check(folder: Path, setting: str = "auto") -> int:
    """Reads the headers as a rank does; returns the number of tensors that are needed."""
    geometry = parse_config(json.loads((folder / "config.json").read_text()), "config.json")
    weights = read_quantisation(folder, setting)
    return len(checked_headers(folder, pieces(TENSORS, geometry, weights=weights), TENSORS, geometry, weights))


@pytest.mark.parametrize("name", FOLDERS)
def test_every_tensor_is_explained(tmp_path: Path, name: str) -> None:
    """The folder resolves, and one more tensor is unexpected, one less missing."""
    member, parts, quantised, said, more = FOLDERS[name]
    header = header_of(member, parts, quantised, more)
    folder = written(tmp_path, member, said, header)
    assert check(folder) > 100
    scale = next(each for each in header if each.endswith("weight_scale"))
    written(tmp_path, member, said, {each: stored for each, stored in header.items() if each != scale})
    with pytest.raises(CheckpointError, match=f"{re.escape(scale)} is missing"):
        check(folder)
    written(tmp_path, member, said, header | {f"{scale}_3": ("F32", ())})
    with pytest.raises(CheckpointError, match=f"{re.escape(scale)}_3 is unexpected"):
        check(folder)


@pytest.mark.parametrize(("name", "kept"), [(NVIDIA_31B, 180), (NVIDIA_26B, 0), ("RedHatAI/gemma-4-12B-it-NVFP4", 328)])
def test_what_keeps_four_bits(tmp_path: Path, name: str, kept: int) -> None:
    """With `weights: nvfp4` the same tensors are read, and so many matrices keep their bits, on two ranks and on four: the MLPs,
    none where only experts are quantised, and all."""
    member, parts, quantised, said, more = FOLDERS[name]
    folder = written(tmp_path, member, said, header_of(member, parts, quantised, more))
    assert check(folder, "nvfp4") == check(folder)
    geometry = parse_config(json.loads((folder / "config.json").read_text()), "config.json")
    for tp in (1, 2, 4):
        needed = pieces(TENSORS, geometry, tp - 1, tp, read_quantisation(folder, "nvfp4"))
        assert sum(piece.weights.eight_bits is not None and bool(piece.targets) for piece in needed.values()) == kept


def test_a_header_of_47000_tensors_is_quick(tmp_path: Path) -> None:
    """nvidia's 26B in NVFP4, in two shards: resolved in less than two seconds of a processor."""
    member, parts, quantised, said, more = FOLDERS[NVIDIA_26B]
    header = header_of(member, parts, quantised, more)
    folder = written(tmp_path, member, said, header)
    assert len(header) > 46_080
    gc.collect()
    gc.freeze()  # objects of other tests are not looked through each time
    began = time.process_time()
    check(folder)
    took = time.process_time() - began
    gc.unfreeze()
    print(f"{len(header)} tensors in {took:.2f} s")
    assert took < 2
