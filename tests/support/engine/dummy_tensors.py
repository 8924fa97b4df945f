"""The tensors of the model that `engine.rank.load.random_fill.dummy` makes."""

import torch
from torch import Tensor

from engine.geometry import Geometry
from engine.rank.load.random_fill import drawn
from engine.rank.load.slices import pieces
from engine.rank.load.tensor_table import TensorTable


def dummy_tensor(name: str, tensors: TensorTable, geometry: Geometry, seed: int, device: torch.device) -> Tensor:
    """The whole tensor `name` (its checkpoint name), fp32."""
    return torch.cat([block for _, block in drawn(pieces(tensors, geometry)[name], geometry, seed, device)])
