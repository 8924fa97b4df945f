"""transformers' Gemma 4 assistants: random ones for the nano targets, as the library writes them, and what one drafts."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig

from tests.nano.model_shapes import GLOBAL_HEAD_DIM, HEAD_DIM, ModelShape

HIDDEN, WIDTH, CENTROIDS, TOP_K = 32, 64, 64, 8


@contextmanager
def all_shared() -> Iterator[None]:
    """transformers 5.23 cannot build a model all of whose layers read another's K and V; 5.17 can."""
    with _modes(property(lambda self: ["reuse"] * self.num_hidden_layers)):
        yield


@contextmanager
def _modes(modes: property) -> Iterator[None]:
    with (
        patch.object(Gemma4TextConfig, "kv_sharing_modes", modes, create=True),
        patch.object(Gemma4UnifiedTextConfig, "kv_sharing_modes", modes, create=True),
    ):
        yield


def _text(shape: ModelShape, hidden: int, width: int) -> dict[str, Any]:
    return {
        "attention_k_eq_v": shape.k_eq_v,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "global_head_dim": GLOBAL_HEAD_DIM,
        "head_dim": HEAD_DIM,
        "hidden_size": hidden,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": width,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "max_position_embeddings": shape.positions,
        "num_attention_heads": shape.heads,
        "num_global_key_value_heads": shape.kv_heads_full,
        "num_hidden_layers": 4,
        "num_key_value_heads": shape.kv_heads,
        "num_kv_shared_layers": 4,
        "sliding_window": shape.window,
        "use_double_wide_mlp": False,
        "vocab_size": shape.vocab,
        "vocab_size_per_layer_input": 0,
    }


def _classes(shape: ModelShape) -> tuple[Any, Any, Any]:
    family = "gemma4_unified" if shape.unified else "gemma4"
    name = "Gemma4Unified" if shape.unified else "Gemma4"
    models = "transformers.models"
    texts = importlib.import_module(f"{models}.{family}.configuration_{family}")
    configs = importlib.import_module(f"{models}.{family}_assistant.configuration_{family}_assistant")
    modeling = importlib.import_module(f"{models}.{family}_assistant.modeling_{family}_assistant")
    model = getattr(modeling, f"{name}AssistantForCausalLM")
    return getattr(texts, f"{name}TextConfig"), getattr(configs, f"{name}AssistantConfig"), model


def write(shape: ModelShape, folder: Path, seed: int = 0) -> Any:
    """A random assistant of a nano target in fp32, saved into `folder`; the model. Small members have the ordered head."""
    made = build(shape, hidden=HIDDEN, width=WIDTH, ordered=shape.small, seed=seed)
    with all_shared():
        made.save_pretrained(folder)
    return made


def load_target(folder: Path) -> Any:
    """The text model of the checkpoint in `folder`, fp32, whose last layers of each kind give their K and V."""

    def modes(config: Any) -> list[str | None]:
        owners = config.num_hidden_layers - config.num_kv_shared_layers
        last = {kind: at for at, kind in enumerate(config.layer_types[:owners])}
        stored = ["store" if at in last.values() else None for at in range(owners)]
        return stored + ["reuse"] * config.num_kv_shared_layers

    with _modes(property(modes)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.model.language_model.eval().requires_grad_(requires_grad=False)


def build(shape: ModelShape, *, hidden: int, width: int, ordered: bool, seed: int = 0) -> Any:
    """A random assistant of a nano target in fp32."""
    text, config, model = _classes(shape)
    torch.manual_seed(seed)
    with all_shared():
        made = model(
            config(
                text_config=text(**_text(shape, hidden, width)),
                backbone_hidden_size=shape.hidden,
                use_ordered_embeddings=ordered,
                num_centroids=CENTROIDS,
                centroid_intermediate_top_k=TOP_K,
            )
        ).eval()
        for name, parameter in made.named_parameters():
            if "q_norm" in name:
                parameter.data = (1 + 0.1 * torch.randn(parameter.shape)) / parameter.shape[0] ** 0.25
            elif parameter.dim() < 2:
                parameter.data = 1 + 0.2 * torch.randn(parameter.shape)
            else:
                parameter.data = torch.randn(parameter.shape) / parameter.shape[1] ** 0.5
        if ordered:
            made.masked_embedding.token_ordering.copy_(torch.randperm(shape.vocab))
        made.lm_head.weight = made.model.embed_tokens.weight
    return made


@torch.no_grad()
def drafts(
    model: Any, count: int, ids: Tensor, hidden: Tensor, embed: Callable[[Tensor], Tensor], shared: dict[str, Any], position: int
) -> tuple[list[int], Tensor]:
    """The drafts behind one id, int64 [1], whose target row gave `hidden` [1, backbone], and their logits [count, vocab].

    shared: K and V [1, heads, keys, head_dim] by kind of layer, all of them visible;  position: the rotary one
    """
    drafted, logits = [], []
    for _ in range(count):
        with all_shared():
            out = model(
                inputs_embeds=torch.cat([embed(ids), hidden], dim=1)[None],
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
            )
        hidden, ids = out.last_hidden_state[0], out.logits[0].argmax(-1)
        drafted.append(int(ids))
        logits.append(out.logits[0, 0])
    return drafted, torch.stack(logits)
