"""The JSON files of a checkpoint folder. CheckpointError names a file that is absent, not JSON or
not an object."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypedDict

import msgspec

from engine.errors import CheckpointError
from engine.protocol import JsonObject

INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if gguf := sorted(path.parent.glob("*.gguf")):
            raise CheckpointError(f"{path.parent} holds GGUF weights only ({gguf[0].name}); only safetensors are read") from error
        raise CheckpointError(f"{path} does not exist, or is a link to what does not") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def read_optional(path: Path) -> JsonObject:
    """Empty if the file is absent."""
    if os.path.lexists(path):
        return read_json(path)
    return {}


def read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not os.path.lexists(path):
        return {}
    try:
        index = msgspec.convert(read_json(path).get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: weight_map: {error}") from error
    wrong = {shard for shard in set(index.values()) if Path(shard).name != shard or not shard.endswith(".safetensors")}
    for name, shard in index.items():
        if shard in wrong:
            raise CheckpointError(f"{path}: {name} is said to lie in {shard!r}, which is no safetensors file of the folder")
    return index


def model_vocabulary(folder: Path) -> int | None:
    config = read_optional(folder / "config.json")
    rows: int | None = (config.get("text_config") or config).get("vocab_size")
    return rows


def tensor_names(folder: Path) -> Iterable[str]:
    """Names from the index or the header of the only shard; empty without both."""
    shard = folder / "model.safetensors"
    if index := read_index(folder):
        return index
    if not shard.is_file():
        return ()
    with shard.open("rb") as file:
        try:
            header: JsonObject = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        except (ValueError, MemoryError, OverflowError) as error:
            raise CheckpointError(f"{shard} cannot be read: {error}") from error
    return header


class GenerationDefaults(TypedDict, total=False):
    do_sample: bool | None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None
    top_k: int | None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None


def generation_config(folder: Path) -> JsonObject:
    """CheckpointError names a key of a wrong type."""
    config = read_optional(path := folder / "generation_config.json")
    try:
        msgspec.convert(config, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return config


def token_ids(folder: Path, key: str, given: object) -> tuple[int, ...]:
    """`given`: several ids, one, or None. CheckpointError: one is outside the vocabulary."""
    ids = given if isinstance(given, list) else [] if given is None else [given]
    own = Annotated[int, msgspec.Meta(ge=0, lt=model_vocabulary(folder) or 2**31)]
    try:
        return msgspec.convert(ids, tuple[own, ...])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{folder}: {key}: {error}") from error
