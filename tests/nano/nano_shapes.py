"""The five nano geometries, and the tensors that each one implies.

What makes a family member that member is kept: head dims 256 and 512, the sliding/full pattern ending on a full layer,
which KV heads divide by TP=4 and which do not, KV sharing, per-layer embeddings, experts beside the dense MLP. What
only costs time is small. hidden is 80: sqrt(80), like the square root of every public size, is not a bf16 number.
Towers keep their head size, and the place of each patch of the largest picture.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tests.nano.model_shapes import AudioShape, ModelShape, VisionShape
from tests.nano.nano_tokenizer import MEDIA_IDS, VOCAB_SIZE

MAX_POSITIONS = 4096

Kind = Literal["matrix", "embedding", "ple_embedding", "norm", "head_norm", "scalar", "router", "unit", "low", "high"]


_small_tower = VisionShape(64, 3360, layers=2, heads=2, head_dim=64, mlp=128, clipped=True)
_large_tower = VisionShape(64, 3360, layers=2, heads=2, head_dim=72, mlp=136, standardize=True)
_audio_tower = AudioShape(64, layers=2, heads=2, channels=(128, 8), output=48)
_nano = partial(ModelShape, hidden=80, heads=8, positions=MAX_POSITIONS, vocab=VOCAB_SIZE, media=MEDIA_IDS)

SHAPES: dict[str, ModelShape] = {
    shape.member: shape
    for shape in (
        _nano("e2b", 2, 2, 1, None, 64, 192, kv_shared=3, double_wide=True, ple=32, vision=_small_tower, audio=_audio_tower),
        _nano("e4b", 2, 3, 2, None, 64, 192, kv_shared=4, ple=32, vision=_small_tower, audio=_audio_tower),
        _nano("12b", 2, 2, 4, 1, 96, 192, unified=True, k_eq_v=True, vision=VisionShape(64, 1120), audio=AudioShape(640)),
        _nano("26b-a4b", 1, 4, 4, 2, 64, 96, k_eq_v=True, experts=16, top_k=4, moe_mlp=48, vision=_large_tower),
        _nano("31b", 2, 2, 4, 4, 64, 192, k_eq_v=True, vision=_large_tower),
    )
}


@dataclass(frozen=True)
class Tensor:
    """A checkpoint tensor: its public name, its shape, and how its values are drawn."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


def tensors(shape: ModelShape) -> Iterator[Tensor]:
    """Every tensor of the public checkpoint, dead K/V tensors of the KV-shared layers included."""
    yield _global("embed_tokens.weight", (VOCAB_SIZE, shape.hidden), "embedding")
    if shape.ple:
        yield from _ple_globals(shape)
    for layer in range(shape.layers):
        prefix = f"model.language_model.layers.{layer}."
        for name, dims, kind in _layer(shape, layer):
            yield Tensor(prefix + name, dims, kind)
    yield _global("norm.weight", (shape.hidden,), "norm")
    if shape.vision is not None:
        rows = _tower(shape.vision) if shape.vision.layers else _vision_embedder(shape.vision)
        yield from (Tensor("model." + name, dims, kind) for name, dims, kind in rows)
        yield Tensor("model.embed_vision.embedding_projection.weight", (shape.hidden, shape.vision.hidden), "matrix")
    if shape.audio is not None:
        yield from (Tensor("model.audio_tower." + name, dims, kind) for name, dims, kind in _audio_tensors(shape.audio))
        width = shape.audio.output or shape.audio.width
        yield Tensor("model.embed_audio.embedding_projection.weight", (shape.hidden, width), "matrix")


_Row = tuple[str, tuple[int, ...], Kind]


def _global(name: str, dims: tuple[int, ...], kind: Kind) -> Tensor:
    return Tensor("model.language_model." + name, dims, kind)


def _ple_globals(shape: ModelShape) -> Iterator[Tensor]:
    packed = shape.layers * shape.ple
    yield _global("embed_tokens_per_layer.weight", (VOCAB_SIZE, packed), "ple_embedding")
    yield _global("per_layer_model_projection.weight", (packed, shape.hidden), "matrix")
    yield _global("per_layer_projection_norm.weight", (shape.ple,), "norm")


def _layer(shape: ModelShape, layer: int) -> Iterator[_Row]:
    yield from _attention(shape, layer)
    yield from _mlp(shape.hidden, shape.mlp_width(layer))
    if shape.experts:
        yield from _moe(shape)
    if shape.ple:
        yield from _ple(shape)
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield f"{norm}_layernorm.weight", (shape.hidden,), "norm"
    yield "layer_scalar", (1,), "scalar"


def _attention(shape: ModelShape, layer: int) -> Iterator[_Row]:
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


