"""The kinds of models that are served, by the `model_type` of their config.json. No torch.

    config.json --model_type--> Architecture --> shapes of the text model and of its encoders      core, edge, ranks
                                             --> `parts`: its checkpoints (`engine.rank.checkpoints`)   ranks, plan, check-config
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint import read_json
from engine.errors import CheckpointError
from engine.geometry import MODEL_TYPES, Geometry, read_geometry
from engine.media_geometry import MediaGeometries, read_encoders


@dataclass(frozen=True)
class Architecture:
    """A kind of model.

    model_types  of its checkpoints
    read         the text model's geometry, of a checkpoint's folder;   encoders  those of media, by the kind that they take
    parts        module of ranks, without torch at import: `checkpoints(config) -> Checkpoints`, and `read_drafter(folder, target,
                 tp) -> Geometry`
    """

    model_types: tuple[str, ...]
    read: Callable[[Path], Geometry]
    encoders: Callable[[Path], MediaGeometries]
    parts: str


GEMMA4 = Architecture(MODEL_TYPES, read_geometry, read_encoders, "engine.rank.models.gemma4_checkpoints")
ARCHITECTURES = [GEMMA4]


def architecture_of(folder: Path) -> Architecture:
    """Finds the architecture of the checkpoint in `folder`; CheckpointError: there is no config.json, or none has its
    model_type."""
    path = folder / "config.json"
    model_type = read_json(path).get("model_type")
    for architecture in ARCHITECTURES:
        if model_type in architecture.model_types:
            return architecture
    known = ", ".join(name for architecture in ARCHITECTURES for name in architecture.model_types)
    raise CheckpointError(f"{path}: model_type {model_type!r} is not one of {known}")


def read_model(folder: Path) -> Geometry:
    """Reads the text model's geometry; CheckpointError names the file or the key that is wrong."""
    return architecture_of(folder).read(folder)
