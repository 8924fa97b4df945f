"""`dummy:<member>`: a public shape by name, for benchmarks with weights drawn on the device.

    config.json of the shape, no weights; generation_config.json, tokenizer and template are nano's, which stand in
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.models import public_shapes
from deploy.models.nano import TRAINED
from deploy.models.public_shapes import PUBLIC, ModelShape, config
from engine.errors import ConfigError

_TEMPLATE = TRAINED / "31b" / "chat_template.jinja"
_TOKENIZER = [TRAINED / "31b" / name for name in ("tokenizer.json", "tokenizer_config.json")]


def public_shape(member: str) -> ModelShape:
    """The shape of `dummy:<member>`; ConfigError: there is none."""
    if member not in PUBLIC:
        raise ConfigError(f"model: dummy:{member} is not one of {', '.join(f'dummy:{name}' for name in PUBLIC)}")
    return PUBLIC[member]


def ensure(member: str, cache: Path) -> Path:
    """The shape's folder under `cache`, written if it is not there. ConfigError: unknown member."""
    shape = public_shape(member)
    return cached(cache, f"dummy-{member}", lambda out: write_texts(shape, out, "bfloat16"))


def write_texts(shape: ModelShape, out: Path, dtype: str) -> None:
    """All files of a checkpoint but its weights, into the folder `out`."""
    _dump(out / "config.json", config(shape, dtype))
    _dump(out / "generation_config.json", _generation_config(shape))
    (out / "chat_template.jinja").write_text(chat_template(shape), encoding="utf-8")
    for path in _TOKENIZER:
        shutil.copyfile(path, out / path.name)


def chat_template(shape: ModelShape) -> str:
    """31B's template; E2B's and E4B's append no empty thought when thinking is off."""
    template = _TEMPLATE.read_text(encoding="utf-8")
    return template.replace("appends_empty_thought = true", "appends_empty_thought = false", 1) if shape.small else template


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
    sources = (Path(__file__), Path(public_shapes.__file__), _TEMPLATE, *_TOKENIZER)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def _publish(draft: Path, target: Path) -> None:
    """One rename makes the folder appear whole; whoever comes second keeps the first one's (equal) folder."""
    try:
        draft.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _generation_config(shape: ModelShape) -> dict[str, Any]:
    suppressed_token_ids = {"suppress_tokens": [shape.media["<audio|>"], shape.media["<image|>"]]} if shape.unified else {}
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


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
