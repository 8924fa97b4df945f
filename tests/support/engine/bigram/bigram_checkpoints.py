"""A second architecture's tensors and checkpoint. No torch at import."""

from pathlib import Path

from engine.config import EngineConfig
from engine.rank.checkpoints import Checkpoint, Checkpoints
from engine.rank.load.tensor_table import Rule, TensorTable

TENSORS = TensorTable(
    (
        Rule("first", "first.head", "vocab hidden", "vocab", "embedding"),
        Rule("second", "second.head", "vocab hidden", "vocab", "embedding"),
    ),
    lambda *_: {},
    published_name=lambda name, _: f"bigram.{name.removeprefix('bigram.')}",
    is_unused=lambda name, _: False,
)


def checkpoints(config: EngineConfig) -> Checkpoints:
    """As `checkpoints_of`."""
    text = Checkpoint(Path(config.model), config.geometry, TENSORS, "tests.support.engine.bigram.bigram_model:Bigram")
    return Checkpoints(text, None, {})
