"""Gemma 4's text model: dense, with experts, or with per-layer embeddings, by its geometry.

    h = E[id] * sqrt(hidden)
    each layer      h = h + norm( attention( norm(h) ) )                     K and V normed, K roped
                    h = h + norm( mlp( norm(h) ) )                           with experts: norm( norm(mlp) + norm(experts) )
                    h = h + norm( W ( gelu(W' h) * ple_layer ) )             with per-layer embeddings
                    h = h * scalar
    logits = norm(h) E^T                                                     or of an untied matrix

Blocks pass (h, x): the residual stream, and its normed form. A fused norm ends each half of a block: the sum over ranks, its
norm, the residual and the next norm. After the last layer that stores K and V only rows that need logits are computed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.geometry import Geometry, Layer, shard_kv_heads
from engine.rank.attention.base import AttentionBackend, AttentionPlan
from engine.rank.batch import ForwardBatch, SoftTokens, frequencies_of
from engine.rank.models.architecture import Model
from engine.rank.models.gemma4_weights import BLOCK_NORMS
from engine.rank.models.layers import Experts, Mlp, Router, VocabTable
from engine.rank.parallel import Parallel
from engine.rank.products import Exchange, Part, Peers, Rows, exchange_over
from engine.rank.shard import Shard
from kernels.fused_allreduce_norm import Norms
from kernels.launch import on_second_stream
from kernels.linear import gelu_times
from kernels.packed import Activations
from kernels.ple import per_layer_inputs


class PreNorm(NamedTuple):
    """The norm before a product, or None. packs: the product reads packed rows."""

    weight: Tensor | None
    packs: bool = False

    def after(self, post: Tensor | None, halves: tuple[Tensor, Tensor] | None = None) -> Norms:
        return Norms(post, self.weight, halves, self.packs)


@dataclass(frozen=True)
class LayerStep:
    """What layers of a forward share. ple: per-layer embeddings [T, layers, ple]."""

    batch: ForwardBatch
    attention: AttentionBackend
    plan: AttentionPlan
    exchange: Exchange
    ple: Tensor | None

    def of_rows(self, rows: Tensor) -> "LayerStep":
        width = self.batch.width
        batch = self.batch.of_rows(rows)
        cache = self.attention.cache
        pages = cache.gather(batch.slots, batch.positions, cache.page_rows(len(rows) // width))
        batch = replace(batch, pages=pages, width=width)
        ple = None if self.ple is None else self.ple[rows]
        plan = self.attention.prepare(batch)
        return replace(self, batch=batch, plan=plan, exchange=self.exchange.of_rows(rows), ple=ple)


class Attention(nn.Module):
    """q, k and v in one product; no v where it is k's raw product, only q where another layer owns K and V."""

    def __init__(self, shard: Shard, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        geometry = shard.geometry
        parallel = shard.parallel
        heads = geometry.heads // parallel.size
        kv_heads = len(shard_kv_heads(geometry.heads, layer.kv_heads, parallel.size, parallel.rank))
        if layer.owns_kv:
            kv_projections = 2 - layer.k_eq_v
        else:
            kv_projections = 0
        self.qkv = shard.matrix((heads + kv_projections * kv_heads) * layer.head_dim, geometry.hidden)
        self.o = shard.matrix(geometry.hidden, heads * layer.head_dim)
        self.q_norm = shard.parameter(layer.head_dim)
        self.k_norm = shard.parameter(layer.head_dim) if layer.owns_kv else None

    def forward(self, x: Rows, step: LayerStep) -> Part:
        return self.attend(self._qkv(x, step), step)

    def attend(self, qkv: Tensor, step: LayerStep) -> Part:
        out = qkv.new_empty(len(qkv), self.o.shape[1])
        step.attention.attend(qkv, self.layer, (self.q_norm, self.k_norm), step.batch, step.plan, out)
        return step.exchange.row_parallel(self.o, out)

    def store(self, x: Rows, step: LayerStep) -> Tensor:
        """Write K and V of x [T, hidden] into their pages; returns raw q."""
        qkv = self._qkv(x, step)
        step.attention.store(qkv, self.layer, (self.q_norm, self.k_norm), step.batch)
        return qkv[:, : self.o.shape[1]]

    def _qkv(self, x: Rows, step: LayerStep) -> Tensor:
        qkv = step.exchange.column_parallel(self.qkv, x)
        assert isinstance(qkv, Tensor)
        return qkv


class Block(nn.Module):
    def __init__(self, shard: Shard, layer: Layer) -> None:
        super().__init__()
        self._index = layer.index
        geometry = shard.geometry
        self.attention = Attention(shard, layer)
        self.mlp = Mlp(shard, layer.intermediate)
        norms = list(BLOCK_NORMS.values())
        self._moe = geometry.moe is not None
        if geometry.moe is not None:
            self.router = Router(shard, geometry.moe)
            self.experts = Experts(shard, geometry.moe)
            norms += ["pre_experts", "post_dense", "post_experts"]
        if geometry.ple:
            self.ple_gate = shard.matrix(geometry.ple, geometry.hidden)
            self.ple_out = shard.matrix(geometry.hidden, geometry.ple)
            norms += ["post_ple"]
        self.norms = shard.norms(norms)
        self.scalar = shard.parameter(1)

    def forward(self, h: Tensor, x: Rows, next_norm: PreNorm, step: LayerStep) -> tuple[Tensor, Rows]:
        """h [T, hidden] and its normed form x -> the same after this layer, normed by `next_norm`."""
        return self._after_attention(self.attention(x, step), h, next_norm, step)

    def narrow(self, h: Tensor, next_norm: PreNorm, step: LayerStep) -> tuple[Tensor, Rows, LayerStep]:
        """Store K and V of all rows; returns h, x and the step of the rows that need logits."""
        rows = step.batch.logit_rows
        assert rows is not None
        _, x = step.exchange.norm(h, None, Norms(None, self.norms["pre_attention"]))
        queries = self.attention.store(x, step)[rows]
        step = step.of_rows(rows)
        if not len(rows):
            return h[rows], h[rows], step
        return *self._after_attention(self.attention.attend(queries, step), h[rows], next_norm, step), step

    def _after_attention(self, part: Part, h: Tensor, next_norm: PreNorm, step: LayerStep) -> tuple[Tensor, Rows]:
        norms = self.norms
        pre_mlp = PreNorm(norms["pre_mlp"], self.mlp.gate_up.packs_rows and step.exchange.packs_rows)
        h, x = step.exchange.sum_norm(part, h, pre_mlp.after(norms["post_attention"]))
        after, scalar = (next_norm, self.scalar) if step.ple is None else (PreNorm(None), None)
        if self._moe:
            assert isinstance(x, Activations)
            dense = on_second_stream(partial(self.mlp.local, x, step.exchange), x)
            adapters = step.exchange.adapters
            weights, chosen, inner = self.router(h, norms["pre_experts"], adapters)
            both = self.experts(inner, weights, chosen, dense, adapters)  # parts side by side: normed apart, then added
            halves = (norms["post_dense"], norms["post_experts"])
            h, x = step.exchange.sum_norm(both, h, after.after(norms["post_mlp"], halves), scalar)
        else:
            h, x = step.exchange.sum_norm(self.mlp(x, step.exchange), h, after.after(norms["post_mlp"]), scalar)
        if step.ple is None:
            return h, x
        inner = step.exchange.product(self.ple_gate, h, gelu_times(step.ple[:, self._index]))
        p = step.exchange.product(self.ple_out, inner)
        return step.exchange.norm(p, h, next_norm.after(norms["post_ple"]), self.scalar)


def pre_norms(blocks: Iterable[nn.Module], last: Tensor) -> list[PreNorm]:
    return [*(PreNorm(b.norms["pre_attention"], b.attention.qkv.packs_rows) for b in blocks if isinstance(b, Block)), PreNorm(last)]


class Embedding(nn.Module):
    """Token rows times sqrt(hidden), rounded as in transformers, and per-layer embeddings."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self._geometry = geometry = shard.geometry
        self._parallel = shard.parallel
        self.tokens = VocabTable(shard, geometry.vocab, geometry.hidden)
        self.scale = torch.tensor(geometry.embedding_scale, dtype=shard.dtype).item()
        self._ple_scale = torch.tensor(math.sqrt(geometry.ple), dtype=shard.dtype).item()
        if geometry.ple:
            width = len(geometry.layers) * geometry.ple
            self.ple_tokens = VocabTable(shard, geometry.ple_vocab, width)
            self.ple_projection = shard.matrix(width, geometry.hidden)
            self.ple_norm = shard.parameter(geometry.ple)

    def forward(
        self, ids: Tensor, next_norm: PreNorm, exchange: Exchange, soft: SoftTokens | None = None
    ) -> tuple[Tensor, Rows, Tensor | None]:
        """ids int32 [T] -> (h [T, hidden], h normed by `next_norm`, per-layer embeddings [T,
        layers, ple] or None).

        soft: replace scaled rows; their per-layer embeddings are pad's.
        """
        geometry = self._geometry
        ple = None
        scale = self.scale
        rows = self.tokens(ids)
        if geometry.ple:
            ple = self.ple_tokens(ids)
            if self._parallel.size > 1:  # one collective for both
                rows, ple = self._parallel.all_reduce(torch.cat([rows, ple], 1)).split([rows.shape[1], ple.shape[1]], 1)
        if soft is not None:
            rows = torch.cat([rows * scale, rows[:1]])
            scale = 1.0
            summed = ple is not None or self._parallel.rank == 0  # in a sum over ranks that is to come the first has all of them
            rows[soft.rows] = soft.values if summed else torch.zeros_like(soft.values)
            rows = rows[:-1]
        norms = next_norm.after(None)
        rows = rows.contiguous()
        if ple is None:
            h, x = exchange.sum_norm(rows, None, norms, scale=scale)
            return h, x, None
        h, x = exchange.norm(rows, None, norms, scale=scale)
        context = exchange.product(self.ple_projection, h)
        ple = per_layer_inputs(context, ple.contiguous(), self.ple_norm, geometry.eps, geometry.hidden**-0.5, self._ple_scale)
        return h, x, ple


class Gemma4(Model):
    def __init__(self, geometry: Geometry, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, parallel, dtype, device)
        self.embedding = Embedding(self)
        self.blocks = nn.ModuleList(Block(self, layer) for layer in geometry.layers)
        self.norm = self.parameter(geometry.hidden)
        self.own_head = None if geometry.tied else VocabTable(self, geometry.vocab, geometry.hidden)
        self._last_stored = max(layer.kv_source for layer in geometry.layers)
        self.frequencies = frequencies_of(geometry.layers, device)

    @property
    def head(self) -> VocabTable:
        if self.own_head is None:
            return self.embedding.tokens
        return self.own_head

    def embed(self, ids: Tensor, exchange: Exchange) -> Tensor:
        _, x = exchange.sum_norm(self.embedding.tokens(ids), None, Norms(None, None), scale=self.embedding.scale)
        return exchange.all_rows(x)

    def states(self, batch: ForwardBatch, attention: AttentionBackend, peers: Peers = None) -> tuple[Tensor, Tensor]:
        exchange = exchange_over(peers, self.parallel, self.geometry.eps, batch.adapters)
        norms = pre_norms(self.blocks, self.norm)
        if not exchange.packs_rows:
            norms = [norm._replace(packs=False) for norm in norms]
        if batch.logit_rows is not None:  # this layer narrows, and needs h of all rows on every rank: x is h without a norm
            norms[self._last_stored] = PreNorm(None)
        h, x, ple = self.embedding(batch.ids, norms[0], exchange, batch.soft)
        step = LayerStep(batch, attention, attention.prepare(batch), exchange, ple)
        for block, (norm, next_norm) in zip(self.blocks, pairwise(norms), strict=True):
            assert isinstance(block, Block)
            if norm.weight is None:
                h, x, step = block.narrow(exchange.all_rows(x), next_norm, step)
            elif len(h):
                h, x = block(h, x, next_norm, step)
        return h, exchange.all_rows(x)
