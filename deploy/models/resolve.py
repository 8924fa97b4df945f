"""From a model reference to a local folder.

    a folder               itself
    nano:<member>          the embedded trained checkpoint; nano:<member>-assistant: its drafter
    dummy:<member>         a public shape: its published config.json, nano's tokenizer and template, no weights;
                           dummy:<member>-assistant: its drafter's
    <owner>/<name>         a Hugging Face hub id: safetensors, JSON and the template, nothing executable

HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply.
"""

import os
import re
from pathlib import Path

from deploy.models.nano import TRAINED, trained
from engine.checkpoint import read_index
from engine.errors import ConfigError

PUBLIC = Path(__file__).parent / "public"
MEMBERS = ["e2b", "e4b", "12b", "26b-a4b", "31b"]
HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\b[\w.-]+\b/\b[\w.-]{1,96}\b(?<!\.git)")  # as the hub library checks it


def resolve(model: str, revision: str | None = None) -> Path:
    """ConfigError says what would help."""
    return local_folder(model) or _download(model, revision)


def folder_here(model: str, revision: str | None) -> Path | None:
    """The folder on this machine, for a hub id perhaps without weights. Downloads nothing."""
    if model.startswith(("nano:", "dummy:")) or Path(os.path.expanduser(model)).is_dir():  # noqa: PTH111 - see below
        return local_folder(model)
    if not HUB_ID.fullmatch(model):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached).parent
    return None


def is_here(model: str, revision: str | None = None, *files: str) -> bool:
    """Whether `resolve` would download nothing. HF_HUB_OFFLINE accepts a partial cache. ConfigError
    as `local_folder`."""
    from huggingface_hub import constants

    if local_folder(model):
        return True
    folder = folder_here(model, revision)
    if folder is None or constants.HF_HUB_OFFLINE:
        return folder is not None
    shards = read_index(folder).values() or ["*.safetensors"]
    return all(any(folder.glob(name)) for name in {*shards, *files})


def local_folder(model: str) -> Path | None:
    """None for a hub id. ConfigError: no such folder or member."""
    kind, _, member = model.partition(":")
    if kind in ("nano", "dummy"):
        root, names = (TRAINED, trained()) if kind == "nano" else (PUBLIC, MEMBERS)
        name = member.removesuffix("-assistant")
        if name not in names:
            raise ConfigError(f"model: {model} is not one of {', '.join(f'{kind}:{name}' for name in names)}")
        return root / name / ("assistant" if name != member else "")
    folder = Path(os.path.expanduser(model))  # noqa: PTH111 - Path.expanduser raises where there is no such user
    if folder.is_dir():
        return _checked(folder)
    if not HUB_ID.fullmatch(model):
        raise ConfigError(f"model: {model!r} is no folder here, and no hub id (<owner>/<name>), nano: or dummy:<member>")
    return None


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {folder} has no config.json")
    return folder


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _checked(Path(snapshot_download(model, revision=revision, allow_patterns=["*.safetensors", "*.json", "*.jinja"])))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model: {model} is not in the local hub cache and "
            f"{'HF_HUB_OFFLINE is set' if constants.HF_HUB_OFFLINE else 'the hub cannot be reached'}; "
            "download it where there is a network, or give a folder"
        ) from error
    except (HFValidationError, OSError) as error:  # the hub's, or the disk's
        raise ConfigError(f"model: {model}: {' '.join(str(error).split())[:300]}") from error
