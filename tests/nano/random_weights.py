"""Live random weights, and the sharded safetensors files that hold them.

Matrices are normal with std 1/sqrt(fan_in), embeddings such that rows times the model's own scale have rms 1, norm
weights 1 + 0.2 n, layer scalars uniform in 0.4..0.9, bounds of a tower's products at 1.5..2.5. Three departures keep a small
model worth testing:
  * q and k norms are scaled so that attention logits have std 1: at weight 1 they would have sqrt(head_dim), attention
    would pick single keys, and a wrong page could go unnoticed; at 2 two exact fp32 forwards of e2b differ by 2e-4;
  * router logits have std 2 (hidden**-0.5 is already in the formula): the margin of the chosen experts is not rounding;
  * the embedding rows of byte and control pieces are halved, so that a random model rarely says them.
"""

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.nano.model_shapes import ModelShape
from tests.nano.nano_shapes import Tensor, tensors
from tests.nano.nano_tokenizer import never_emitted_ids

Array = npt.NDArray[np.float32]
Values = Callable[[Tensor], Array]  # a checkpoint's tensor, in fp32

ATTENTION_LOGIT_STD = 1.0
ROUTER_LOGIT_STD = 2.0
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
_SHARDS = 3


def write(shape: ModelShape, out: Path, values: Values, dtype: str) -> None:
    """Writes model-0000i-of-0000n.safetensors and model.safetensors.index.json of `shape` into `out`."""
    shards = list(_split(list(tensors(shape))))
    where = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(out / name, shard, values, dtype)
        where |= {tensor.name: name for tensor in shard}
    size = DTYPES[dtype][1] * sum(math.prod(tensor.shape) for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def draw(tensor: Tensor, shape: ModelShape, seed: int) -> Array:
    """fp32 values of one tensor; a function of seed, member and name, not of the order of drawing."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{shape.member}/{tensor.name}".encode())])
    if tensor.kind == "scalar":
        return rng.uniform(0.4, 0.9, tensor.shape).astype(np.float32)
    if tensor.kind in ("low", "high"):
        return np.array(rng.uniform(1.5, 2.5) * (-1 if tensor.kind == "low" else 1), np.float32)
    normal = rng.standard_normal(tensor.shape, dtype=np.float32)
    if tensor.kind in ("norm", "head_norm"):
        normal = np.float32(1.0) + np.float32(0.2) * normal
    if tensor.kind == "embedding":
        normal[never_emitted_ids()] *= np.float32(0.5)
    return normal * np.float32(_scale(tensor, shape))


def _scale(tensor: Tensor, shape: ModelShape) -> float:
    width = tensor.shape[-1]
    # q . k sums head_dim products of unit rms: std sqrt(head_dim), times the scales of both norms
    head_norm = math.sqrt(ATTENTION_LOGIT_STD) / width**0.25
    scales = {
        "matrix": width**-0.5,
        "embedding": shape.hidden**-0.5,
        "ple_embedding": max(shape.ple, 1) ** -0.5,
        "router": ROUTER_LOGIT_STD,
        "head_norm": head_norm,
    }
    return scales.get(tensor.kind, 1.0)


def to_bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even. Values must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def _split(every: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive runs of about equal size."""
    share = sum(math.prod(tensor.shape) for tensor in every) / _SHARDS
    run = []
    filled = 0
    for tensor in every:
        run.append(tensor)
        filled += math.prod(tensor.shape)
        if filled >= share:
            yield run
            run, filled = [], 0
    if run:
        yield run


def _write_shard(path: Path, shard: list[Tensor], values: Values, dtype: str) -> None:
    """The safetensors format: header length (u64), JSON header padded with spaces to 8 bytes, then the data."""
    tag, width = DTYPES[dtype]
    header = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        size = width * math.prod(tensor.shape)
        header[tensor.name] = {"dtype": tag, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in shard:
            array = values(tensor)
            file.write((to_bfloat16(array).astype("<u2") if dtype == "bfloat16" else array.astype("<f4")).tobytes())
