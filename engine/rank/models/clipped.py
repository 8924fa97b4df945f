"""Products whose input and output have bounds, which towers' checkpoints hold as 0-d tensors beside the matrix."""

import math
from pathlib import Path

from torch import Tensor

from engine.rank.load.slices import pieces
from engine.rank.load.tensor_files import headers, opened
from engine.rank.load.tensor_table import TensorTable
from engine.rank.models.layers import Shard
from engine.rank.models.module import Module

BOUNDS = {"input_min": -math.inf, "input_max": math.inf, "output_min": -math.inf, "output_max": math.inf}  # where they are not said
_MATRIX = ".linear.weight"


class ClippedProduct(Module):
    """x W^T. bounds: between which x, and then the product, is cut; None: neither is."""

    def __init__(self, shard: Shard, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = shard.matrix(rows, columns)
        self.bounds: tuple[float, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.bounds is None:
            return self.weight(x)  # type: ignore[no-any-return]
        low, high, least, most = self.bounds
        product: Tensor = self.weight(x.clamp(low, high))
        return product.clamp_(least, most)


def load_bounds(model: Shard, tensors: TensorTable, folder: Path) -> None:
    """Those of every `ClippedProduct` of a model whose matrices the checkpoint in `folder` calls `*.linear.weight`."""
    found, _ = headers(folder, tensors, model.geometry)
    scalars: dict[str, float] = {}
    for path in {header.path for header in found.values()}:
        with opened(path) as file:
            for name, header in found.items():
                if header.path == path and name.endswith(tuple(BOUNDS)):
                    scalars[name] = file.get_tensor(header.name).to(model.dtype).item()
    for name, piece in pieces(tensors, model.geometry).items():
        if name.endswith(_MATRIX):
            product = model.get_submodule(str(piece.weight).rpartition(".")[0])
            assert isinstance(product, ClippedProduct), name
            stem = name.removesuffix(_MATRIX)
            product.bounds = tuple(scalars.get(f"{stem}.{bound}", unbounded) for bound, unbounded in BOUNDS.items())
