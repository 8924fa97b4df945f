"""The checkpoints of a rank's models. No torch at import."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from engine.architectures import Architecture
from engine.config import EngineConfig
from engine.geometry import Geometry
from engine.protocol import MediaKind
from engine.quantisation import UNQUANTISED, Quantisation
from engine.rank.load.tensor_table import TensorTable


@dataclass(frozen=True)
class Checkpoint:
    """model: `module:class` of its shard; loader: `module:function` with the arguments of `load`."""

    folder: Path
    geometry: Geometry
    tensors: TensorTable
    model: str
    weights: Quantisation = UNQUANTISED
    loader: str = "engine.rank.load.loader:load"


class Checkpoints(NamedTuple):
    text: Checkpoint
    drafter: Checkpoint | None
    encoders: Mapping[MediaKind, Checkpoint]

    @property
    def every(self) -> list[Checkpoint]:
        drafters = [] if self.drafter is None else [self.drafter]
        return [*dict.fromkeys([self.text, *self.encoders.values(), *drafters])]


def checkpoints_of(config: EngineConfig) -> Checkpoints:
    """CheckpointError: a config.json is wrong, or the drafter is another model's."""
    made: Checkpoints = import_module(config.architecture.parts).checkpoints(config)
    return made


def check_drafter(architecture: Architecture, folder: Path, target: Geometry) -> None:
    """CheckpointError: `folder` has no drafter of `target`."""
    import_module(architecture.parts).read_drafter(folder, target, 1)
