"""A matrix of a model on one rank: the tensors it is stored as, and its products with what follows each (the epilogue).

`Weight` is the format `plain`. Another format is a class derived from it, in a file of its own, and an entry in
`engine.weight_formats`: it gives `weight`, made of its tensors, by which every product is right, and overrides the products that it
has kernels for. Layers know no format: `engine.rank.load` puts the checkpoint's in the places of their empty weights.
"""

from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from engine.rank.allreduce_norm import AllReduceNorm, Part, Rows
from engine.weight_formats import WeightFormat
from kernels.embed import embed
from kernels.experts import experts
from kernels.launch import PendingTensor
from kernels.linear import linear, linear_geglu, linear_gelu_mul, linear_parts, linear_send
from kernels.sequence_parallel import GatheredRows, Pieces, SequenceParallel


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Makes a parameter that is loaded later."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Weight(nn.Module):
    """W [m, n], or that of each expert [experts, m, n]: this rank's part of the matrix. Made without tensors, by its shape alone.

    weight  its values in `dtype`; here a tensor of its own. Products read it before they wait for the kernel before them: a format
            that computes it overrides them
    """

    weight: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape, self.dtype, self.device = shape, dtype, device
        self.stored: WeightFormat | None = None

    def stored_as(self, stored: WeightFormat) -> "Weight":
        """The same matrix in that format, to be loaded."""
        if self.stored is stored:
            return self
        made: Weight = resolve_name(stored.weight)(self.shape, self.dtype, self.device)
        made.stored = stored
        for tensor in stored.tensors:
            dtype = getattr(torch, tensor.dtype) if tensor.dtype else self.dtype
            setattr(made, tensor.name, empty(*tensor.shape(self.shape), dtype=dtype, device=self.device))
        return made

    def forward(self, x: Rows | Pieces, allreduce_norm: AllReduceNorm | None = None) -> Part:
        """x [T, n] -> x W^T [T, m]. With `allreduce_norm`, this rank's part of a row-parallel product for it: few rows go to the
        ranks' inboxes, if any, many to their owners; where there is one rank, they may be left in fp32 parts [parts, T, m]."""
        peers = None if allreduce_norm is None else allreduce_norm.peers
        if isinstance(x, GatheredRows):  # the product of each piece once it has come
            out = x.rows.new_empty(len(x.rows), len(self.weight))
            for to, piece in zip(x.group.cut(out), x.pieces(), strict=True):
                linear(piece, self.weight, out=to)
            return out
        if isinstance(peers, SequenceParallel):
            return (linear(piece, self.weight) for piece in peers.cut(x))
        assert isinstance(x, Tensor)
        if allreduce_norm is None or (peers is None and allreduce_norm.parallel.size > 1):
            return linear(x, self.weight)
        if peers is None:
            return linear_parts(x, self.weight)
        sent = linear_send(x, self.weight, peers)
        return linear(x, self.weight) if sent is None else sent

    def fp32(self, x: Tensor) -> Tensor:
        """x [T, n] -> fp32 [T, m], the product not rounded to x's dtype: bf16 logits would tie in one row of fourteen."""
        return linear(x, self.weight, dtype=torch.float32)

    def geglu(self, x: Rows) -> Tensor | Pieces:
        """x [T, n] -> gelu_tanh(x G^T) * x U^T [T, m / 2], W = [G; U]."""
        return linear_geglu(x, self.weight) if isinstance(x, Tensor) else (linear_geglu(piece, self.weight) for piece in x.pieces())

    def gelu_mul(self, x: Tensor, up: Tensor) -> Tensor:
        """x [T, n], up [T, m] -> gelu_tanh(x W^T) * up."""
        return linear_gelu_mul(x, self.weight, up)

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor, down: "Weight", dense: PendingTensor) -> Tensor:
        """`kernels.experts` of this matrix, [G; U] of each expert, and `down`, in the same format."""
        return experts(x, weights, chosen, self.weight, down.weight, dense)

    def rows(self, ids: Tensor, first: int, placeholders: Tensor, pad: int) -> Tensor:
        """`kernels.embed`: rows of this table, which begins at row `first` of the vocabulary's."""
        return embed(ids, self.weight, first, placeholders, pad)
