"""What a replica would refuse of a local model's files. No torch."""

from pathlib import Path

from deploy.settings import Settings
from engine.architectures import architecture_of
from engine.config import EngineConfig


def check_drafter(settings: Settings) -> None:
    """CheckpointError: the drafter's shape is of another model. Downloads nothing."""
    from deploy.cli.sizing import known_folder
    from deploy.placement import drafter_folder
    from engine.rank import checkpoints

    drafter = drafter_folder(settings.mtp, known_folder)
    target = known_folder(settings.model, settings.revision)
    if drafter and target:
        architecture = architecture_of(target)
        checkpoints.check_drafter(architecture, drafter, architecture.read(target))


def check_files(config: EngineConfig, template: Path | None) -> None:
    """CheckpointError as a replica would raise it. Reads no tensor."""
    from engine.front.text import TextProcessor
    from engine.rank.checkpoints import checkpoints_of
    from engine.rank.load.adapter_tensors import map_adapters
    from engine.rank.load.slices import pieces
    from engine.rank.load.tensor_files import checked_headers

    text = checkpoints_of(config).text
    map_adapters(config.adapters, text.tensors, text.geometry)
    needed = checkpoints_of(config).every
    for each in needed if config.load_format == "safetensors" else ():
        pieces_of = pieces(each.tensors, each.geometry, weights=each.weights)
        checked_headers(each.folder, pieces_of, each.tensors, each.geometry, each.weights)
    TextProcessor.load(Path(config.model), template)
