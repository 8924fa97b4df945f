"""Matrices in int8 with a scale for each output channel; rows of x are rounded to int8 with a scale of their own."""

import torch
from torch import Tensor

from engine.rank.weight import Weight
from kernels.activation import geglu
from kernels.fused_allreduce_norm import AllReduceInbox
from kernels.linear import GEGLU, NONE, Epilogue

_LEAST_ROWS = 32  # that the library's product takes on a GPU; fewer are padded


class Int8Weight(Weight):
    """values int8 [..., m, n], scale fp32 [..., m, 1]. Sums are exact, so a row's product does not depend on the rows with it."""

    values: Tensor
    scale: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return (self.values * self.scale).to(self.dtype)

    def product(self, x: Tensor, epilogue: Epilogue = NONE, out: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """As `Weight.product`."""
        scale = (x.abs().amax(1, keepdim=True).float() / 127).clamp_min(1e-12)
        rows = x.new_zeros(max(len(x), _LEAST_ROWS), x.shape[1], dtype=torch.int8)
        rows[: len(x)] = (x.float() / scale).round().to(torch.int8)
        sums = torch._int_mm(rows, self.values.t())[: len(x)]
        found = (sums * (scale * self.scale.t())).to(epilogue.dtype or x.dtype)
        if epilogue.gated or epilogue.up is not None:
            found = geglu(found, epilogue.up)
        if out is None:
            return found
        return out.copy_(found)

    def gated(self, x: Tensor, down: Weight) -> Tensor:  # type: ignore[override]  # noqa: ARG002 (rows stay plain)
        return self.product(x, GEGLU)

    def parts(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.product(x)

    def send(self, x: Tensor, inbox: AllReduceInbox) -> None:  # type: ignore[override]
        """Nothing is sent: `product` and then the sum."""
