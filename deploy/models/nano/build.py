"""Builds nano checkpoints of random weights."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from deploy.models import public_shapes
from deploy.models.nano import TRAINED, random_weights, tokenizer
from deploy.models.nano.nano_shapes import SHAPES
from deploy.models.public_shapes import ModelShape, config
from engine.errors import ConfigError

_HERE = Path(__file__).parent
_TEMPLATE = TRAINED / "31b" / "chat_template.jinja"


def build(member: str, out: Path, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """Writes the nano checkpoint of one family member into the folder `out` (made if absent) and returns it.

    member: a key of `SHAPES`; dtype: "bfloat16", as published, or "float32". Equal arguments give equal bytes.
    Raises ConfigError for an unknown member or dtype, or an `out` that already holds something.
    """
    shape = _shape(member, dtype)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ConfigError(f"out: {out} is not empty; a nano checkpoint is written into a folder of its own")
    write(shape, out, partial(random_weights.draw, shape=shape, seed=seed), dtype)
    return out


def write(shape: ModelShape, out: Path, values: random_weights.Values, dtype: str) -> None:
    """The checkpoint of `shape` with these weights, into the folder `out`."""
    write_texts(shape, out, dtype)
    random_weights.write(shape, out, values, dtype)


def write_texts(shape: ModelShape, out: Path, dtype: str) -> None:
    """All files of a checkpoint but its weights, into the folder `out`."""
    _dump(out / "config.json", config(shape, dtype))
    _dump(out / "generation_config.json", _generation_config(shape))
    (out / "chat_template.jinja").write_text(chat_template(shape), encoding="utf-8")
    tokenizer.write(out)


def chat_template(shape: ModelShape) -> str:
    """31B's template; E2B's and E4B's append no empty thought when thinking is off."""
    template = _TEMPLATE.read_text(encoding="utf-8")
    return template.replace("appends_empty_thought = true", "appends_empty_thought = false", 1) if shape.small else template


def ensure(member: str, cache: Path, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """The checkpoint's folder under `cache`, built if it is not there."""
    _shape(member, dtype)
    return cached(cache, f"{member}-{seed}-{dtype}", lambda out: build(member, out, seed, dtype))


def cached(cache: Path, name: str, write_into: Callable[[Path], object]) -> Path:
    """The folder `name` under `cache`, written if it is not there; safe when several processes ask at once.

    A hash of the builder's files ends its name: a changed builder serves no old folder.
    """
    target = cache / f"{name}-{_builder_hash()}"
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


def _shape(member: str, dtype: str) -> ModelShape:
    if member not in SHAPES:
        raise ConfigError(f"member: {member!r} is not one of {', '.join(SHAPES)}")
    if dtype not in random_weights.DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(random_weights.DTYPES)}")
    return SHAPES[member]


def _builder_hash() -> str:
    digest = hashlib.sha256()
    for path in [*sorted(_HERE.glob("*.py")), Path(public_shapes.__file__), _TEMPLATE, *tokenizer.FILES]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _publish(draft: Path, target: Path) -> None:
    """One rename makes the folder appear whole; whoever comes second keeps the first one's (equal) folder."""
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _generation_config(shape: ModelShape) -> dict[str, Any]:
    media = tokenizer.MEDIA_IDS
    suppressed_token_ids = {"suppress_tokens": [media["<audio|>"], media["<image|>"]]} if shape.unified else {}
    return {
        "bos_token_id": 2,
        "do_sample": True,
        "eos_token_id": list(tokenizer.EOS_IDS),
        "pad_token_id": 0,
        **suppressed_token_ids,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
