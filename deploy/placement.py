"""What a deployment's settings come to on the node where its group will run: folder, device, and the engine's own settings."""

from pathlib import Path

from cluster.capability import probe
from deploy.models.resolve import resolve, suppressed_token_ids
from deploy.settings import Settings
from engine.config import Device, EngineConfig, engine_config
from engine.geometry import read_geometry
from engine.weight_formats import weight_format


def place(settings: Settings) -> EngineConfig:
    """Makes the engine's own settings on the node where the group will run: it resolves the model reference and the device.
    ConfigError names what is wrong."""
    device = settings.device if settings.device != "auto" else ("cuda" if settings.needs_gpus and probe().gpus else "cpu")
    drafter = resolve(settings.mtp.model) if settings.mtp.model and settings.mtp.drafts else None
    return configure(settings, resolve(settings.model, settings.revision), drafter, device)


def configure(settings: Settings, folder: Path, drafter: Path | None, device: Device) -> EngineConfig:
    """Makes the engine's own settings for the model in `folder`, with the assistant in `drafter`."""
    return engine_config(
        model=str(folder),
        device=device,
        load_format=settings.load_format or ("dummy" if settings.model.startswith("dummy:") else "safetensors"),
        suppress=suppressed_token_ids(folder),
        **settings.engine | {"mtp": {"model": drafter and str(drafter), "drafts": settings.mtp.drafts}},
    )


def check_files(config: EngineConfig, template: str | None = None) -> None:
    """Raises CheckpointError where a replica would refuse the checkpoint, its tokenizer and template, or its drafter. No tensor is
    read."""
    from engine.front.text import TextProcessor
    from engine.rank.load.slices import pieces
    from engine.rank.load.tensor_files import checked
    from engine.rank.models import assistant_weights, gemma4_weights
    from engine.rank.models.assistant_geometry import check_shards, read_assistant

    folder = Path(config.model)
    geometry = read_geometry(folder)
    loaded = [(folder, gemma4_weights.TENSORS, geometry)]
    if config.widest > 1:
        drafter = Path(str(config.mtp.model))
        assistant = read_assistant(drafter, geometry)
        check_shards(assistant, geometry, config.tp)
        loaded.append((drafter, assistant_weights.TENSORS, assistant))
    for place, tensors, shape in loaded if config.load_format == "safetensors" else ():
        checked(place, pieces(tensors, shape, weights=weight_format(place)), tensors, shape)
    TextProcessor.load(folder, Path(template) if template else None)
