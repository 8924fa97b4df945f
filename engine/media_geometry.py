"""What a checkpoint has for media: by their kind, the shape of the encoder that takes them."""

from collections.abc import Mapping
from pathlib import Path

from engine.audio_geometry import AudioGeometry, read_audio
from engine.config import EngineConfig
from engine.protocol import MediaKind
from engine.vision_geometry import VisionGeometry, read_vision

MediaGeometry = VisionGeometry | AudioGeometry
MediaGeometries = Mapping[MediaKind, MediaGeometry]  # of encoders, by the kind that they take


def read_media(config: EngineConfig) -> MediaGeometries:
    """Reads the encoders of the checkpoint, by kind; none for the text model alone. CheckpointError names the key that is wrong."""
    folder = Path(config.model)
    encoders: dict[MediaKind, MediaGeometry | None] = {}
    if not config.language_model_only:
        encoders = {"image": (vision := read_vision(folder)), "video": vision, "audio": read_audio(folder)}
    return {kind: geometry for kind, geometry in encoders.items() if geometry is not None}
