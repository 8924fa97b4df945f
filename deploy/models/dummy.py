"""`dummy:<member>`: a public shape by name, for benchmarks with weights drawn on the device.

    config.json of the shape, no weights; generation_config.json, tokenizer and template are nano's, which stand in
"""

import json
from pathlib import Path

from deploy.models.nano import build as nano_build
from deploy.models.nano import tokenizer
from deploy.models.public_shapes import PUBLIC, config
from engine.errors import ConfigError


def write(member: str, folder: Path, nano: Path) -> Path:
    """Writes a public shape's folder; `nano` is the nano checkpoint whose template stands in. ConfigError: unknown member."""
    if member not in PUBLIC:
        raise ConfigError(f"model: dummy:{member} is not one of {', '.join(f'dummy:{name}' for name in PUBLIC)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(PUBLIC[member], "bfloat16"), indent=2) + "\n", encoding="utf-8")
    tokenizer.write(folder)
    for name in ("generation_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((nano / name).read_bytes())
    return folder


def ensure(member: str, cache: Path) -> Path:
    """The shape's folder under `cache`; written anew, whole, by every process that asks (a few kilobytes)."""
    if member not in PUBLIC:
        raise ConfigError(f"model: dummy:{member} is not one of {', '.join(f'dummy:{name}' for name in PUBLIC)}")
    nano = nano_build.ensure(member, cache)
    return write(member, cache / f"dummy-{member}-{nano.name}", nano)
