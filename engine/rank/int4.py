"""Matrices of four bits in groups (`kernels.four_bits`)."""

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.rank.weight import Weight
from kernels.four_bits import RUN, interleaved
from kernels.packed import PackedMatrix, unpacked

_WORDS = 1 << 22  # brought into the kernels' order at once


class Int4Weight(Weight):
    """values int32 [..., m, n / 8], scale [..., m, groups], zero int32 [..., m / 8, groups] or
    absent."""

    values: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        if shape[-1] % RUN:
            raise CheckpointError(f"a rank's part has {shape[-1]} columns; int4 weights need a multiple of {RUN}: lower tp")

    def loaded(self) -> None:
        rows = self.values.view(-1, self.values.shape[-1])
        step = max(1, _WORDS // rows.shape[1])
        for first in range(0, len(rows), step):
            block = rows[first : first + step]
            block.copy_(interleaved(block))

    @property
    def matrix(self) -> PackedMatrix:
        return PackedMatrix(self.values, self.scale, "int4", getattr(self, "zero", None))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return unpacked(self.matrix).to(self.dtype)
