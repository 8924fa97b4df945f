"""The few tensor-parallel layers. Every weight product of a model goes through `Linear`, except the experts' own op.

A column-parallel product is a `Linear` whose weight holds this rank's rows; what it yields stays local. A row-parallel one holds
this rank's columns and yields a part of the sum: parts are added over ranks before anything else may touch them, and Gemma norms
every such sum, so that sum, norm, residual and next norm are one step: `AllReduceNorm`. KV heads that do not divide are held by
several ranks. Weights are made empty; `engine.rank.load` fills them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engine.geometry import Layer, Moe, shard_vocab, vocab_share
from engine.rank.parallel import Parallel
from kernels.embed import embed
from kernels.experts import experts
from kernels.fused_allreduce_norm import AllReduceInbox, InboxPart, Norms, fused_allreduce_norm
from kernels.linear import linear, linear_geglu, linear_parts, linear_send
from kernels.route import route, router_logits


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter to be loaded."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Module(nn.Module):
    """torch's, whose parameters and parts are found as other attributes are: torch looks for each in three dictionaries, in Python,
    whenever it is read. A model stays on the device and in the dtype that it is made with."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._parameters or name in self._modules:
            vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        if name in self._parameters or name in self._modules:
            del vars(self)[name]
        super().__delattr__(name)

    def _apply(self, *_: Any, **__: Any) -> "Module":
        """What torch converts and moves parameters by, behind our back."""
        raise AssertionError("a model is made on its device and in its dtype")


class AttentionModule(Module):
    """A layer's, which reads K and V."""

    layer: Layer


class NormWeights(Module):
    """[width] each, by name."""

    def __init__(self, names: Iterable[str], width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, empty(width, dtype=dtype, device=device))

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = vars(self)[name]
        return weight


class Linear(Module):
    """x [..., n] -> x W^T [..., m]; weight [m, n]."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty(outputs, inputs, dtype=dtype, device=device)

    def forward(self, x: Tensor, allreduce_norm: "AllReduceNorm | None" = None) -> Tensor | InboxPart:
        """With `allreduce_norm`, this rank's part of a row-parallel product for it: few rows go to the ranks' inboxes, if any;
        where there is one rank, they may be left in fp32 parts [parts, T, m]."""
        if allreduce_norm is None or (allreduce_norm.peers is None and allreduce_norm.ranks > 1):
            return linear(x, self.weight)
        if allreduce_norm.peers is None:
            return linear_parts(x, self.weight)
        sent = linear_send(x, self.weight, allreduce_norm.peers)
        return linear(x, self.weight) if sent is None else sent

    def fp32(self, x: Tensor) -> Tensor:
        """x [T, n] -> fp32 [T, m], the product not rounded to x's dtype: bf16 logits would tie in one row of fourteen."""
        return linear(x, self.weight, dtype=torch.float32)


