"""What a rank holds, by building model and caches on torch's meta device.

RESERVE, for CUDA, NCCL and the allocator, was measured on an H200 at TP=4.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from deploy.models.resolve import MEMBERS, PUBLIC, folder_here, local_folder
from deploy.placement import configure
from deploy.settings import Settings
from engine.checkpoint import INDEX, read_json
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.geometry import KVGroup
from engine.memory import exchange_bytes, kv_budget, longest_sequence, pages_of
from engine.protocol import FrozenStruct, JsonObject

if TYPE_CHECKING:
    from engine.rank.builder import Rank

RESERVE = 3 << 29  # 1.5 GiB
TPS = (1, 2, 4, 8)
PUBLISHED_FORMATS: JsonObject = {  # config.json's quantization_config of folders that Google and others publish
    "int4": {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}}},
    "nvfp4": {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}}},
}  # fmt: skip
_PUBLISHED = re.compile(rf"(?:(?:.*/)?gemma-4-)?({'|'.join(MEMBERS)})(?:-it)?(-assistant)?")


class Pool(FrozenStruct):
    """One KV group of one rank. `pages` counts the null page; sizes are bytes over all layers."""

    group: KVGroup
    pages: int
    page_bytes: int
    pool_bytes: int
    table_bytes: int

    def holds(self, tokens: int) -> int:
        """Sequences of `tokens` tokens that fit; the last token needs no page."""
        return (self.pages - 1) // self.group.worst_pages(max(1, tokens - 1))


class Sizing(FrozenStruct):
    """One rank's KV cache. `budget`: bytes for pools, without page tables."""

    config: EngineConfig
    budget: int
    pools: tuple[Pool, ...]

    @property
    def longest(self) -> int:
        return longest_sequence([pool.group for pool in self.pools], [pool.pages for pool in self.pools])

    def concurrency(self, tokens: int) -> int:
        return min(self.config.max_seqs, *(pool.holds(tokens) for pool in self.pools))


def known_folder(model: str, revision: str | None = None) -> Path | None:
    """A folder with config.json: the model's, the hub cache's, or a public shape's; else None."""
    match = _PUBLISHED.fullmatch(model.lower())
    return folder_here(model, revision) or (local_folder(f"dummy:{match[1]}{match[2] or ''}") if match else None)


def configured(settings: Settings, folder: Path) -> EngineConfig:
    return configure(settings, folder, shape_folder, has_gpus=True)


def shape_folder(model: str, revision: str | None = None) -> Path:
    """`known_folder`; ConfigError if unknown."""
    if (folder := known_folder(model, revision)) is None:
        raise ConfigError(f"model: {model} is not on this machine and no known shape: give a folder with config.json")
    return folder


def size(engine: EngineConfig, weights: int, memory: int) -> Sizing:
    """Size the KV cache next to `weights` bytes on a device of `memory` bytes. ConfigError."""
    budget = kv_budget(engine, memory, weights + RESERVE + exchange_bytes(engine, engine.geometry))
    return Sizing(engine, budget, pools(engine, pages_of(engine, budget)))


def fits_at(settings: Settings, folder: Path, memory: int) -> int | None:
    """The smallest usual group that fits, or None."""
    for tp in TPS:
        try:
            engine = configured(msgspec.structs.replace(settings, tp=tp), folder)
            size(engine, weight_bytes_and_count(engine)[0], memory)
        except ConfigError:  # it does not fit, or the shape does not divide
            continue
        return tp
    return None


@contextmanager
def in_format(folder: Path, weights: str) -> Iterator[Path]:
    """`folder`, or for a public shape in a published quantised format a temporary copy that says
    so: all matrices quantised, experts one by one."""
    if folder.parent != PUBLIC or weights not in PUBLISHED_FORMATS:
        yield folder
        return
    config = read_json(folder / "config.json") | {"quantization_config": PUBLISHED_FORMATS[weights]}
    with TemporaryDirectory() as made:
        to = Path(made)
        for path in folder.iterdir():
            (to / path.name).symlink_to(path.resolve())
        (to / "config.json").unlink()
        (to / "config.json").write_text(json.dumps(config))
        expert = "model.language_model.layers.0.experts.0.down_proj.weight_packed"
        (to / INDEX).write_text(json.dumps({"weight_map": {expert: "model.safetensors"}}))
        yield to


def weight_bytes_and_count(engine: EngineConfig) -> tuple[int, int]:
    """(bytes of one rank's weights with drafter and encoders, elements of the text model)."""
    from engine.rank.checkpoints import checkpoints_of
    from engine.rank.load.slices import elements

    return meta_rank(engine).weight_bytes, elements(checkpoints_of(engine).text.tensors, engine.geometry)


def meta_rank(engine: EngineConfig) -> "Rank":
    """Build rank 0 without memory; all ranks have the same shapes."""
    import torch

    from engine.rank.builder import load_rank
    from engine.rank.parallel import FirstOfGroup

    return load_rank(engine, FirstOfGroup(engine.tp), torch.device("meta"), checked=False)


def pools(engine: EngineConfig, pages: tuple[int, ...]) -> tuple[Pool, ...]:
    import torch

    from engine.rank.builder import kv_cache

    caches = kv_cache(engine, pages, torch.device("meta"))
    return tuple(
        Pool(cache.group, count, cache.pool.nbytes // count, cache.pool.nbytes, cache.table.nbytes)
        for cache, count in zip(caches, pages, strict=True)
    )
