"""The five nano geometries, and the config.json and tensor list that each one implies.

What makes a family member that member is kept: head dims 256 and 512, the sliding/full pattern ending on a full layer,
which KV heads divide by TP=4 and which do not, KV sharing, per-layer embeddings, experts beside the dense MLP. What
only costs time is small. hidden is 96: sqrt(96), like the square root of every public size, is not a bf16 number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from deploy.nano.tokenizer import MEDIA_IDS, VOCAB_SIZE

HEAD_DIM = 256
GLOBAL_HEAD_DIM = 512
MAX_POSITIONS = 4096

Kind = Literal["matrix", "embedding", "ple_embedding", "norm", "head_norm", "scalar", "router"]


@dataclass(frozen=True)
class Shape:
    """One nano geometry: `groups` x (`sliding` sliding layers + 1 full layer); widths in elements, window in tokens."""

    member: str
    groups: int
    sliding: int
    kv_heads: int
    kv_heads_full: int | None  # None: the full layers use kv_heads
    window: int
    mlp: int
    hidden: int = 96
    heads: int = 8
    unified: bool = False
    k_eq_v: bool = False
    kv_shared: int = 0
    double_wide: bool = False
    ple: int = 0
    experts: int = 0
    top_k: int = 0
    moe_mlp: int = 0

    @property
    def layer_types(self) -> list[str]:
        return (["sliding_attention"] * self.sliding + ["full_attention"]) * self.groups

    @property
    def layers(self) -> int:
        return self.groups * (self.sliding + 1)

    @property
    def small(self) -> bool:
        """True for E2B and E4B, whose published files differ in PLE, masks and template."""
        return self.ple > 0

    def is_full(self, layer: int) -> bool:
        return self.layer_types[layer] == "full_attention"

    def is_shared(self, layer: int) -> bool:
        return layer >= self.layers - self.kv_shared

    def head_dim(self, layer: int) -> int:
        return GLOBAL_HEAD_DIM if self.is_full(layer) else HEAD_DIM

    def kv(self, layer: int) -> int:
        return self.kv_heads_full or self.kv_heads if self.is_full(layer) else self.kv_heads

    def mlp_width(self, layer: int) -> int:
        return 2 * self.mlp if self.double_wide and self.is_shared(layer) else self.mlp


SHAPES: dict[str, Shape] = {
    shape.member: shape
    for shape in (
        Shape("e2b", 3, 2, 1, None, 64, 192, kv_shared=6, double_wide=True, ple=32),
        Shape("e4b", 2, 3, 2, None, 64, 192, kv_shared=4, ple=32),
        Shape("12b", 2, 2, 4, 1, 96, 192, unified=True, k_eq_v=True),
        Shape("26b-a4b", 2, 2, 4, 2, 96, 128, k_eq_v=True, experts=16, top_k=4, moe_mlp=64),
        Shape("31b", 2, 2, 4, 4, 64, 192, k_eq_v=True),
    )
}


@dataclass(frozen=True)
class Tensor:
    """A checkpoint tensor: its public name, its shape, and how its values are drawn."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


def tensors(shape: Shape) -> Iterator[Tensor]:
    """Every tensor of the public checkpoint's text part, dead K/V tensors of the KV-shared layers included."""
    yield _global("embed_tokens.weight", (VOCAB_SIZE, shape.hidden), "embedding")
    if shape.ple:
        yield from _ple_globals(shape)
    for layer in range(shape.layers):
        prefix = f"model.language_model.layers.{layer}."
        for name, dims, kind in _layer(shape, layer):
            yield Tensor(prefix + name, dims, kind)
    yield _global("norm.weight", (shape.hidden,), "norm")


_Row = tuple[str, tuple[int, ...], Kind]


def _global(name: str, dims: tuple[int, ...], kind: Kind) -> Tensor:
    return Tensor("model.language_model." + name, dims, kind)


def _ple_globals(shape: Shape) -> Iterator[Tensor]:
    packed = shape.layers * shape.ple
    yield _global("embed_tokens_per_layer.weight", (VOCAB_SIZE, packed), "ple_embedding")
    yield _global("per_layer_model_projection.weight", (packed, shape.hidden), "matrix")
    yield _global("per_layer_projection_norm.weight", (shape.ple,), "norm")


