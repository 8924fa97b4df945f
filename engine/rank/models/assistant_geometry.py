"""The shape of a Gemma 4 assistant, read for its target. No torch. Each layer reads K and V of the target's last layer of its
kind that owns them. Source: transformers' `models/gemma4_assistant`.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from engine.checkpoint import read_json
from engine.errors import CheckpointError
from engine.geometry import Geometry, Layer, naming, parse_config, shard_kv_heads

_SUFFIX = "_assistant"


@dataclass(frozen=True)
class AssistantGeometry(Geometry):
    backbone: int  # the target's hidden size
    centroids: int  # clusters of the head's vocabulary; 0: all ids are read
    centroid_top_k: int  # clusters that are read


def read_assistant(folder: Path, target: Geometry, tp: int = 1) -> AssistantGeometry:
    """CheckpointError: no assistant, another model's, or not divisible by `tp`."""
    path = folder / "config.json"
    config = read_json(path)
    kind = str(config.get("model_type"))
    if not kind.endswith(_SUFFIX):
        raise CheckpointError(f"{path}: model_type {kind!r} is no Gemma 4 assistant")
    with naming(str(path)):
        text = {**config["text_config"], "num_kv_shared_layers": 0}
        ordered = config["use_ordered_embeddings"]
        backbone = config["backbone_hidden_size"]
        if ordered:
            centroids = (config["num_centroids"], config["centroid_intermediate_top_k"])
        else:
            centroids = (0, 0)
        shape = parse_config({**config, "model_type": kind.removesuffix(_SUFFIX), "text_config": text}, str(path))
        layers = tuple(replace(layer, kv_source=_source(layer, target, path), drafts=True) for layer in shape.layers)
        fields = {**vars(shape), "prefix": "model.", "layers": layers}
        assistant = AssistantGeometry(**fields, backbone=backbone, centroids=centroids[0], centroid_top_k=centroids[1])
        msgspec.convert(msgspec.to_builtins(assistant), AssistantGeometry)  # every number is one
    if wrong := _unlike(assistant, target):
        raise CheckpointError(f"mtp.model: {folder} is no drafter of this model: {'; '.join(wrong)}")
    check_shards(assistant, target, tp)
    return assistant


def _source(layer: Layer, target: Geometry, path: Path) -> int:
    owners = [other.index for other in target.layers if other.kind == layer.kind and other.owns_kv]
    if not owners:
        raise CheckpointError(f"{path}: layer {layer.index} reads {layer.kind} layers, and the model has none")
    return owners[-1]


def _unlike(assistant: AssistantGeometry, target: Geometry) -> list[str]:
    pairs: list[tuple[str, object, object]] = [
        ("hidden size of its model", assistant.backbone, target.hidden),
        ("vocabulary", assistant.vocab, target.vocab),
        ("window", assistant.window, target.window),
    ]
    for layer in assistant.layers:
        source = target.layers[layer.kv_source]
        pairs += [
            (f"head size of layer {layer.index}", layer.head_dim, source.head_dim),
            (f"KV heads of layer {layer.index}", layer.kv_heads, source.kv_heads),
            (f"rotary embedding of layer {layer.index}", layer.rope, source.rope),
        ]
    wrong = [f"{name} {own}, not {other}" for name, own, other in pairs if own != other]
    if assistant.centroids and assistant.vocab % assistant.centroids:
        wrong.append(f"{assistant.vocab} ids are no whole number for each of {assistant.centroids} centroids")
    if assistant.centroids and not 0 < assistant.centroid_top_k <= assistant.centroids:
        wrong.append(f"{assistant.centroid_top_k} of {assistant.centroids} centroids cannot be looked at")
    return wrong


def check_shards(assistant: AssistantGeometry, target: Geometry, tp: int) -> None:
    """CheckpointError unless each rank holds the K and V of its query heads."""
    for layer in assistant.layers:
        kv_heads = layer.kv_heads
        for rank in range(tp):
            held = shard_kv_heads(target.heads, kv_heads, tp, rank)
            if assistant.heads % tp or shard_kv_heads(assistant.heads, kv_heads, tp, rank) != held:
                raise CheckpointError(f"the drafter's {assistant.heads} query heads cannot be cut for {tp} ranks")
