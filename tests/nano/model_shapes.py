"""The shape of a Gemma 4 model, its config.json in the published layout, and the five public shapes.

Source: the public config.json files.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

HEAD_DIM = 256
GLOBAL_HEAD_DIM = 512
VOCAB = 262144
MEDIA = {
    "<|image>": 255999,
    "<|audio>": 256000,
    "<|image|>": 258880,
    "<|audio|>": 258881,
    "<image|>": 258882,
    "<audio|>": 258883,
    "<|video|>": 258884,
}


@dataclass(frozen=True)
class VisionShape:
    """A vision tower; without layers, the 12B's embedder. positions: entries of its table a side; clipped: products have bounds;
    standardize: of what it yields."""

    hidden: int
    positions: int
    layers: int = 0
    heads: int = 0
    head_dim: int = 0
    mlp: int = 0
    clipped: bool = False
    standardize: bool = False


@dataclass(frozen=True)
class AudioShape:
    """An audio tower; without layers, the 12B's samples a row. channels: of its convolutions; output: width of what it yields."""

    width: int
    layers: int = 0
    heads: int = 0
    channels: tuple[int, int] = (0, 0)
    output: int = 0


@dataclass(frozen=True)
class ModelShape:
    """One model: its text part is `groups` x (`sliding` sliding layers + 1 full layer); widths in elements, window and positions in
    tokens.

    `media`: ids of the control tokens around and for images, audio and video, by their names.
    """

    member: str
    groups: int
    sliding: int
    kv_heads: int
    kv_heads_full: int | None  # None: the full layers use kv_heads
    window: int
    mlp: int
    _: KW_ONLY
    hidden: int
    heads: int
    positions: int
    vocab: int
    media: Mapping[str, int]
    unified: bool = False
    k_eq_v: bool = False
    kv_shared: int = 0
    double_wide: bool = False
    ple: int = 0
    experts: int = 0
    top_k: int = 0
    moe_mlp: int = 0
    vision: VisionShape | None = None
    audio: AudioShape | None = None

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


_small_tower = VisionShape(768, 10240, layers=16, heads=12, head_dim=64, mlp=3072, clipped=True)
_large_tower = VisionShape(1152, 10240, layers=27, heads=16, head_dim=72, mlp=4304, standardize=True)
_audio_tower = AudioShape(1024, layers=12, heads=8, channels=(128, 32), output=1536)
_small = partial(ModelShape, heads=8, positions=131072, vocab=VOCAB, media=MEDIA, ple=256, vision=_small_tower, audio=_audio_tower)
_ROWS = AudioShape(640)
_large = partial(ModelShape, positions=262144, vocab=VOCAB, media=MEDIA, k_eq_v=True, vision=_large_tower)

# Elements of the published drafters, the order of ids by cluster included.
PUBLISHED_DRAFTERS = {"e2b": 77_993_476, "e4b": 78_779_908, "12b": 422_856_964, "26b-a4b": 419_711_236, "31b": 469_518_596}
PUBLIC: dict[str, ModelShape] = {
    shape.member: shape
    for shape in (
        _small("e2b", 7, 4, 1, None, 512, 6144, hidden=1536, kv_shared=20, double_wide=True),
        _small("e4b", 7, 5, 2, None, 512, 10240, hidden=2560, kv_shared=18),
        _large("12b", 8, 5, 8, 1, 1024, 15360, hidden=3840, heads=16, unified=True, vision=VisionShape(3840, 1120), audio=_ROWS),
        _large("26b-a4b", 5, 5, 8, 2, 1024, 2112, hidden=2816, heads=16, experts=128, top_k=8, moe_mlp=704),
        _large("31b", 10, 5, 16, 4, 1024, 21504, hidden=5376, heads=32),
    )
}


def config(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """The outer config.json."""
    family = "gemma4_unified" if shape.unified else "gemma4"
    architecture = "Gemma4UnifiedForConditionalGeneration" if shape.unified else "Gemma4ForConditionalGeneration"
    return {
        "architectures": [architecture],
        "audio_config": None if shape.audio is None else _audio_config(shape.audio, family),
        "boa_token_id": shape.media["<|audio>"],
        "boi_token_id": shape.media["<|image>"],
        "dtype": dtype,
        "eoa_token_id": shape.media["<audio|>"],
        "eoa_token_index": shape.media["<audio|>"],
        "eoi_token_id": shape.media["<image|>"],
        "eos_token_id": [1, 106],
        "audio_token_id": shape.media["<|audio|>"],
        "image_token_id": shape.media["<|image|>"],
        "video_token_id": shape.media["<|video|>"],
        "initializer_range": 0.02,
        "model_type": family,
        "text_config": _text_config(shape, dtype, f"{family}_text"),
        "tie_word_embeddings": True,
        "vision_config": None if shape.vision is None else _vision_config(shape.vision, family),
    }


def _vision_config(vision: VisionShape, family: str) -> dict[str, Any]:
    common = {"model_type": f"{family}_vision", "patch_size": 16, "pooling_kernel_size": 3, "rms_norm_eps": 1e-06}
    if not vision.layers:
        sizes = {"mm_embed_dim": vision.hidden, "mm_posemb_size": vision.positions, "output_proj_dims": vision.hidden}
        return {**common, **sizes, "model_patch_size": 48, "num_soft_tokens": 280}
    return {
        **common,
        "attention_bias": False,
        "default_output_length": 280,
        "head_dim": vision.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": vision.hidden,
        "intermediate_size": vision.mlp,
        "num_attention_heads": vision.heads,
        "num_hidden_layers": vision.layers,
        "num_key_value_heads": vision.heads,
        "position_embedding_size": vision.positions,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        "standardize": vision.standardize,
        "use_clipped_linears": vision.clipped,
    }


def _audio_config(audio: AudioShape, family: str) -> dict[str, Any]:
    common = {"model_type": f"{family}_audio", "rms_norm_eps": 1e-06}
    if not audio.layers:
        return {**common, "audio_embed_dim": audio.width, "audio_samples_per_token": audio.width, "output_proj_dims": audio.width}
    return {
        **common,
        "attention_chunk_size": 12,
        "attention_context_left": 13,
        "attention_context_right": 0,
        "attention_invalid_logits_value": -1e9,
        "attention_logit_cap": 50.0,
        "conv_kernel_size": 5,
        "gradient_clipping": 1e10,
        "hidden_act": "silu",
        "hidden_size": audio.width,
        "num_attention_heads": audio.heads,
        "num_hidden_layers": audio.layers,
        "output_proj_dims": audio.output,
        "residual_weight": 0.5,
        "subsampling_conv_channels": list(audio.channels),
        "use_clipped_linears": True,
    }


def _text_config(shape: ModelShape, dtype: str, model_type: str) -> dict[str, Any]:
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
        "max_position_embeddings": shape.positions,
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
        "vocab_size": shape.vocab,
        "vocab_size_per_layer_input": shape.vocab,
    }
