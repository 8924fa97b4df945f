"""Gemma 4's tensors. No torch."""

import re

from engine.geometry import Geometry, Layer
from engine.rank.load.tensor_table import HEAD, Rule, TensorTable, norm_rule

_TOWERS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.", "vision_embedder.")
# Of the text model's tensors: as published with towers and without, and as classes of transformers write them.
_PREFIX = re.compile(r"^(model\.language_model|language_model\.model|language_model|model)\.")
BLOCK_NORMS = {  # of a block, by its own names: drafters and towers have the same
    "input_layernorm": "pre_attention",
    "post_attention_layernorm": "post_attention",
    "pre_feedforward_layernorm": "pre_mlp",
    "post_feedforward_layernorm": "post_mlp",
}
_I = "layers.{i}."
_B = "blocks.{i}."


def block_rules(layer: str) -> tuple[Rule, ...]:
    """Rules of blocks that drafters have too. layer: prefix of a layer's tensors."""
    return (
        Rule(f"{layer}self_attn.q_proj.weight", f"{_B}attention.qkv", "q hidden", "q"),
        Rule(f"{layer}self_attn.o_proj.weight", f"{_B}attention.o", "hidden q", "columns"),
        Rule(f"{layer}self_attn.q_norm.weight", f"{_B}attention.q_norm", "head_dim", kind="head_norm"),
        Rule(f"{layer}mlp.gate_proj.weight", f"{_B}mlp.gate_up", "intermediate hidden", "gate"),
        Rule(f"{layer}mlp.up_proj.weight", f"{_B}mlp.gate_up", "intermediate hidden", "up"),
        Rule(f"{layer}mlp.down_proj.weight", f"{_B}mlp.down", "hidden intermediate", "columns"),
        *(norm_rule(f"{layer}{name}.weight", f"{_B}norms.{norm}") for name, norm in BLOCK_NORMS.items()),
        Rule(f"{layer}layer_scalar", f"{_B}scalar", "one", kind="scalar"),
    )


_RULES = (
    Rule("embed_tokens.weight", "embedding.tokens.head", "vocab hidden", "vocab", "embedding"),
    Rule("embed_tokens_per_layer.weight", "embedding.ple_tokens.head", "ple_vocab ples", "vocab", "ple_table"),
    Rule("per_layer_model_projection.weight", "embedding.ple_projection", "ples hidden"),
    norm_rule("per_layer_projection_norm.weight", "embedding.ple_norm", "ple"),
    *block_rules(_I),
    Rule(f"{_I}self_attn.k_proj.weight", f"{_B}attention.qkv", "kv hidden", "k"),
    Rule(f"{_I}self_attn.v_proj.weight", f"{_B}attention.qkv", "v hidden", "v"),
    Rule(f"{_I}self_attn.k_norm.weight", f"{_B}attention.k_norm", "head_dim", kind="head_norm", present="kv"),
    Rule(f"{_I}router.proj.weight", f"{_B}router.proj", "experts hidden", kind="unpacked"),
    Rule(f"{_I}router.scale", f"{_B}router.scale", "hidden", kind="one", present="experts"),
    norm_rule(f"{_I}router.per_expert_scale", f"{_B}router.per_expert_scale", "experts"),
    Rule(f"{_I}experts.gate_up_proj", f"{_B}experts.gate_up", "experts expert_pair hidden", "gate_up", fused=True),
    Rule(f"{_I}experts.down_proj", f"{_B}experts.down", "experts hidden expert", "depth", fused=True),
    Rule(f"{_I}experts.{{e}}.gate_proj.weight", f"{_B}experts.gate_up", "expert hidden", "gate", present="experts", fused=False),
    Rule(f"{_I}experts.{{e}}.up_proj.weight", f"{_B}experts.gate_up", "expert hidden", "up", present="experts", fused=False),
    Rule(f"{_I}experts.{{e}}.down_proj.weight", f"{_B}experts.down", "hidden expert", "columns", present="experts", fused=False),
    norm_rule(f"{_I}pre_feedforward_layernorm_2.weight", f"{_B}norms.pre_experts", present="experts"),
    norm_rule(f"{_I}post_feedforward_layernorm_1.weight", f"{_B}norms.post_dense", present="experts"),
    norm_rule(f"{_I}post_feedforward_layernorm_2.weight", f"{_B}norms.post_experts", present="experts"),
    Rule(f"{_I}per_layer_input_gate.weight", f"{_B}ple_gate", "ple hidden"),
    Rule(f"{_I}per_layer_projection.weight", f"{_B}ple_out", "hidden ple"),
    norm_rule(f"{_I}post_per_layer_input_norm.weight", f"{_B}norms.post_ple", present="ple"),
    norm_rule("norm.weight", "norm"),
    Rule(HEAD, "own_head.head", "head hidden", "vocab", "embedding"),
)


def _sizes(geometry: Geometry, layer: Layer) -> dict[str, int]:
    expert = geometry.moe.intermediate if geometry.moe else 0
    kv = layer.kv_heads * layer.head_dim if layer.owns_kv else 0
    return {
        "head": 0 if geometry.tied else geometry.vocab,
        "ples": geometry.ple * len(geometry.layers),
        "q": geometry.heads * layer.head_dim,
        "kv": kv,
        "v": 0 if layer.k_eq_v else kv,
        "experts": geometry.moe.experts if geometry.moe else 0,
        "expert": expert,
        "expert_pair": 2 * expert,
    }


def _is_unused(name: str, geometry: Geometry) -> bool:
    if _is_of_tower(name) or (name == HEAD and geometry.tied):
        return True
    match = re.fullmatch(rf"{re.escape(geometry.prefix)}layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.\w+", name)
    layer = int(match[1]) if match else len(geometry.layers)
    return layer < len(geometry.layers) and not geometry.layers[layer].owns_kv


def _published_name(name: str, geometry: Geometry) -> str:
    if _is_of_tower(name):
        return name
    rest = _PREFIX.sub("", name)
    if rest == HEAD:
        return rest
    return geometry.prefix + rest


def _is_of_tower(name: str) -> bool:
    return name.removeprefix("model.").startswith(_TOWERS)


TENSORS = TensorTable(_RULES, _sizes, _published_name, _is_unused)
