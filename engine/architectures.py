"""The kinds of models that are served, by the `model_type` of config.json. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint import read_json
from engine.errors import CheckpointError
from engine.geometry import MODEL_TYPES, Geometry, read_geometry
from engine.media_geometry import MediaGeometries, read_encoders


@dataclass(frozen=True)
class Architecture:
    """read, encoders: geometry of the text model, and of encoders by media kind, from a checkpoint's folder"""

    model_types: tuple[str, ...]
    read: Callable[[Path], Geometry]
    encoders: Callable[[Path], MediaGeometries]
    # module without torch at import: `checkpoints(config) -> Checkpoints`, `read_drafter(folder,
    # target, tp) -> Geometry`
    parts: str


GEMMA4 = Architecture(MODEL_TYPES, read_geometry, read_encoders, "engine.rank.models.gemma4_checkpoints")
ARCHITECTURES = [GEMMA4]


def architecture_of(folder: Path) -> Architecture:
    """CheckpointError: no config.json, or an unknown model_type."""
    path = folder / "config.json"
    model_type = read_json(path).get("model_type")
    for architecture in ARCHITECTURES:
        if model_type in architecture.model_types:
            return architecture
    known = ", ".join(name for architecture in ARCHITECTURES for name in architecture.model_types)
    raise CheckpointError(f"{path}: model_type {model_type!r} is not one of {known}")


def read_model(folder: Path) -> Geometry:
    """CheckpointError names the wrong file or key."""
    return architecture_of(folder).read(folder)
