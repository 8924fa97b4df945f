"""Matrices in fp8 with a scale for each output channel (`kernels.packed`)."""

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.rank.weight import Weight
from kernels.packed import PackedMatrix, fp8_matrix, unpacked


class Fp8Weight(Weight):
    """values e4m3 [..., m, n], scale fp32 [..., m, 1]. ConfigError on a GPU before compute
    capability 8.9."""

    values: Tensor
    scale: Tensor
    packs_rows = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
            here = ".".join(map(str, capability))
            advice = "set weights: plain and head: bf16"
            raise ConfigError(f"fp8 weights need a GPU of compute capability 8.9 or later; this one has {here}: {advice}")

    @property
    def matrix(self) -> PackedMatrix:
        return PackedMatrix(self.values, self.scale[..., 0], "fp8")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return unpacked(self.matrix).to(self.dtype)


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    packed = fp8_matrix(rows)
    assert packed.scale is not None
    return packed.values, packed.scale[..., None]


def from_tensor_scale(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rows e4m3 [m, n] and the matrix's scale [1, 1]; exact."""
    return values, scale.float().expand(len(values), 1)


def from_block_scales(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rows e4m3 [m, n] and a scale for each block [m / 128, n / 128], rounded up. Rounds again."""
    rows = scale.float().repeat_interleave(128, 0)[: len(values)]
    return pack(values.float() * rows.repeat_interleave(128, 1)[:, : values.shape[1]])