def _layer(shape: Shape, layer: int) -> Iterator[_Row]:
    yield from _attention(shape, layer)
    yield from _mlp(shape.hidden, shape.mlp_width(layer))
    if shape.experts:
        yield from _moe(shape)
    if shape.ple:
        yield from _ple(shape)
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield f"{norm}_layernorm.weight", (shape.hidden,), "norm"
    yield "layer_scalar", (1,), "scalar"


def _attention(shape: Shape, layer: int) -> Iterator[_Row]:
    hidden, dim = shape.hidden, shape.head_dim(layer)
    q, kv = shape.heads * dim, shape.kv(layer) * dim
    yield "self_attn.q_proj.weight", (q, hidden), "matrix"
    yield "self_attn.k_proj.weight", (kv, hidden), "matrix"
    if not (shape.k_eq_v and shape.is_full(layer)):
        yield "self_attn.v_proj.weight", (kv, hidden), "matrix"
    yield "self_attn.o_proj.weight", (hidden, q), "matrix"
    yield "self_attn.q_norm.weight", (dim,), "head_norm"
    yield "self_attn.k_norm.weight", (dim,), "head_norm"


def _mlp(hidden: int, width: int) -> Iterator[_Row]:
    yield "mlp.gate_proj.weight", (width, hidden), "matrix"
    yield "mlp.up_proj.weight", (width, hidden), "matrix"
    yield "mlp.down_proj.weight", (hidden, width), "matrix"


def _moe(shape: Shape) -> Iterator[_Row]:
    yield "router.proj.weight", (shape.experts, shape.hidden), "router"
    yield "router.scale", (shape.hidden,), "norm"
    yield "router.per_expert_scale", (shape.experts,), "norm"
    yield "experts.gate_up_proj", (shape.experts, 2 * shape.moe_mlp, shape.hidden), "matrix"
    yield "experts.down_proj", (shape.experts, shape.hidden, shape.moe_mlp), "matrix"
    for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
        yield f"{norm}.weight", (shape.hidden,), "norm"


def _ple(shape: Shape) -> Iterator[_Row]:
    yield "per_layer_input_gate.weight", (shape.ple, shape.hidden), "matrix"
    yield "per_layer_projection.weight", (shape.hidden, shape.ple), "matrix"
    yield "post_per_layer_input_norm.weight", (shape.hidden,), "norm"


def config(shape: Shape, dtype: str) -> dict[str, Any]:
    """The outer config.json. Vision and audio configs are null, so that no tower tensor is expected."""
    family = "gemma4_unified" if shape.unified else "gemma4"
    architecture = "Gemma4UnifiedForConditionalGeneration" if shape.unified else "Gemma4ForConditionalGeneration"
    return {
        "architectures": [architecture],
        "audio_config": None,
        "boa_token_id": MEDIA_IDS["<|audio>"],
        "boi_token_id": MEDIA_IDS["<|image>"],
        "dtype": dtype,
        "eoa_token_id": MEDIA_IDS["<audio|>"],
        "eoa_token_index": MEDIA_IDS["<audio|>"],
        "eoi_token_id": MEDIA_IDS["<image|>"],
        "eos_token_id": [1, 106],
        "audio_token_id": MEDIA_IDS["<|audio|>"],
        "image_token_id": MEDIA_IDS["<|image|>"],
        "video_token_id": MEDIA_IDS["<|video|>"],
        "initializer_range": 0.02,
        "model_type": family,
        "text_config": _text_config(shape, dtype, f"{family}_text"),
        "tie_word_embeddings": True,
        "vision_config": None,
    }


def _text_config(shape: Shape, dtype: str, model_type: str) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": shape.k_eq_v,
        "bos_token_id": 2,
        "dtype": dtype,
        "enable_moe_block": shape.experts > 0,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": GLOBAL_HEAD_DIM,
        "head_dim": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden,
        "hidden_size_per_layer_input": shape.ple,
        "initializer_range": 0.02,
        "intermediate_size": shape.mlp,
        "layer_types": shape.layer_types,
        "max_position_embeddings": MAX_POSITIONS,
        "model_type": model_type,
        "moe_intermediate_size": shape.moe_mlp or None,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts or None,
        "num_global_key_value_heads": shape.kv_heads_full,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_kv_shared_layers": shape.kv_shared,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": shape.window,
        "tie_word_embeddings": True,
        "top_k_experts": shape.top_k or None,
        "use_bidirectional_attention": None if shape.small else "vision",
        "use_cache": True,
        "use_double_wide_mlp": shape.double_wide,
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    }
