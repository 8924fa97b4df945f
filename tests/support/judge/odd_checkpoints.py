"""Checkpoints of every member in sizes that no public one has, as transformers writes them: config, shards, index, processor."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import transformers

from tests.nano.model_shapes import AudioShape, ModelShape, VisionShape
from tests.nano.nano_shapes import SHAPES
from tests.nano.random_models import write
from tests.nano.random_weights import draw
from tests.support.judge.oracle import load_oracle

_wide = VisionShape(36, 3399, layers=3, heads=3, head_dim=20, mlp=52, clipped=True)
_narrow = VisionShape(52, 3360, layers=1, heads=1, head_dim=36, mlp=44, clipped=True)
_deep = VisionShape(44, 3366, layers=3, heads=5, head_dim=12, mlp=60, standardize=True)
_flat = VisionShape(76, 3375, layers=1, heads=2, head_dim=28, mlp=20, standardize=True)
_tower = AudioShape(40, layers=1, heads=5, channels=(128, 12), output=28)
_small_tower = AudioShape(24, layers=3, heads=3, channels=(128, 20), output=36)

ODD: dict[str, ModelShape] = {
    member: replace(SHAPES[member], **sizes)
    for member, sizes in {
        "e2b": {"hidden": 56, "groups": 3, "sliding": 1, "mlp": 88, "ple": 24, "window": 45, "vision": _wide, "audio": _tower},
        "e4b": {"hidden": 104, "heads": 6, "kv_heads": 3, "mlp": 72, "ple": 8, "vision": _narrow, "audio": _small_tower},
        "12b": {"hidden": 88, "heads": 4, "mlp": 104, "window": 77, "vision": VisionShape(36, 1133), "audio": AudioShape(600)},
        "26b-a4b": {"hidden": 72, "groups": 2, "sliding": 2, "experts": 10, "top_k": 3, "moe_mlp": 40, "vision": _deep},
        "31b": {"hidden": 120, "heads": 6, "kv_heads": 3, "kv_heads_full": 2, "mlp": 56, "window": 51, "vision": _flat},
    }.items()
}


def save(member: str, folder: Path) -> Path:
    """The odd checkpoint of a member, loaded and saved by transformers into `folder`, in many shards."""
    drafted = folder / "drafted"
    drafted.mkdir(parents=True)
    write(ODD[member], drafted, partial(draw, shape=ODD[member], seed=0), "float32")
    load_oracle(drafted).save_pretrained(folder / "saved", max_shard_size="1MB")
    transformers.Gemma4ImageProcessorPil().save_pretrained(folder / "saved")  # the other, and the 12B's, need torchvision
    return folder / "saved"
