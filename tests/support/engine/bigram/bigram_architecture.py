"""What a second architecture names without torch: its config.json, and the module of its parts. No layers, drafters or encoders."""

from pathlib import Path

from engine.architectures import Architecture
from engine.checkpoint import read_json
from engine.geometry import Geometry, Layer, Rope, naming


def read(folder: Path) -> Geometry:
    """Its geometry. One layer stands for the pages that the core accounts for."""
    path = folder / "config.json"
    config = read_json(path)
    with naming(str(path)):
        layer = Layer(0, "full", head_dim=16, kv_heads=1, rope=Rope(1e4, 8), intermediate=8, kv_source=0)
        return Geometry(
            hidden=config["width"], vocab=config["words"], heads=1, window=1, eps=1e-6, softcap=None, max_position=4096,
            layers=(layer,), ple=0, ple_vocab=0, moe=None, pad=0, placeholders=(), dtype="float32", prefix="bigram.", tied=False,
            bidirectional=False,
        )  # fmt: skip


BIGRAM = Architecture(("bigram",), read, lambda _: {}, "tests.support.engine.bigram.bigram_checkpoints")