class AllReduceNorm:
    """Adds a layer's parts to the residual (`kernels.fused_allreduce_norm`): over inboxes, or behind an all-reduce.

    keep_full_residual  every rank needs all rows of the residual, because something besides fused norms reads it
    """

    def __init__(self, parallel: Parallel, peers: AllReduceInbox | None, eps: float, *, keep_full_residual: bool = False) -> None:
        self._parallel, self._eps, self._keep_full_residual = parallel, eps, keep_full_residual
        self.peers = peers.begin() if peers is not None else None
        self.ranks = parallel.size

    def __call__(
        self,
        part: Tensor | InboxPart,
        residual: Tensor | None,
        post: Tensor | None,
        next_norm: Tensor | None,
        scalar: Tensor | None = None,
        *,
        each: tuple[Tensor, Tensor] | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """This rank's part [T, n], or [T, 2 n] with norms for `each` half -> (h, x); x is h where there is no `next_norm`."""
        whole = part if isinstance(part, InboxPart) or self.peers is not None else self._parallel.all_reduce(part)
        return self.whole(whole, residual, post, next_norm, scalar, each=each, scale=scale, peers=self.peers)

    def whole(
        self,
        x: Tensor | InboxPart,
        residual: Tensor | None,
        post: Tensor | None,
        next_norm: Tensor | None,
        scalar: Tensor | None = None,
        *,
        each: tuple[Tensor, Tensor] | None = None,
        scale: float = 1.0,
        peers: AllReduceInbox | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same of a sum that is whole on every rank."""
        norms = Norms(post, next_norm, each)
        h, normed = fused_allreduce_norm(x, residual, norms, self._eps, scalar, scale, peers, self._keep_full_residual)
        return h, h if normed is None else normed


class VocabTable(Module):
    """This rank's rows of an embedding table: vocabulary-parallel lookup and, for a tied table, head.

    Every rank has as many; where the vocabulary does not fill the last ranks', they are zero, and their logits -inf."""

    def __init__(self, rows: int, width: int, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        share = vocab_share(rows, parallel.size)
        self._first = parallel.rank * share
        self._filled = len(shard_vocab(rows, parallel.size, parallel.rank))
        self.head = Linear(width, share, dtype, device)

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    def forward(self, ids: Tensor, placeholders: Tensor, pad: int) -> Tensor:
        """ids int [T] -> [T, width]: zero rows for ids of other ranks, to be added over ranks. Placeholders are read as pad."""
        return embed(ids, self.weight, self._first, placeholders, pad)

    def logits(self, x: Tensor) -> Tensor:
        """x [T, width] -> fp32 [T, share]."""
        logits = self.head.fp32(x)
        if self._filled < logits.shape[1]:
            logits[:, self._filled :] = -torch.inf
        return logits


class Mlp(Module):
    """down( gelu_tanh(gate x) * up x ), cut along its width; gate and up are one product. Yields this rank's part."""

    def __init__(self, hidden: int, width: int, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        share = width // parallel.size
        self.gate_up = Linear(hidden, 2 * share, dtype, device)
        self.down = Linear(share, hidden, dtype, device)

    def forward(self, x: Tensor, allreduce_norm: AllReduceNorm | None = None) -> Tensor | InboxPart:
        part: Tensor | InboxPart = self.down(linear_geglu(x, self.gate_up.weight), allreduce_norm)
        return part


class Router(Module):
    """Every rank routes alike: replicated, and fp32 from the norm on, because a rounding of bf16 changes the chosen set."""

    def __init__(self, hidden: int, moe: Moe, eps: float, device: torch.device) -> None:
        super().__init__()
        self._top_k, self._eps = moe.top_k, eps
        self.proj = Linear(hidden, moe.experts, torch.float32, device)
        self.scale = empty(hidden, dtype=torch.float32, device=device)
        self.per_expert_scale = empty(moe.experts, dtype=torch.float32, device=device)

    def forward(self, h: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [T, hidden], the raw residual -> (weights fp32, experts int32), [T, top_k] each, and h normed by `norm`."""
        logits, x = router_logits(h, self.proj.weight, self.scale, norm, self._eps)
        return *route(logits, self.per_expert_scale, self._top_k), x


class Experts(Module):
    """The experts' weights, each cut along its width: [experts, out, in], gate rows before up rows."""

    def __init__(self, hidden: int, moe: Moe, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        share = moe.intermediate // parallel.size
        self.gate_up = empty(moe.experts, 2 * share, hidden, dtype=dtype, device=device)
        self.down = empty(moe.experts, hidden, share, dtype=dtype, device=device)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, beside: Tensor) -> Tensor:
        """x and beside [T, hidden], weights and chosen [T, top_k] -> [T, 2 hidden]: beside, this rank's part of the experts."""
        return experts(x, weights, chosen, self.gate_up, self.down, beside)


def reduce_together(parallel: Parallel, *parts: Tensor) -> tuple[Tensor, ...]:
    """Partial sums [T, n_i] added over ranks in one collective, each kept apart."""
    if parallel.size == 1:
        return parts
    return parallel.all_reduce(torch.cat(parts, dim=-1)).split([part.shape[-1] for part in parts], dim=-1)
