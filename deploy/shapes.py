"""The public shapes by name, for benchmarks with random weights: config.json in the published layout, and no weights at all.

    dummy:<member> -> config.json, generation_config.json, tokenizer and template (the nano ones stand in)

Source: the public config.json files; vision and audio parts are left out, so that no tower is expected.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.nano import build as nano_build
from deploy.nano import tokenizer
from engine.errors import ConfigError

VOCAB = 262144


@dataclass(frozen=True)
class PublicShape:
    """One published text model: `groups` x (`sliding` sliding layers + 1 full layer)."""

    hidden: int
    groups: int
    sliding: int
    heads: int
    kv_heads: int
    kv_heads_full: int | None
    window: int
    mlp: int
    positions: int
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


SHAPES: dict[str, PublicShape] = {
    "e2b": PublicShape(1536, 7, 4, 8, 1, None, 512, 6144, 131072, kv_shared=20, double_wide=True, ple=256),
    "e4b": PublicShape(2560, 7, 5, 8, 2, None, 512, 10240, 131072, kv_shared=18, ple=256),
    "12b": PublicShape(3840, 8, 5, 16, 8, 1, 1024, 15360, 262144, unified=True, k_eq_v=True),
    "26b-a4b": PublicShape(2816, 5, 5, 16, 8, 2, 1024, 2112, 262144, k_eq_v=True, experts=128, top_k=8, moe_mlp=704),
    "31b": PublicShape(5376, 10, 5, 32, 16, 4, 1024, 21504, 262144, k_eq_v=True),
}


def config(shape: PublicShape) -> dict[str, Any]:
    """The outer config.json."""
    family = "gemma4_unified" if shape.unified else "gemma4"
    return {
        "architectures": ["Gemma4UnifiedForConditionalGeneration" if shape.unified else "Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "model_type": family,
        "text_config": _text_config(shape, f"{family}_text"),
        "tie_word_embeddings": True,
        "vision_config": None,
    }


def _text_config(shape: PublicShape, model_type: str) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_k_eq_v": shape.k_eq_v,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": shape.experts > 0,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden,
        "hidden_size_per_layer_input": shape.ple,
        "intermediate_size": shape.mlp,
        "layer_types": shape.layer_types,
        "max_position_embeddings": shape.positions,
        "model_type": model_type,
        "moe_intermediate_size": shape.moe_mlp or None,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts or None,
        "num_global_key_value_heads": shape.kv_heads_full,
        "num_hidden_layers": len(shape.layer_types),
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
        "use_bidirectional_attention": None if shape.ple else "vision",
        "use_double_wide_mlp": shape.double_wide,
        "vocab_size": VOCAB,
        "vocab_size_per_layer_input": VOCAB,
    }


def write(member: str, folder: Path, nano: Path) -> Path:
    """Writes a public shape's folder; `nano` is the nano checkpoint whose template stands in. ConfigError: unknown member."""
    if member not in SHAPES:
        raise ConfigError(f"model: dummy:{member} is not one of {', '.join(f'dummy:{name}' for name in SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(SHAPES[member]), indent=2) + "\n", encoding="utf-8")
    tokenizer.write(folder)
    for name in ("generation_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((nano / name).read_bytes())
    return folder


def ensure(member: str, cache: Path) -> Path:
    """The shape's folder under `cache`; written anew, whole, by every process that asks (a few kilobytes)."""
    if member not in SHAPES:
        raise ConfigError(f"model: dummy:{member} is not one of {', '.join(f'dummy:{name}' for name in SHAPES)}")
    nano = nano_build.ensure(member, cache)
    return write(member, cache / f"dummy-{member}-{nano.name}", nano)
