"""The tensors of vision and audio encoders. No torch."""

from collections.abc import Mapping

from engine.audio_geometry import AudioGeometry
from engine.geometry import Layer
from engine.media_geometry import MediaGeometry
from engine.rank.load.tensor_table import Rule, TensorTable, norm_rule
from engine.rank.models.gemma4_weights import BLOCK_NORMS
from engine.vision_geometry import PATCH, SIDE, VisionGeometry

_B = "blocks.{i}."
_T = "vision_tower."
_L = "vision_tower.encoder.layers.{i}."
_E = "vision_embedder."
_VISION = (
    Rule(f"{_T}patch_embedder.input_proj.weight", "patches", "tower patch"),
    Rule(f"{_T}patch_embedder.position_embedding_table", "positions", "axes positions tower", kind="unpacked"),
    *(Rule(f"{_L}self_attn.{name}_proj.linear.weight", f"{_B}{name}.weight", "heads hidden") for name in "qkv"),
    Rule(f"{_L}self_attn.o_proj.linear.weight", f"{_B}o.weight", "hidden heads"),
    *(Rule(f"{_L}self_attn.{name}_norm.weight", f"{_B}{name}_norm", "head_dim", kind="head_norm") for name in "qk"),
    *(Rule(f"{_L}mlp.{name}_proj.linear.weight", f"{_B}{name}.weight", "intermediate hidden") for name in ("gate", "up")),
    Rule(f"{_L}mlp.down_proj.linear.weight", f"{_B}down.weight", "hidden intermediate"),
    *(norm_rule(f"{_L}{name}.weight", f"{_B}norms.{own}", "tower") for name, own in BLOCK_NORMS.items()),
    *(norm_rule(f"{_T}{name}", name, "standardized") for name in ("std_bias", "std_scale")),
    Rule(f"{_E}patch_dense.weight", "dense.weight", "embedder cell", kind="unpacked"),
    norm_rule(f"{_E}patch_dense.bias", "dense.bias", "embedder"),
    Rule(f"{_E}pos_embedding", "positions", "positions axes embedder", kind="unpacked"),
    *(
        norm_rule(f"{_E}{norm}.{name}", f"{own}.{name}", size)
        for norm, own, size in (
            ("patch_ln1", "patch_norm", "cell"), ("patch_ln2", "dense_norm", "embedder"), ("pos_norm", "position_norm", "embedder")
        )
        for name in ("weight", "bias")
    ),
    Rule("embed_vision.embedding_projection.weight", "out", "model hidden"),
)


def _vision_sizes(geometry: VisionGeometry, layer: Layer) -> dict[str, int]:
    tower, embedder = (0, geometry.hidden) if geometry.unified else (geometry.hidden, 0)
    return {
        "axes": 2,
        "tower": tower,
        "embedder": embedder,
        "patch": 3 * PATCH**2,
        "cell": 3 * SIDE**2 if embedder else 0,
        "heads": geometry.heads * layer.head_dim,
        "standardized": geometry.hidden if geometry.standardize else 0,
    }


_A = "audio_tower."
_I = "audio_tower.layers.{i}."
_PRODUCTS = {
    **{f"self_attn.{name}_proj": (f"attention.{name}", "tower tower") for name in "qkv"},
    "self_attn.post": ("attention.o", "tower tower"),
    "lconv1d.linear_start": ("convolution.start", "double tower"),
    "lconv1d.linear_end": ("convolution.end", "tower tower"),
    "feed_forward1.ffw_layer_1": ("first.up", "intermediate tower"),
    "feed_forward1.ffw_layer_2": ("first.down", "tower intermediate"),
    "feed_forward2.ffw_layer_1": ("second.up", "intermediate tower"),
    "feed_forward2.ffw_layer_2": ("second.down", "tower intermediate"),
}
_NORMS = {
    "norm_pre_attn": "pre_attention",
    "norm_post_attn": "post_attention",
    "norm_out": "norm",
    "lconv1d.pre_layer_norm": "convolution.pre",
    "lconv1d.conv_norm": "convolution.norm",
    "feed_forward1.pre_layer_norm": "first.pre",
    "feed_forward1.post_layer_norm": "first.post",
    "feed_forward2.pre_layer_norm": "second.pre",
    "feed_forward2.post_layer_norm": "second.post",
}
_CONV = f"{_A}subsample_conv_projection."
_AUDIO = (
    Rule(f"{_CONV}layer0.conv.weight", "subsample.convolutions.0", "first one three three", kind="unpacked"),
    norm_rule(f"{_CONV}layer0.norm.weight", "subsample.norms.0", "first"),
    Rule(f"{_CONV}layer1.conv.weight", "subsample.convolutions.1", "second first three three", kind="unpacked"),
    norm_rule(f"{_CONV}layer1.norm.weight", "subsample.norms.1", "second"),
    Rule(f"{_CONV}input_proj_linear.weight", "subsample.out", "tower flat"),
    *(Rule(f"{_I}{name}.linear.weight", f"{_B}{path}.weight", shape) for name, (path, shape) in _PRODUCTS.items()),
    *(norm_rule(f"{_I}{name}.weight", f"{_B}{path}", "tower") for name, path in _NORMS.items()),
    Rule(f"{_I}self_attn.relative_k_proj.weight", f"{_B}attention.relative", "tower tower"),
    norm_rule(f"{_I}self_attn.per_dim_scale", f"{_B}attention.scale", "head_dim", present="tower"),
    Rule(f"{_I}lconv1d.depthwise_conv1d.weight", f"{_B}convolution.depthwise", "tower one kernel", kind="unpacked"),
    Rule(f"{_A}output_proj.weight", "last", "output tower", kind="unpacked"),
    norm_rule(f"{_A}output_proj.bias", "bias", "output", present="tower"),
    Rule("embed_audio.embedding_projection.weight", "out", "model output"),
)


def _audio_sizes(geometry: AudioGeometry, _: Layer) -> dict[str, int]:
    first, second = geometry.channels
    tower = 0 if geometry.unified else geometry.hidden
    return {
        "three": 3,
        "first": first,
        "second": second,
        "flat": geometry.features // 4 * second,
        "tower": tower,
        "double": 2 * tower,
    }


ENCODER_TENSORS: Mapping[type[MediaGeometry], TensorTable] = {
    VisionGeometry: TensorTable.of_encoder(_VISION, _vision_sizes, "vision_", "embed_vision."),
    AudioGeometry: TensorTable.of_encoder(_AUDIO, _audio_sizes, "audio_tower.", "embed_audio."),
}
