"""Matrices in fp8 with a scale for each output channel (`kernels.packed`)."""

from torch import Tensor

from engine.rank.weight import Weight
from kernels.packed import PackedMatrix, fp8_matrix, unpacked


class Fp8Weight(Weight):
    """values e4m3 [..., m, n], scale fp32 [..., m, 1]."""

    values: Tensor
    scale: Tensor
    packs_rows = True

    @property
    def matrix(self) -> PackedMatrix:
        return PackedMatrix(self.values, self.scale[..., 0], "fp8")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return unpacked(self.matrix).to(self.dtype)


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Plain rows [..., m, n] -> values and scale."""
    packed = fp8_matrix(rows)
    assert packed.scale is not None
    return packed.values, packed.scale[..., None]