def _moe(shape: ModelShape) -> Iterator[_Row]:
    yield "router.proj.weight", (shape.experts, shape.hidden), "router"
    yield "router.scale", (shape.hidden,), "norm"
    yield "router.per_expert_scale", (shape.experts,), "norm"
    yield "experts.gate_up_proj", (shape.experts, 2 * shape.moe_mlp, shape.hidden), "matrix"
    yield "experts.down_proj", (shape.experts, shape.hidden, shape.moe_mlp), "matrix"
    for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
        yield f"{norm}.weight", (shape.hidden,), "norm"


def _ple(shape: ModelShape) -> Iterator[_Row]:
    yield "per_layer_input_gate.weight", (shape.ple, shape.hidden), "matrix"
    yield "per_layer_projection.weight", (shape.hidden, shape.ple), "matrix"
    yield "post_per_layer_input_norm.weight", (shape.hidden,), "norm"


def _vision_embedder(vision: VisionShape) -> Iterator[_Row]:
    """The 12B's."""
    yield "vision_embedder.patch_dense.weight", (vision.hidden, 6912), "matrix"
    yield "vision_embedder.patch_dense.bias", (vision.hidden,), "unit"
    yield "vision_embedder.pos_embedding", (vision.positions, 2, vision.hidden), "unit"
    for norm, width in (("patch_ln1", 6912), ("patch_ln2", vision.hidden), ("pos_norm", vision.hidden)):
        yield f"vision_embedder.{norm}.weight", (width,), "norm"
        yield f"vision_embedder.{norm}.bias", (width,), "unit"


def _tower(vision: VisionShape) -> Iterator[_Row]:
    hidden, mlp, heads = vision.hidden, vision.mlp, vision.heads * vision.head_dim
    yield "vision_tower.patch_embedder.input_proj.weight", (hidden, 768), "matrix"
    yield "vision_tower.patch_embedder.position_embedding_table", (2, vision.positions, hidden), "unit"
    if vision.standardize:
        yield "vision_tower.std_bias", (hidden,), "unit"
        yield "vision_tower.std_scale", (hidden,), "norm"
    products = {f"self_attn.{name}_proj": (heads, hidden) for name in "qkv"} | {"self_attn.o_proj": (hidden, heads)}
    products |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
    for layer in range(vision.layers):
        prefix = f"vision_tower.encoder.layers.{layer}."
        for name, dims in products.items():
            yield from _bounded(prefix + name, dims) if vision.clipped else ((f"{prefix}{name}.linear.weight", dims, "matrix"),)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{prefix}{norm}_layernorm.weight", (hidden,), "norm"
        for norm in "qk":
            yield f"{prefix}self_attn.{norm}_norm.weight", (vision.head_dim,), "head_norm"


def _audio_tensors(audio: AudioShape) -> Iterator[_Row]:
    """None without layers."""
    if not audio.layers:
        return
    width, (first, second), name = audio.width, audio.channels, "subsample_conv_projection"
    for index, (rows, columns) in enumerate(((first, 1), (second, first))):
        yield f"{name}.layer{index}.conv.weight", (rows, columns, 3, 3), "matrix"
        yield f"{name}.layer{index}.norm.weight", (rows,), "norm"
    yield f"{name}.input_proj_linear.weight", (width, 32 * second), "matrix"
    for layer in range(audio.layers):
        for name, dims, kind in _conformer(width, audio.heads):
            yield f"layers.{layer}.{name}", dims, kind
    yield "output_proj.weight", (audio.output, width), "matrix"
    yield "output_proj.bias", (audio.output,), "unit"


def _conformer(width: int, heads: int) -> Iterator[_Row]:
    products = {f"self_attn.{name}": (width, width) for name in ("q_proj", "k_proj", "v_proj", "post")}
    products |= {"lconv1d.linear_start": (2 * width, width), "lconv1d.linear_end": (width, width)}
    norms = ["norm_pre_attn", "norm_post_attn", "norm_out", "lconv1d.pre_layer_norm", "lconv1d.conv_norm"]
    for half in ("feed_forward1", "feed_forward2"):
        products |= {f"{half}.ffw_layer_1": (4 * width, width), f"{half}.ffw_layer_2": (width, 4 * width)}
        norms += [f"{half}.pre_layer_norm", f"{half}.post_layer_norm"]
    for name, dims in products.items():
        yield from _bounded(name, dims)
    yield from ((f"{norm}.weight", (width,), "norm") for norm in norms)
    yield "self_attn.relative_k_proj.weight", (width, width), "matrix"
    yield "self_attn.per_dim_scale", (width // heads,), "unit"
    yield "lconv1d.depthwise_conv1d.weight", (width, 1, 5), "matrix"


def _bounded(name: str, dims: tuple[int, ...]) -> Iterator[_Row]:
    yield f"{name}.linear.weight", dims, "matrix"
    for side in ("input", "output"):
        yield f"{name}.{side}_min", (), "low"
        yield f"{name}.{side}_max", (), "high"
