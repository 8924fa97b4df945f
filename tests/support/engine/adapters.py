"""PEFT folders of random adapters, and transformers' model with one merged into its weights: W + scale * B A. Names and shapes are
transformers' own; nothing here reads the engine's tables."""

import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.rank.adapter_stacks import add_stacks
from engine.rank.load.adapter_tensors import adapter_pieces
from engine.rank.models.gemma4 import Gemma4
from engine.rank.models.gemma4_weights import TENSORS

ALL = r"(q|k|v|o|gate|up|down)_proj|per_layer_(input_gate|projection|model_projection)|router\.proj"
FILE = "adapter_model.safetensors"
TEXT = "model.language_model."


@dataclass(frozen=True)
class Recipe:
    """An adapter to be drawn. targets: a regex of the ends of modules' names; experts: "": none, "fused": as `target_parameters`
    are saved, "each": one by one. prefix: what stands in front of `layers`."""

    seed: int
    rank: int = 8
    alpha: float = 24.0
    targets: str = ALL
    experts: str = ""
    prefix: str = "base_model.model.model."
    settings: Mapping[str, Any] = field(default_factory=dict)


def write(folder: Path, model: nn.Module, recipe: Recipe) -> Path:
    """Draw an adapter of transformers' text model and save it as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(recipe.seed)
    tensors: dict[str, Tensor] = {}

    def draw(module: str, a: tuple[int, int], b: tuple[int, int]) -> None:
        name = recipe.prefix + module.removeprefix(TEXT)
        tensors[f"{name}.lora_A.weight"] = torch.randn(a, generator=generator) / math.sqrt(a[1])
        tensors[f"{name}.lora_B.weight"] = torch.randn(b, generator=generator) / math.sqrt(b[1]) / 4

    config = {"peft_type": "LORA", "r": recipe.rank, "lora_alpha": recipe.alpha, "target_modules": recipe.targets}
    config |= recipe.settings
    for name, module in model.named_modules():
        if not name.startswith(TEXT):
            continue
        if isinstance(module, nn.Linear) and re.search(rf"\.({recipe.targets})$", name):
            rank, _ = rank_and_scale(config, name)
            draw(name, (rank, module.in_features), (module.out_features, rank))
        if type(module).__name__.endswith("TextExperts") and recipe.experts:
            _draw_experts(name, module, recipe, draw)
    save_file(tensors, folder / FILE)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _draw_experts(name: str, module: Any, recipe: Recipe, draw: Any) -> None:
    rank = recipe.rank
    count, pair, hidden = module.gate_up_proj.shape
    width = pair // 2
    if recipe.experts == "fused":
        draw(f"{name}.base_layer", (count * rank, hidden), (pair, rank * count))
        draw(name, (count * rank, width), (hidden, rank * count))
        return
    for expert in range(count):
        draw(f"{name}.{expert}.gate_proj", (rank, hidden), (width, rank))
        draw(f"{name}.{expert}.up_proj", (rank, hidden), (width, rank))
        draw(f"{name}.{expert}.down_proj", (rank, width), (hidden, rank))


def add_random(model: Gemma4, adapters: int, rank: int, targets: str) -> None:
    """Give a rank's model so many random adapters on the matrices whose names have `targets`."""
    known = adapter_pieces(TENSORS, model.geometry, model.parallel.rank, model.parallel.size)
    _, stacks = add_stacks(model, known, {name: rank for name in known if re.search(targets, name)}, adapters)
    for stack in stacks.values():
        stack.a.normal_(std=stack.a.shape[2] ** -0.5)
        stack.b.normal_(std=0.1 * rank**-0.5)


def rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """PEFT's, of a module or an experts' parameter."""

    def of(pattern: str, usual: float) -> float:
        keys = config.get(pattern) or {}
        return next((value for key, value in keys.items() if re.match(rf"(.*\.)?({key})$", module)), usual)

    rank = int(of("rank_pattern", config["r"]))
    alpha = of("alpha_pattern", config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


@torch.no_grad()
def merge(model: nn.Module, folder: Path, fault: str = "") -> nn.Module:
    """Add the adapter in the folder to the model's weights. fault: what a wrong server would do."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(folder / FILE).items()}
    modules = dict(model.named_modules())
    for key in [name for name in tensors if ".lora_A." in name]:
        a = tensors[key]
        b = tensors[key.replace(".lora_A.", ".lora_B.")]
        inner = re.sub(r"^base_model\.model\.(model\.)?(language_model\.)?", "", key.removesuffix(".lora_A.weight"))
        name = TEXT + inner
        one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj", name)
        fused = re.fullmatch(r"(.*\.experts)(\.base_layer)?", name)
        rank, scale = rank_and_scale(config, name)
        if fault == "alpha":
            scale = 1.0 / rank
        if one:
            _merge_one(modules[one[1]], int(one[2]), one[3], scale * b @ a, fault)
        elif fused:
            parameter = "gate_up_proj" if fused[2] else "down_proj"
            rank, scale = rank_and_scale(config, f"{fused[1]}.{parameter}")
            _merge_all(getattr(modules[fused[1]], parameter), rank, scale, a, b, fault)
        else:
            _merge_dense(modules, name, scale * b @ a, fault)
    return model


def _merge_dense(modules: Mapping[str, Any], name: str, delta: Tensor, fault: str) -> None:
    layer, _, matrix = name.rpartition(".")
    if fault == "swapped" and matrix in ("gate_proj", "up_proj"):
        name = f"{layer}.{'up_proj' if matrix == 'gate_proj' else 'gate_proj'}"
    if fault == "v" and matrix == "k_proj" and modules[layer].v_proj is None:
        modules[layer].v_proj = copy.deepcopy(modules[name])  # the model's own K, which V then is
    modules[name].weight.add_(delta)


def _merge_one(experts: Any, expert: int, which: str, delta: Tensor, fault: str) -> None:
    if which == "down":
        experts.down_proj[expert].add_(delta)
        return
    width = len(delta)
    first = (which == "up") != (fault == "swapped")
    experts.gate_up_proj[expert][first * width : (first + 1) * width].add_(delta)


def _merge_all(parameter: Tensor, rank: int, scale: float, a: Tensor, b: Tensor, fault: str) -> None:
    count = len(parameter)
    order = "o e r, e r i -> e o i" if fault == "expert slowest" else "o r e, e r i -> e o i"
    shape = (len(b), count, rank) if fault == "expert slowest" else (len(b), rank, count)
    delta = torch.einsum(order, b.view(shape), a.view(count, rank, -1)) * scale
    if fault == "swapped" and parameter.shape[1] == 2 * parameter.shape[2]:
        delta = torch.cat(delta.chunk(2, 1)[::-1], 1)
    parameter.add_(delta)
