"""A checkpoint's encoders, by kind of media."""

from collections.abc import Mapping
from pathlib import Path

from engine.audio_geometry import AudioGeometry, read_audio
from engine.protocol import MediaKind
from engine.vision_geometry import VisionGeometry, read_vision

MediaGeometry = VisionGeometry | AudioGeometry
MediaGeometries = Mapping[MediaKind, MediaGeometry]  # of encoders, by the kind that they take


def read_encoders(folder: Path) -> MediaGeometries:
    """CheckpointError names the wrong key."""
    vision = read_vision(folder)
    encoders: dict[MediaKind, MediaGeometry | None] = {"image": vision, "video": vision, "audio": read_audio(folder)}
    return {kind: geometry for kind, geometry in encoders.items() if geometry is not None}
