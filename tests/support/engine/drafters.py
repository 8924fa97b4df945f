"""Drafters of random weights for any target, and drafts of which so many are accepted, whatever they are.

    write      config.json of an assistant that fits the model in a folder, in the published sizes, or small ones for a nano model
    fill       its weights too, as `dummy` draws them
    accepting  in place of the acceptance: of each draft that is looked at, a fixed share stands
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.geometry import read_geometry
from engine.rank.load.slices import pieces
from engine.rank.models.assistant_geometry import read_assistant
from engine.rank.models.assistant_weights import ORDER, TENSORS
from kernels.accept import DraftInputs, Verified, accept
from tests.support.engine.dummy_tensors import dummy_tensor

Accept = Callable[[Verified, Tensor, Tensor, int, DraftInputs], Tensor]


def write(target: Path, out: Path) -> Path:
    """`out`, a folder with a config.json alone."""
    whole = json.loads((target / "config.json").read_text(encoding="utf-8"))
    text, kind = whole["text_config"], whole["model_type"]
    small, nano = text["hidden_size_per_layer_input"] > 0, text["vocab_size"] < 1 << 15
    hidden, width = (64, 128) if nano else (256, 2048) if small else (1024, 8192 * text["intermediate_size"] // _mlp(whole))
    text |= {
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": width,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_attention_heads": text["num_attention_heads"] // (2 if small else 1),
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": False,
    }
    described = {
        **whole,
        "model_type": f"{kind}_assistant",
        "backbone_hidden_size": text["hidden_size"],
        "use_ordered_embeddings": small,
        "num_centroids": 64 if nano else 2048,
        "centroid_intermediate_top_k": 8 if nano else 32,
        "text_config": {**text, "hidden_size": hidden},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return out


def _mlp(config: dict[str, object]) -> int:
    """The width of the whole model's MLP, of which this may be a rank's shard."""
    from tests.nano.model_shapes import PUBLIC

    sizes = {shape.hidden: shape.mlp for shape in PUBLIC.values()}
    text = config["text_config"]
    assert isinstance(text, dict)
    return sizes[text["hidden_size"]]


def fill(target: Path, out: Path, seed: int = 0) -> Path:
    """`out`, a folder with a whole checkpoint."""
    geometry, cpu = read_assistant(write(target, out), read_geometry(target)), torch.device("cpu")
    tensors = {name: dummy_tensor(name, TENSORS, geometry, seed, cpu).contiguous() for name in pieces(TENSORS, geometry)}
    if geometry.centroids:
        tensors[ORDER] = torch.randperm(geometry.vocab, generator=torch.Generator().manual_seed(seed))
    save_file(tensors, out / "model.safetensors")
    return out


def accepting(share: float, device: torch.device) -> Accept:
    """`kernels.accept.accept` of drafts of which `share` stand, by slot and position; capturable."""
    generator = torch.Generator().manual_seed(1)
    stands = (torch.rand((97, 4093), generator=generator) < share).to(device)

    def accepted(rows: Verified, stop: Tensor, lengths: Tensor, padding: int, out: DraftInputs) -> Tensor:
        if rows.width > 1:
            sampled = rows.chosen[:, 0].roll(1)
            stood = stands[rows.slots.long() % 97, rows.positions.long() % 4093]
            rows = rows._replace(ids=torch.where(stood, sampled, -1))
        return accept(rows, stop, lengths, padding, out)

    return accepted
