"""A matrix of a model on one rank: its stored tensors and its products.

`Weight` is the format `plain`. Another format derives from it, has an entry in `engine.weight_formats`, and gives `weight`, or
`matrix` for kernels that read the stored form.
"""

from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from engine.weight_formats import WeightFormat
from kernels.activation import geglu
from kernels.embed import embed
from kernels.experts import AdaptedRows, adapted_experts, experts
from kernels.fused_allreduce_norm import AllReduceInbox, InboxPart
from kernels.launch import PendingTensor
from kernels.linear import GEGLU, NONE, Epilogue, linear, linear_gated, linear_parts, linear_send
from kernels.lora import LowRank
from kernels.packed import Activations, Matrix


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Weight(nn.Module):
    """W [m, n], or [experts, m, n]: this rank's part. Made without tensors."""

    weight: Tensor  # its values in `dtype`
    packs_rows = False  # whether its products may read x as `kernels.packed.PackedRows`

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.stored: WeightFormat | None = None
        self.adapters: Any = None  # an `AdapterStack`

    def stored_as(self, stored: WeightFormat) -> "Weight":
        if self.stored is stored:
            return self
        made: Weight = resolve_name(stored.weight)(self.shape, self.dtype, self.device)
        made.stored = stored
        for tensor in stored.tensors:
            if tensor.dtype:
                dtype = getattr(torch, tensor.dtype)
            else:
                dtype = self.dtype
            setattr(made, tensor.name, empty(*tensor.shape(self.shape), dtype=dtype, device=self.device))
        return made

    def loaded(self) -> None:
        """Brings the filled tensors into the kernels' order."""

    @property
    def matrix(self) -> Matrix:
        """What kernels read. It must be constant: kernels prefetch it before they wait for earlier ones."""
        return self.weight

    def product(self, x: Activations, epilogue: Epilogue = NONE, out: Tensor | None = None, added: LowRank | None = None) -> Tensor:
        """x [T, n] -> x W^T [T, m], what adapters add, and the epilogue."""
        return linear(x, self.matrix, epilogue, out, added)

    def gated(self, x: Activations, down: "Weight") -> Activations:
        """x [T, n] -> gelu_tanh(x G^T) * x U^T [T, m / 2] for a product with `down`; W = [G; U]."""
        if down.packs_rows:
            return linear_gated(x, self.matrix)
        return self.product(x, GEGLU)

    def parts(self, x: Activations, added: LowRank | None = None) -> Tensor:
        """`kernels.linear.linear_parts`."""
        return linear_parts(x, self.matrix, added)

    def send(self, x: Activations, inbox: AllReduceInbox, added: LowRank | None = None) -> InboxPart | None:
        """`kernels.linear.linear_send`."""
        return linear_send(x, self.matrix, inbox, added)

    def experts(
        self, x: Tensor, weights: Tensor, chosen: Tensor, down: "Weight", dense: PendingTensor, index: Tensor | None = None
    ) -> Tensor:
        """`kernels.experts` of this matrix, [G; U] of each expert, and `down` of the same format. index: int32 [T], adapters."""
        if index is None or (self.adapters is None and down.adapters is None):
            return experts(x, weights, chosen, self.matrix, down.matrix, dense)
        pair = None if self.adapters is None else self.adapters.of_experts()
        last = None if down.adapters is None else down.adapters.of_experts()
        return adapted_experts(x, weights, chosen, self.matrix, down.matrix, dense, AdaptedRows(index, pair, last))

    def rows(self, ids: Tensor, first: int, placeholders: Tensor, pad: int) -> Tensor:
        return embed(ids, self.weight, first, placeholders, pad)


class OwnProduct(Weight):
    """A format whose product is not of `kernels.linear`."""

    def rows_product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [T, n] -> x W^T [T, m] in this dtype."""
        raise NotImplementedError

    def product(self, x: Activations, epilogue: Epilogue = NONE, out: Tensor | None = None, added: LowRank | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        found = self.rows_product(x, epilogue.dtype or x.dtype)
        if added is not None:
            added.add(found)
        if epilogue.gated or epilogue.up is not None:
            found = geglu(found, epilogue.up)
        if out is None:
            return found
        return out.copy_(found)

    def gated(self, x: Activations, down: Weight) -> Activations:  # noqa: ARG002 (rows stay plain)
        return self.product(x, GEGLU)

    def parts(self, x: Activations, added: LowRank | None = None) -> Tensor:
        return self.product(x, added=added)

    def send(self, x: Activations, inbox: AllReduceInbox, added: LowRank | None = None) -> None:
        """Always None: `product` and then the sum."""
