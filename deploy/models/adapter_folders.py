"""From a config's adapter to its folder."""

from pathlib import Path

from deploy.models.nano import POLITE, polite
from deploy.models.resolve import HUB_ID
from engine.errors import ConfigError

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"


def adapter_folder(name: str, given: str) -> Path:
    folder = local_adapter(name, given)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(given, allow_patterns=[_CONFIG, _TENSORS]))
    except (HFValidationError, OSError) as error:
        raise ConfigError(f"adapters.{name}: {given}: {' '.join(str(error).split())[:300]}") from error


def local_adapter(name: str, given: str) -> Path | None:
    """None: it is not in the hub's cache."""
    if given.startswith("/"):
        return Path(given)
    folders = {f"nano:{member}-{POLITE}": folder for member, folder in polite().items()}
    if given in folders:
        return folders[given]
    if not HUB_ID.fullmatch(given):
        raise ConfigError(
            f"adapters.{name}: {given!r:.80} is no absolute path, no hub id (<owner>/<name>), and not one of {', '.join(folders)}"
        )
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(given, file) for file in (_CONFIG, _TENSORS)]
    if not all(isinstance(path, str) for path in found):
        return None
    return Path(str(found[0])).parent
