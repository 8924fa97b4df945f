"""Gemma 4's checkpoints: text model, assistant and encoders. No torch at import."""

from pathlib import Path

from engine.config import EngineConfig
from engine.media_geometry import MediaGeometry
from engine.quantisation import read_quantisation
from engine.rank.checkpoints import Checkpoint, Checkpoints
from engine.rank.models import assistant_weights, gemma4_weights
from engine.rank.models.assistant_geometry import read_assistant as read_drafter
from engine.rank.models.encoder_weights import ENCODER_TENSORS
from engine.vision_geometry import VisionGeometry

_MODELS = "engine.rank.models"


def checkpoints(config: EngineConfig) -> Checkpoints:
    folder = Path(config.model)
    weights = read_quantisation(folder, config.weights)
    text = Checkpoint(folder, config.geometry, gemma4_weights.TENSORS, f"{_MODELS}.gemma4:Gemma4", weights)
    encoders = {kind: _encoder(folder, shape) for kind, shape in config.media.items()}
    return Checkpoints(text, _drafter(config), encoders)


def _drafter(config: EngineConfig) -> Checkpoint | None:
    if config.widest == 1:
        return None
    folder = Path(str(config.mtp.model))
    geometry = read_drafter(folder, config.geometry, config.tp)
    module = f"{_MODELS}.assistant"
    return Checkpoint(folder, geometry, assistant_weights.TENSORS, f"{module}:Assistant", loader=f"{module}:load_assistant")


def _encoder(folder: Path, shape: MediaGeometry) -> Checkpoint:
    if isinstance(shape, VisionGeometry):
        if shape.unified:
            model = "vision:VisionEmbedder"
        else:
            model = "vision:Tower"
    else:
        model = "audio:AudioEncoder" if shape.unified else "audio:AudioTower"
    loader = f"{_MODELS}.clipped:load_encoder"
    return Checkpoint(folder, shape, ENCODER_TENSORS[type(shape)], f"{_MODELS}.{model}", loader=loader)
