"""`dummy:<member>`: a public shape by name, for benchmarks with weights drawn on the device.

    config.json of the shape, no weights; generation_config.json, tokenizer and template are nano's, which stand in
"""

from pathlib import Path

from deploy.models.nano import build
from deploy.models.public_shapes import PUBLIC
from engine.errors import ConfigError


def ensure(member: str, cache: Path) -> Path:
    """The shape's folder under `cache`, written if it is not there. ConfigError: unknown member."""
    if member not in PUBLIC:
        raise ConfigError(f"model: dummy:{member} is not one of {', '.join(f'dummy:{name}' for name in PUBLIC)}")
    return build.cached(cache, f"dummy-{member}", lambda out: build.write_texts(PUBLIC[member], out, "bfloat16"))
