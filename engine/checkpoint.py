"""The JSON files of a checkpoint folder. CheckpointError names the file that is absent, is not JSON or holds no object."""

import json
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The file's object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """The file's object; empty where there is no file."""
    return read_json(path) if path.is_file() else {}


def generation_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's defaults of generation: sampling, end-of-sequence ids, ids never to be sampled."""
    return read_optional(folder / "generation_config.json")
