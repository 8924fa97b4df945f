"""Products with bounds on input and output, 0-d tensors in checkpoints of towers."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.errors import CheckpointError
from engine.quantisation import UNQUANTISED, Quantisation
from engine.rank.load.loader import load
from engine.rank.load.slices import pieces
from engine.rank.load.tensor_files import by_file, headers
from engine.rank.load.tensor_table import BOUNDS, TensorTable
from engine.rank.shard import Shard

_MATRIX = ".linear.weight"


class ClippedProduct(nn.Module):
    """x W^T by the library, since our kernels would compile at a picture's arrival. bounds: of x and of the product."""

    def __init__(self, shard: Shard, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = shard.matrix(rows, columns)
        self.bounds: tuple[float, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.bounds is None:
            return functional.linear(x, self.weight.weight)
        low, high, least, most = self.bounds
        return functional.linear(x.clamp(low, high), self.weight.weight).clamp_(least, most)


def load_encoder(model: Shard, tensors: TensorTable, folder: Path, weights: Quantisation = UNQUANTISED) -> None:
    """Fill an encoder and the bounds, if any, of products named `*.linear`. CheckpointError as `load`."""
    load(model, tensors, folder, weights)
    by_name, _ = headers(folder, tensors, model.geometry)
    scalars = {}
    for name, header, file in by_file({name: header for name, header in by_name.items() if name.endswith(BOUNDS)}):
        bound = file.get_tensor(header.name).to(model.dtype)
        if bound.numel() != 1 or bound.isnan():
            raise CheckpointError(f"{folder}: {header.name}, of shape {list(header.shape)}, is not one number")
        scalars[name] = bound.item()
    for name, piece in pieces(tensors, model.geometry).items():
        names = [f"{name.removesuffix(_MATRIX)}.{bound}" for bound in BOUNDS]
        if name.endswith(_MATRIX) and not scalars.keys().isdisjoint(names):
            product = model.get_submodule(str(piece.weight).rpartition(".")[0])
            assert isinstance(product, ClippedProduct), name
            product.bounds = tuple(map(scalars.get, names, (-torch.inf, torch.inf) * 2))
