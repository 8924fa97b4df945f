"""A deployment's settings on the node of its group: folder, device, engine settings."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from cluster.capability import probe
from deploy.models.adapter_folders import adapter_folder, local_adapter
from deploy.models.resolve import folder_here, resolve
from deploy.settings import Settings
from engine.checkpoint import generation_config, token_ids
from engine.config import EngineConfig, Mtp, engine_config
from engine.errors import ConfigError

T = TypeVar("T")


def place(settings: Settings) -> EngineConfig:
    adapters = {name: str(adapter_folder(name, given)) for name, given in settings.adapters.items()}
    settings = msgspec.structs.replace(settings, adapters=adapters)
    return configure(settings, resolve(settings.model, settings.revision), resolve, has_gpus=bool(probe().gpus))


def check_model(settings: Settings) -> None:
    """ConfigError: no replica could serve it, as far as this machine knows."""
    folder = folder_here(settings.model, settings.revision)
    if folder is None:
        return
    drafter = drafter_folder(settings.mtp, partial(folder_here, revision=None))
    if drafter is None:
        settings = msgspec.structs.replace(settings, mtp=Mtp())
    configure(settings, folder, partial(_known, drafter), has_gpus=True)


def _known(drafter: Path | None, _: str) -> Path:
    assert drafter is not None, "without one, none is asked for"
    return drafter


def configure(settings: Settings, folder: Path, drafter_of: Callable[[str], Path], *, has_gpus: bool) -> EngineConfig:
    """`drafter_of`: from the assistant's name to its folder."""
    for name in settings.names:
        if name in settings.adapters:
            raise ConfigError(f"adapters.{name}: clients call the model itself so")
    mtp = settings.mtp
    drafter = drafter_folder(mtp, drafter_of)
    found = {name: local_adapter(name, given) for name, given in settings.adapters.items()}
    adapters = {name: str(path) for name, path in found.items() if path is not None}
    config = engine_config(
        model=str(folder),
        device=settings.device if settings.device != "auto" else "cuda" if settings.needs_gpus and has_gpus else "cpu",
        load_format=settings.load_format or ("dummy" if settings.model.startswith("dummy:") else "safetensors"),
        **settings.engine | {"mtp": {"model": drafter and str(drafter), "drafts": mtp.drafts}, "adapters": adapters},
    )
    suppress = token_ids(folder, "suppress_tokens", generation_config(folder).get("suppress_tokens"))
    return msgspec.structs.replace(config, suppress=suppress)


def drafter_folder(mtp: Mtp, find: Callable[[str], T | None]) -> T | None:
    """What `find` returns for the assistant; None without drafts. ConfigError names the key."""
    try:
        if mtp.model and mtp.drafts:
            return find(mtp.model)
        return None
    except ConfigError as error:
        raise ConfigError(str(error).replace("model:", "mtp.model:", 1)) from error
