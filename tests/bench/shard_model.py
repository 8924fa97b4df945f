"""One rank's shard of a model, as a model of its own for one GPU: what a rank of so many computes, but for the wires."""

import json
import shutil
from pathlib import Path

from engine.errors import ConfigError

_CUT = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "intermediate_size", "vocab_size")


def write_shard(folder: Path, parts: int, to: Path, *, keep_vocabulary: bool = False) -> Path:
    """`folder`'s files in `to`; a `parts`-th of its heads, MLPs and vocabulary, hidden rows as they are. Dense models without
    per-layer embeddings alone. keep_vocabulary: the head stays whole, for who needs the tokenizer. ConfigError: parts do not
    divide it."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    described = json.loads((to / "config.json").read_text(encoding="utf-8"))
    text = described["text_config"]
    if text["enable_moe_block"] or text["hidden_size_per_layer_input"]:
        raise ConfigError("a shard as a model of its own: dense models without per-layer embeddings alone")
    for name in _CUT[: -1 if keep_vocabulary else None]:
        if text[name] is not None:
            text[name], rest = divmod(text[name], parts)
            if rest:
                raise ConfigError(f"a shard as a model of its own: {parts} parts do not divide {name}")
    (to / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return to


def write_int4(whole: Path, to: Path) -> Path:
    """The folder of a model whose config.json says that its matrices are in int4, in groups of 32: for random weights."""
    to.mkdir()
    for path in whole.iterdir():
        (to / path.name).symlink_to(path.resolve())
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    described = json.loads((to / "config.json").read_text(encoding="utf-8"))
    described["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    (to / "config.json").unlink()
    (to / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return to
