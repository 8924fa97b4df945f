"""Fills a shard with random weights: the same full model at every rank and size on one kind of device, and in fp32 as in bf16."""

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.geometry import Geometry
from engine.quantisation import UNQUANTISED, Quantisation
from engine.rank.load.slices import Piece, allocate
from engine.rank.load.tensor_table import TensorTable
from engine.rank.shard import Shard

_DRAW = 1 << 24  # values drawn at once


def dummy(model: Shard, tensors: TensorTable, seed: int = 0, weights: Quantisation = UNQUANTISED) -> None:
    needed, parameters = allocate(model, tensors, weights.drawn())
    for piece in needed.values():
        for first, block in drawn(piece, model.geometry, seed, model.device):
            piece.put(parameters, first, block)
    model.loaded()


def drawn(piece: Piece, geometry: Geometry, seed: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Blocks (first row, rows fp32 or integers), which depend only on the whole tensor's shape."""
    rows = max(1, _DRAW // math.prod(piece.shape[1:]))
    generator = torch.Generator(device)
    for first in range(0, piece.shape[0], rows):
        shape = (min(rows, piece.shape[0] - first), *piece.shape[1:])
        generator.manual_seed(zlib.crc32(f"{piece.name}/{first}".encode()) ^ seed)
        block = _draw(piece, geometry, torch.randn(shape, generator=generator, device=device))
        if block.is_floating_point():
            block = block.to(getattr(torch, geometry.dtype)).float()
        yield first, block


def _draw(piece: Piece, geometry: Geometry, normal: Tensor) -> Tensor:
    """Scale to a model that is not chaotic: attention logits of std 1, and a lasting residual."""
    if piece.tensor.draw is not None:
        return piece.tensor.draw(normal, piece.fan_in)
    match piece.kind:
        case "matrix" | "unpacked":
            return normal / math.sqrt(piece.shape[-1])
        case "embedding":
            return normal / geometry.embedding_scale
        case "ple_table":
            return normal / math.sqrt(geometry.ple)
        case "norm":
            return 1.0 + 0.2 * normal
        case "head_norm":
            return (1.0 + 0.2 * normal) * piece.shape[0] ** -0.25
        case "scalar":
            # A layer multiplies a relative error by sqrt(c^2 + J^2 (1 - c^2)), c the layer scalar, J ~ 1.6: sixty layers by 10^8
            # at c = 0.6, by 60 at 0.95.
            return torch.full_like(normal, 0.95)
        case "one":
            return torch.ones_like(normal)
