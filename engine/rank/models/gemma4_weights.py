"""Gemma 4's tensors: which goes into which parameter, which part of it a rank holds, how a random one is drawn. No torch: shapes
are asked for without it."""

import re
from dataclasses import dataclass
from typing import Literal

from engine.geometry import Geometry, Layer

HEAD = "lm_head.weight"
_TOWERS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.", "vision_embedder.")
# Of the text model's tensors: as published with towers and without, and as classes of transformers write them.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")

Part = Literal["whole", "vocab", "columns", "depth", "q", "k", "v", "gate", "up", "gate_up"]
Init = Literal["matrix", "embedding", "ple_table", "norm", "head_norm", "scalar", "one"]
Present = Literal["always", "moe", "ple", "kv", "v", "head"]


@dataclass(frozen=True)
class Rule:
    """A checkpoint tensor (its name behind the text prefix, which the head's has not; {i} is the layer) and where it goes.

    shape: names of `sizes`; part: the rank's share of it and its place in a merged parameter, see `load.slices`;
    init: how a random one is drawn, see `load.random_fill`; present: which models and layers have it, see `is_present`.
    """

    name: str
    parameter: str
    shape: tuple[str, ...]
    part: Part = "whole"
    init: Init = "matrix"
    present: Present = "always"


def _norm(name: str, parameter: str, size: str = "hidden", present: Present = "always") -> Rule:
    return Rule(name, parameter, (size,), init="norm", present=present)


_I, _B = "layers.{i}.", "blocks.{i}."
TABLE = (
    Rule("embed_tokens.weight", "embedding.tokens.head.weight", ("vocab", "hidden"), "vocab", "embedding"),
    Rule("embed_tokens_per_layer.weight", "embedding.ple_tokens.head.weight", ("ple_vocab", "ples"), "vocab", "ple_table", "ple"),
    Rule("per_layer_model_projection.weight", "embedding.ple_projection.weight", ("ples", "hidden"), present="ple"),
    _norm("per_layer_projection_norm.weight", "embedding.ple_norm", "ple", "ple"),
    Rule(_I + "self_attn.q_proj.weight", _B + "attention.qkv.weight", ("q", "hidden"), "q"),
    Rule(_I + "self_attn.k_proj.weight", _B + "attention.qkv.weight", ("kv", "hidden"), "k", present="kv"),
    Rule(_I + "self_attn.v_proj.weight", _B + "attention.qkv.weight", ("kv", "hidden"), "v", present="v"),
    Rule(_I + "self_attn.o_proj.weight", _B + "attention.o.weight", ("hidden", "q"), "columns"),
    Rule(_I + "self_attn.q_norm.weight", _B + "attention.q_norm", ("head_dim",), init="head_norm"),
    Rule(_I + "self_attn.k_norm.weight", _B + "attention.k_norm", ("head_dim",), init="head_norm", present="kv"),
    Rule(_I + "mlp.gate_proj.weight", _B + "mlp.gate_up.weight", ("width", "hidden"), "gate"),
    Rule(_I + "mlp.up_proj.weight", _B + "mlp.gate_up.weight", ("width", "hidden"), "up"),
    Rule(_I + "mlp.down_proj.weight", _B + "mlp.down.weight", ("hidden", "width"), "columns"),
    Rule(_I + "router.proj.weight", _B + "router.proj.weight", ("experts", "hidden"), present="moe"),
    Rule(_I + "router.scale", _B + "router.scale", ("hidden",), init="one", present="moe"),
    _norm(_I + "router.per_expert_scale", _B + "router.per_expert_scale", "experts", "moe"),
    Rule(_I + "experts.gate_up_proj", _B + "experts.gate_up", ("experts", "expert_pair", "hidden"), "gate_up", present="moe"),
    Rule(_I + "experts.down_proj", _B + "experts.down", ("experts", "hidden", "expert"), "depth", present="moe"),
    _norm(_I + "pre_feedforward_layernorm_2.weight", _B + "norms.pre_experts", present="moe"),
    _norm(_I + "post_feedforward_layernorm_1.weight", _B + "norms.post_dense", present="moe"),
    _norm(_I + "post_feedforward_layernorm_2.weight", _B + "norms.post_experts", present="moe"),
    Rule(_I + "per_layer_input_gate.weight", _B + "ple_gate.weight", ("ple", "hidden"), present="ple"),
    Rule(_I + "per_layer_projection.weight", _B + "ple_out.weight", ("hidden", "ple"), present="ple"),
    _norm(_I + "post_per_layer_input_norm.weight", _B + "norms.post_ple", present="ple"),
    _norm(_I + "input_layernorm.weight", _B + "norms.pre_attention"),
    _norm(_I + "post_attention_layernorm.weight", _B + "norms.post_attention"),
    _norm(_I + "pre_feedforward_layernorm.weight", _B + "norms.pre_mlp"),
    _norm(_I + "post_feedforward_layernorm.weight", _B + "norms.post_mlp"),
    Rule(_I + "layer_scalar", _B + "scalar", ("one",), init="scalar"),
    _norm("norm.weight", "norm"),
    Rule(HEAD, "own_head.head.weight", ("vocab", "hidden"), "vocab", "embedding", "head"),
)


def is_present(when: Present, geometry: Geometry, layer: Layer) -> bool:
    """Whether `layer` of the model has tensors that are there `when`."""
    return {
        "always": True,
        "moe": geometry.moe is not None,
        "ple": geometry.ple > 0,
        "kv": layer.owns_kv,
        "v": layer.owns_kv and not layer.k_eq_v,
        "head": not geometry.tied,
    }[when]


def sizes(geometry: Geometry, layer: Layer) -> dict[str, int]:
    """Sizes of the axes that rules name."""
    expert = geometry.moe.intermediate if geometry.moe else 0
    return {
        "one": 1,
        "hidden": geometry.hidden,
        "vocab": geometry.vocab,
        "ple": geometry.ple,
        "ple_vocab": geometry.ple_vocab,
        "ples": geometry.ple * len(geometry.layers),
        "head_dim": layer.head_dim,
        "q": geometry.heads * layer.head_dim,
        "kv": layer.kv_heads * layer.head_dim,
        "width": layer.intermediate,
        "experts": geometry.moe.experts if geometry.moe else 0,
        "expert": expert,
        "expert_pair": 2 * expert,
    }


def is_unused(name: str, geometry: Geometry) -> bool:
    """Whether the text model does without the tensor of this published name: a tower's, the embedding again as head, K and V of
    layers that read another's."""
    if _is_of_tower(name) or (name == HEAD and geometry.tied):
        return True
    match = re.fullmatch(rf"{re.escape(geometry.prefix)}layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.weight", name)
    layer = int(match[1]) if match else len(geometry.layers)
    return layer < len(geometry.layers) and not geometry.layers[layer].owns_kv


def published_name(name: str, geometry: Geometry) -> str:
    """How published checkpoints of this layout name a tensor."""
    if _is_of_tower(name):
        return name
    behind = name.removeprefix(next(prefix for prefix in _PREFIXES if name.startswith(prefix)))
    return full_name(behind, geometry)


def full_name(name: str, geometry: Geometry) -> str:
    """A rule's name with the prefix of published checkpoints."""
    return name if name == HEAD else geometry.prefix + name


def _is_of_tower(name: str) -> bool:
    return name.removeprefix("model.").startswith(_TOWERS)
