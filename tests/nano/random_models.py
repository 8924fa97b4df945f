"""Nano checkpoints of random weights; in tests and benchmarks `random:<member>` stands for one."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deploy.models.nano import TRAINED
from deploy.models.resolve import resolve
from engine.errors import ConfigError
from tests.nano import model_shapes, nano_shapes, random_weights
from tests.nano.model_shapes import ModelShape, config
from tests.nano.nano_shapes import SHAPES

_TEMPLATE = TRAINED / "31b" / "chat_template.jinja"
_TOKENIZER = [TRAINED / "31b" / name for name in ("tokenizer.json", "tokenizer_config.json")]


def build(member: str, out: Path) -> Path:
    """Writes the nano checkpoint of a member of `SHAPES`, in bf16, into the folder `out` (made if absent) and returns it: the same
    bytes each time. ConfigError: there is no such member."""
    if member not in SHAPES:
        raise ConfigError(f"member: {member!r} is not one of {', '.join(SHAPES)}")
    out.mkdir(parents=True, exist_ok=True)
    write(SHAPES[member], out, partial(random_weights.draw, shape=SHAPES[member], seed=0), "bfloat16")
    return out


def write(shape: ModelShape, out: Path, values: random_weights.Values, dtype: str) -> None:
    """The checkpoint of `shape` with these weights, into the folder `out`."""
    write_texts(config(shape, dtype), out)
    random_weights.write(shape, out, values, dtype)


def ensure(member: str, cache: Path) -> Path:
    """The checkpoint's folder under `cache`, built if it is not there."""
    return cached(cache, member, lambda out: build(member, out))


def write_texts(config: dict[str, Any], out: Path) -> None:
    """All files of a checkpoint with this config.json, but its weights, into the folder `out`."""
    for name, value in (("config.json", config), ("generation_config.json", _generation_config(config))):
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(chat_template(config), encoding="utf-8")
    for path in _TOKENIZER:
        shutil.copyfile(path, out / path.name)


def chat_template(config: dict[str, Any]) -> str:
    """31B's template; E2B's and E4B's, which have per-layer embeddings, append no empty thought when thinking is off."""
    template = _TEMPLATE.read_text(encoding="utf-8")
    small = config["text_config"]["hidden_size_per_layer_input"]
    return template.replace("appends_empty_thought = true", "appends_empty_thought = false", 1) if small else template


def cached(cache: Path, name: str, write_into: Callable[[Path], object]) -> Path:
    """The folder `name` under `cache`, written if it is not there; safe when several processes ask at once.

    A hash of what it is made from ends its name: a changed builder serves no old folder.
    """
    target = cache / f"{name}-{_source_hash()}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        draft.chmod(0o755)
        write_into(draft)
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _source_hash() -> str:
    modules = [Path(str(module.__file__)) for module in (model_shapes, nano_shapes, random_weights)]
    sources = (Path(__file__), *modules, _TEMPLATE, *_TOKENIZER)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def _publish(draft: Path, target: Path) -> None:
    """One rename makes the folder appear whole; whoever comes second keeps the first one's (equal) folder."""
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """The 12B's suppresses the ends of its media."""
    is_12b = config["model_type"] == "gemma4_unified"
    suppressed_token_ids = {"suppress_tokens": [config["eoa_token_id"], config["eoi_token_id"]]} if is_12b else {}
    return {
        "bos_token_id": 2,
        "do_sample": True,
        "eos_token_id": [1, 106, 50],
        "pad_token_id": 0,
        **suppressed_token_ids,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }


def cache_folder() -> Path:
    """Where built checkpoints live: QUARTET_CACHE, else `quartet` under XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("QUARTET_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quartet"


def model_folder(model: str) -> Path:
    """The folder of a model reference: `random:<member>`, or as a deployment has it."""
    kind, _, member = model.partition(":")
    return ensure(member, cache_folder()) if kind == "random" else resolve(model)
