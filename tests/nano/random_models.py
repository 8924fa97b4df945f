"""Nano checkpoints of random weights, built from a seed; in tests and benchmarks `random:<member>` stands for one."""

import hashlib
from functools import partial
from pathlib import Path

from deploy.models.dummy import cached, write_texts
from deploy.models.public_shapes import ModelShape
from deploy.models.resolve import cache_folder, resolve
from engine.errors import ConfigError
from tests.nano import nano_shapes, random_weights
from tests.nano.nano_shapes import SHAPES


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


def ensure(member: str, cache: Path, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """The checkpoint's folder under `cache`, built if it is not there."""
    _shape(member, dtype)
    sources = (__file__, nano_shapes.__file__, random_weights.__file__)
    version = hashlib.sha256(b"\0".join(Path(source).read_bytes() for source in sources)).hexdigest()[:12]
    return cached(cache, f"{member}-{seed}-{dtype}-{version}", lambda out: build(member, out, seed, dtype))


def model_folder(model: str) -> Path:
    """The folder of a model reference: `random:<member>`, or as a deployment has it."""
    kind, _, member = model.partition(":")
    return ensure(member, cache_folder()) if kind == "random" else resolve(model)


def _shape(member: str, dtype: str) -> ModelShape:
    if member not in SHAPES:
        raise ConfigError(f"member: {member!r} is not one of {', '.join(SHAPES)}")
    if dtype not in random_weights.DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(random_weights.DTYPES)}")
    return SHAPES[member]
