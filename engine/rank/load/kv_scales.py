"""A folder's scales of e4m3 KV pages."""

import torch
from torch import Tensor

from engine.checkpoint import tensor_names
from engine.errors import CheckpointError
from engine.geometry import Layer, shard_kv_heads
from engine.quantisation import KV_SCALE
from engine.rank.checkpoints import Checkpoint
from engine.rank.load.tensor_files import by_file, headers
from engine.rank.parallel import Parallel

_NAMES = {side: (f"{side}_proj.{side}_scale", f"{side}_scale", f"{side}_proj.output_scale", "kv_scale") for side in "kv"}


def read_kv_scales(text: Checkpoint, parallel: Parallel, device: torch.device) -> dict[int, Tensor]:
    """fp32 [2, kv_heads] of this rank, by layer; absent: 1. CheckpointError: a scale is wrong."""
    if not (text.weights.has_kv_scales and any(KV_SCALE.fullmatch(name) for name in tensor_names(text.folder))):
        return {}
    by_name, _ = headers(text.folder, text.tensors, text.geometry)
    places: dict[str, list[tuple[Layer, int]]] = {}  # of a tensor: its layer and side
    for layer in text.geometry.layers:
        for side, names in enumerate(_NAMES.values() if layer.owns_kv else ()):
            published = (text.tensors.published_name(f"layers.{layer.index}.self_attn.{name}", text.geometry) for name in names)
            found = next((name for name in published if name in by_name), None)
            if found is not None:
                places.setdefault(found, []).append((layer, side))
    scales: dict[int, Tensor] = {}
    for name, _, file in by_file({name: by_name[name] for name in places}):
        given = file.get_tensor(by_name[name].name).float().flatten()
        for layer, side in places[name]:
            if len(given) not in (1, layer.kv_heads) or not bool(((given > 0) & given.isfinite()).all()):
                raise CheckpointError(f"{text.folder}: {name} must be positive, one or one for each of {layer.kv_heads} KV heads")
            own = shard_kv_heads(text.geometry.heads, layer.kv_heads, parallel.size, parallel.rank)
            held = scales.setdefault(layer.index, torch.ones(2, len(own), dtype=torch.float32, device=device))
            held[side] = given.expand(layer.kv_heads)[own.start : own.stop]
    return {layer: held for layer, held in scales.items() if bool((held != 1).any())}
