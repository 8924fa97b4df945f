"""What a replica would refuse of the files of a model that is on this machine. No torch."""

from pathlib import Path

from deploy.settings import Settings
from engine.config import EngineConfig
from engine.geometry import read_geometry
from engine.quantisation import UNQUANTISED, read_quantisation


def check_drafter(settings: Settings) -> None:
    """Raises CheckpointError where the drafter is another model's, by the shapes of both names. Nothing is downloaded."""
    from deploy.cli.sizing import known_folder
    from deploy.placement import drafter_folder
    from engine.rank.models.assistant_geometry import read_assistant

    drafter, target = drafter_folder(settings.mtp, known_folder), known_folder(settings.model, settings.revision)
    if drafter and target:
        read_assistant(drafter, read_geometry(target))


def check_files(config: EngineConfig, template: Path | None) -> None:
    """Raises CheckpointError where a replica would refuse the checkpoint, its encoders of media among it, its tokenizer and
    template, or its drafter. No tensor is read."""
    from engine.front.text import TextProcessor
    from engine.media_geometry import read_media
    from engine.rank.load.slices import pieces
    from engine.rank.load.tensor_files import checked_headers
    from engine.rank.models import assistant_weights, gemma4_weights
    from engine.rank.models.assistant_geometry import read_assistant
    from engine.rank.models.encoder_weights import ENCODER_TENSORS

    folder = Path(config.model)
    geometry = config.geometry
    loaded = [(folder, gemma4_weights.TENSORS, geometry)]
    encoders = read_media(config).values()
    loaded += [(folder, ENCODER_TENSORS[type(shape)], shape) for shape in dict.fromkeys(encoders)]  # videos have the pictures'
    if config.widest > 1:
        drafter = Path(str(config.mtp.model))
        assistant = read_assistant(drafter, geometry, config.tp)
        loaded.append((drafter, assistant_weights.TENSORS, assistant))
    for checkpoint, tensors, shape in loaded if config.load_format == "safetensors" else ():
        of_model = tensors is gemma4_weights.TENSORS  # encoders and drafters are plain
        weights = read_quantisation(checkpoint, config.weights) if of_model else UNQUANTISED
        checked_headers(checkpoint, pieces(tensors, shape, weights=weights), tensors, shape)
    TextProcessor.load(folder, template)
