"""What a deployment's settings come to on the node where its group will run: folder, device, and the engine's own settings."""

from dataclasses import dataclass
from pathlib import Path

from cluster.capability import probe
from deploy.models.resolve import resolve, suppressed_token_ids
from deploy.settings import Settings
from engine.config import EngineConfig, engine_config


@dataclass(frozen=True)
class Placement:
    """What `device: auto` and friends came to on this node."""

    folder: Path
    device: str
    load_format: str


def place(settings: Settings) -> Placement:
    """Resolve the model reference and the device, on the node where the group will run. ConfigError names what is wrong."""
    device = settings.device if settings.device != "auto" else ("cuda" if settings.needs_gpus and probe().gpus else "cpu")
    load_format = settings.load_format or ("dummy" if settings.model.startswith("dummy:") else "safetensors")
    return Placement(resolve(settings.model, settings.revision), device, load_format)


def configure(settings: Settings, node: Placement) -> EngineConfig:
    """The engine's own settings."""
    drafter = settings.mtp.model if settings.mtp.drafts else None
    return engine_config(
        model=str(node.folder),
        device=node.device,
        load_format=node.load_format,
        suppress=suppressed_token_ids(node.folder),
        **settings.engine | {"mtp": {"model": drafter and str(resolve(drafter)), "drafts": settings.mtp.drafts}},
    )
