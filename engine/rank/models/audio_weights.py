"""The tensors of Gemma 4's audio encoders. No torch: shapes are asked for without it."""

from engine.audio_geometry import AudioGeometry
from engine.geometry import Layer
from engine.rank.load.tensor_table import Rule, TensorTable

_T, _I, _B = "audio_tower.", "audio_tower.layers.{i}.", "blocks.{i}."
_PRODUCTS = {
    "self_attn.q_proj": ("attention.q", "tower", "tower"),
    "self_attn.k_proj": ("attention.k", "tower", "tower"),
    "self_attn.v_proj": ("attention.v", "tower", "tower"),
    "self_attn.post": ("attention.o", "tower", "tower"),
    "lconv1d.linear_start": ("convolution.start", "double", "tower"),
    "lconv1d.linear_end": ("convolution.end", "tower", "tower"),
    "feed_forward1.ffw_layer_1": ("first.up", "wide", "tower"),
    "feed_forward1.ffw_layer_2": ("first.down", "tower", "wide"),
    "feed_forward2.ffw_layer_1": ("second.up", "wide", "tower"),
    "feed_forward2.ffw_layer_2": ("second.down", "tower", "wide"),
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
_CONV = _T + "subsample_conv_projection."
_RULES = (
    Rule(_CONV + "layer0.conv.weight", "subsample.convolutions.0", ("first", "one", "three", "three"), kind="unpacked"),
    Rule(_CONV + "layer0.norm.weight", "subsample.norms.0", ("first",), kind="norm"),
    Rule(_CONV + "layer1.conv.weight", "subsample.convolutions.1", ("second", "first", "three", "three"), kind="unpacked"),
    Rule(_CONV + "layer1.norm.weight", "subsample.norms.1", ("second",), kind="norm"),
    Rule(_CONV + "input_proj_linear.weight", "subsample.out", ("tower", "flat")),
    *(Rule(f"{_I}{name}.linear.weight", f"{_B}{path}.weight", tuple(shape)) for name, (path, *shape) in _PRODUCTS.items()),
    *(Rule(f"{_I}{name}.weight", _B + path, ("tower",), kind="norm") for name, path in _NORMS.items()),
    Rule(_I + "self_attn.relative_k_proj.weight", _B + "attention.relative", ("tower", "tower")),
    Rule(_I + "self_attn.per_dim_scale", _B + "attention.scale", ("head_dim",), kind="norm", present="tower"),
    Rule(_I + "lconv1d.depthwise_conv1d.weight", _B + "convolution.depthwise", ("tower", "one", "kernel"), kind="unpacked"),
    Rule(_T + "output_proj.weight", "last", ("output", "tower"), kind="unpacked"),
    Rule(_T + "output_proj.bias", "bias", ("output",), kind="norm", present="tower"),
    Rule("embed_audio.embedding_projection.weight", "out", ("model", "output")),
)


def _sizes(geometry: AudioGeometry, layer: Layer) -> dict[str, int]:
    first, second = geometry.channels
    tower = 0 if geometry.unified else geometry.hidden
    return {
        "three": 3,
        "first": first,
        "second": second,
        "flat": geometry.features // 4 * second,
        "tower": tower,
        "double": 2 * tower,
        "wide": layer.intermediate,
        "head_dim": layer.head_dim,
        "kernel": geometry.kernel,
        "output": geometry.output,
        "model": geometry.model,
    }


TENSORS = TensorTable.of_encoder(_RULES, _sizes, "audio_tower.", "embed_audio.")
