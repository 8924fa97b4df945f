"""The tensor-parallel layers. Every product is a `Weight`'s, except the router's.

A column-parallel `Weight` has this rank's rows; a row-parallel one has its columns and gives a part of a sum over ranks
(`engine.rank.products`). KV heads that do not divide are replicated.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from engine.geometry import Moe, shard_vocab, vocab_share
from engine.rank.fp8 import Fp8Weight, pack
from engine.rank.products import Exchange, Part, Rows
from engine.rank.shard import Shard
from engine.weight_formats import FP8
from kernels.launch import PendingTensor
from kernels.linear import FP32
from kernels.norm import rms_norm
from kernels.packed import Activations
from kernels.recheck import recheck
from kernels.route import route, router_logits, router_parts
from kernels.tiles import MOST_ROWS

_PACKED_ROWS = 1 << 14  # of a table, packed at once


class VocabTable(nn.Module):
    """This rank's rows of an embedding table. Ranks have equal shares; rows after the vocabulary's end are zero, their logits
    -inf."""

    def __init__(self, shard: Shard, rows: int, width: int) -> None:
        super().__init__()
        parallel = shard.parallel
        share = vocab_share(rows, parallel.size)
        self._first = parallel.rank * share
        self._filled = len(shard_vocab(rows, parallel.size, parallel.rank))
        self._placeholders = torch.tensor(shard.geometry.placeholders, dtype=torch.int32, device=shard.device)
        self._pad = shard.geometry.pad
        self.head = shard.matrix(share, width)
        self.fp8_copy: Fp8Weight | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """ids int [T] -> [T, width], to be summed over ranks. Media placeholders embed as pad."""
        return self.head.rows(ids, self._first, self._placeholders, self._pad)

    def add_fp8_copy(self) -> None:
        table = self.head.weight
        copy = self.head.stored_as(FP8)
        assert isinstance(copy, Fp8Weight)
        for first in range(0, len(table), _PACKED_ROWS):
            rows = slice(first, first + _PACKED_ROWS)
            copy.values[rows], copy.scale[rows] = pack(table[rows])
        self.fp8_copy = copy

    def logits(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """fp32 [T, share]."""
        # With an fp8 copy only the best logits of each row are exact. Many rows are bound by arithmetic, and read the table.
        if self.fp8_copy is None or exact or len(x) > MOST_ROWS:
            logits = self.head.product(x, FP32)
        else:
            logits = self.fp8_copy.product(x, FP32)
            recheck(logits, x, self.head.weight)
        if self._filled < logits.shape[1]:
            logits[:, self._filled :] = -torch.inf
        return logits


class Mlp(nn.Module):
    """down( gelu_tanh(gate x) * up x ), cut along its width; gate and up are one product."""

    def __init__(self, shard: Shard, width: int) -> None:
        super().__init__()
        hidden = shard.geometry.hidden
        share = width // shard.parallel.size
        self.gate_up = shard.matrix(2 * share, hidden)
        self.down = shard.matrix(hidden, share)

    def forward(self, x: Rows, exchange: Exchange) -> Part:
        return exchange.row_parallel(self.down, exchange.gated(self.gate_up, x, self.down))

    def local(self, x: Activations, exchange: Exchange) -> Tensor:
        inner = exchange.gated(self.gate_up, x, self.down)
        assert isinstance(inner, Activations)
        return exchange.product(self.down, inner)


class Router(nn.Module):
    """Replicated, fp32 from the norm on: rounding to bf16 would change the chosen experts."""

    def __init__(self, shard: Shard, moe: Moe) -> None:
        super().__init__()
        self._top_k = moe.top_k
        self._eps = shard.geometry.eps
        hidden = shard.geometry.hidden
        self.proj = shard.parameter(moe.experts, hidden, dtype=torch.float32)
        self.scale = shard.parameter(hidden, dtype=torch.float32)
        self.per_expert_scale = shard.parameter(moe.experts, dtype=torch.float32)
        self.adapters: Any = None  # an `AdapterStack`, where adapters change `proj`

    @cached_property
    def _parts(self) -> Tensor:
        """Made by the first forward, before the KV cache is sized, and synchronised: kernels read
        weights before they wait for others."""
        parts = router_parts(self.proj, self.scale)
        if parts.is_cuda:
            torch.cuda.current_stream().synchronize()
        return parts

    def forward(self, h: Tensor, norm: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """h [T, hidden], raw -> weights fp32 and experts int32 [T, top_k], and h normed by `norm`. index: int32 [T], adapters."""
        logits, x = router_logits(h, self._parts, norm, self._eps)
        if self.adapters is not None and index is not None:
            scaled = rms_norm(h, None, self._eps, torch.float32) * self.scale * h.shape[1] ** -0.5
            self.adapters.add(logits, scaled, index)
        return *route(logits, self.per_expert_scale, self._top_k), x


class Experts(nn.Module):
    """[experts, out, in], cut along their width, gate rows before up."""

    def __init__(self, shard: Shard, moe: Moe) -> None:
        super().__init__()
        hidden = shard.geometry.hidden
        share = moe.intermediate // shard.parallel.size
        self.gate_up = shard.matrix(moe.experts, 2 * share, hidden)
        self.down = shard.matrix(moe.experts, hidden, share)

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, dense: PendingTensor, index: Tensor | None = None
    ) -> Tensor:
        """x and dense [T, hidden], weights and chosen [T, top_k] -> [T, 2 hidden]: dense's part, the experts'."""
        return self.gate_up.experts(x, weights, chosen, self.down, dense, index)
