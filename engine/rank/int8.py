"""Matrices in int8 with a scale for each output channel; rows of x are quantised too."""

import torch
from torch import Tensor

from engine.rank.weight import OwnProduct

_LEAST_ROWS = 32  # that the library's product takes on a GPU; fewer are padded


class Int8Weight(OwnProduct):
    """values int8 [..., m, n], scale fp32 [..., m, 1]. Sums are exact, so a row's product does not depend on other rows."""

    values: Tensor
    scale: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return (self.values * self.scale).to(self.dtype)

    def rows_product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        scale = (x.abs().amax(1, keepdim=True).float() / 127).clamp_min(1e-12)
        rows = x.new_zeros(max(len(x), _LEAST_ROWS), x.shape[1], dtype=torch.int8)
        rows[: len(x)] = (x.float() / scale).round().to(torch.int8)
        sums = torch._int_mm(rows, self.values.t())[: len(x)]
        return (sums * (scale * self.scale.t())).to(dtype)
