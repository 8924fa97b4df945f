"""Gemma 4's text model: dense, with experts, or with per-layer embeddings; the geometry says which.

    h = E[id] * sqrt(hidden)
    each layer      h = h + norm( attention( norm(h) ) )                     K and V normed, K roped, both into pages
                    h = h + norm( mlp( norm(h) ) )                           with experts: norm( norm(mlp) + norm(experts) )
                    h = h + norm( W ( gelu(W' h) * ple_layer ) )             where there are per-layer embeddings
                    h = h * scalar
    logits = norm(h) E^T

Every row-parallel sum is complete before the norm that follows it. Layers that read another layer's K and V store nothing: behind
the last layer that does store, only the rows whose logits are wanted go on.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.geometry import Geometry, Layer, Rope, check_tp, shard_kv_heads
from engine.rank.attention.base import AttentionBackend
from engine.rank.batch import ForwardBatch
from engine.rank.kv import KVCache
from engine.rank.models.layers import Experts, Linear, Mlp, Router, RowLinear, VocabTable, empty, reduce_together
from engine.rank.parallel import Parallel
from kernels.activation import gelu_mul
from kernels.norm import norm_add, rms_norm
from kernels.qkv import inverse_frequencies, norm_rope, rotary

_RopeKey = tuple[Rope, int]


@dataclass(frozen=True)
class _Step:
    """What the layers of one forward share: the batch, its rotary tables [T, pairs], its per-layer embeddings [T, layers, ple]."""

    batch: ForwardBatch
    rope: dict[_RopeKey, tuple[Tensor, Tensor]]
    ple: Tensor | None

    def logit_rows(self) -> "_Step":
        """The same step with only the rows whose logits are wanted, each a row of its own."""
        rows = self.batch.logit_rows
        rope = {key: (cos[rows], sin[rows]) for key, (cos, sin) in self.rope.items()}
        return _Step(_logit_batch(self.batch), rope, None if self.ple is None else self.ple[rows])


def _logit_batch(batch: ForwardBatch) -> ForwardBatch:
    """Rows of `batch.logit_rows` as decode rows. Every decode row wants logits; the other rows come from chunks, and the host
    knows no more of their positions than that they lie before the longest chunk's end."""
    rows, decodes = batch.logit_rows, len(batch.decode_bounds)
    prefills = rows.shape[0] - decodes
    assert prefills >= 0, f"{decodes} decode rows, but {rows.shape[0]} logit rows"
    bound = max((chunk.end for chunk in batch.chunks), default=0)
    return replace(
        batch,
        ids=batch.ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        logit_rows=torch.arange(rows.shape[0], device=rows.device),
        chunks=(),
        decode_bounds=(bound,) * prefills + batch.decode_bounds,
    )


class Attention(nn.Module):
    """q, k and v in one product: no v where it is k's raw product, q alone where K and V are another layer's."""

    def __init__(self, geometry: Geometry, layer: Layer, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layer, self._eps = layer, geometry.eps
        heads = geometry.heads // parallel.size
        kv_heads = len(shard_kv_heads(geometry.heads, layer.kv_heads, parallel.size, parallel.rank))
        sides = (2 - layer.k_eq_v) if layer.owns_kv else 0
        self._heads = (heads, *(kv_heads,) * sides)
        self.qkv = Linear(geometry.hidden, sum(self._heads) * layer.head_dim, dtype, device)
        self.o = RowLinear(heads * layer.head_dim, geometry.hidden, parallel, dtype, device)
        self.q_norm = empty(layer.head_dim, dtype=dtype, device=device)
        if layer.owns_kv:
            self.k_norm = empty(layer.head_dim, dtype=dtype, device=device)

    def forward(self, x: Tensor, step: _Step, cache: KVCache, attention: AttentionBackend) -> Tensor:
        layer, group = self.layer, cache.of(self.layer)
        cos, sin = step.rope[layer.rope, layer.head_dim]
        q, *kv = self.qkv(x).view(x.shape[0], -1, layer.head_dim).split(self._heads, dim=1)
        if kv:
            k = norm_rope(kv[0], self.k_norm, cos, sin, self._eps)
            group.write(layer.index, step.batch, k, rms_norm(kv[-1], None, self._eps))
        q = norm_rope(q, self.q_norm, cos, sin, self._eps)
        return self.o(attention.attend(q, layer, step.batch, group).flatten(1))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, geometry: Geometry, layer: Layer, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden = geometry.hidden
        self._index, self._eps, self._parallel = layer.index, geometry.eps, parallel
        self.attention = Attention(geometry, layer, parallel, dtype, device)
        self.mlp = Mlp(hidden, layer.intermediate, parallel, dtype, device)
        norms = ["pre_attention", "post_attention", "pre_mlp", "post_mlp"]
        self._moe, self._ple = geometry.moe is not None, geometry.ple > 0
        if geometry.moe is not None:
            self.router = Router(hidden, geometry.moe, geometry.eps, device)
            self.experts = Experts(hidden, geometry.moe, parallel, dtype, device)
            norms += ["pre_experts", "post_dense", "post_experts"]
        if self._ple:
            self.ple_gate = Linear(hidden, geometry.ple, dtype, device)
            self.ple_out = Linear(geometry.ple, hidden, dtype, device)
            norms += ["post_ple"]
        self.norms = nn.ParameterDict({name: empty(hidden, dtype=dtype, device=device) for name in norms})
        self.scalar = empty(1, dtype=dtype, device=device)

    def forward(self, h: Tensor, step: _Step, cache: KVCache, attention: AttentionBackend) -> Tensor:
        a = self.attention(self._norm("pre_attention", h), step, cache, attention)
        h = norm_add(h, a, self.norms["post_attention"], self._eps)
        y = self._dense_and_experts(h) if self._moe else self.mlp(self._norm("pre_mlp", h))
        if step.ple is None:
            return norm_add(h, y, self.norms["post_mlp"], self._eps, self.scalar)
        h = norm_add(h, y, self.norms["post_mlp"], self._eps)
        p = self.ple_out(gelu_mul(self.ple_gate(h), step.ple[:, self._index]))
        return norm_add(h, p, self.norms["post_ple"], self._eps, self.scalar)

    def _dense_and_experts(self, h: Tensor) -> Tensor:
        """Both branches are whole, and normed apart, before they are added."""
        weights, chosen = self.router(h)
        dense = self.mlp.partial(self._norm("pre_mlp", h))
        sparse = self.experts.partial(self._norm("pre_experts", h), weights, chosen)
        dense, sparse = reduce_together(self._parallel, dense, sparse)
        return self._norm("post_dense", dense) + self._norm("post_experts", sparse)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.norms[name], self._eps)


class Embedding(nn.Module):
    """Token rows times sqrt(hidden), the factor rounded to the table's dtype as transformers does, and the per-layer embeddings.

    Ids that stand for images, video or audio embed as pad where they occur in text.
    """

    def __init__(self, geometry: Geometry, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._geometry, self._parallel = geometry, parallel
        self.tokens = VocabTable(geometry.vocab, geometry.hidden, parallel, dtype, device)
        self._placeholders = torch.tensor(geometry.placeholders, dtype=torch.int64, device=device)
        self._scale = torch.tensor(geometry.embedding_scale, dtype=dtype).item()
        self._ple_scale = torch.tensor(math.sqrt(geometry.ple), dtype=dtype).item()
        if geometry.ple:
            width = len(geometry.layers) * geometry.ple
            self.ple_tokens = VocabTable(geometry.ple_vocab, width, parallel, dtype, device)
            self.ple_projection = Linear(geometry.hidden, width, dtype, device)
            self.ple_norm = empty(geometry.ple, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """ids int64 [T] -> (h [T, hidden], per-layer embeddings [T, layers, ple] or None)."""
        ids = torch.where(torch.isin(ids, self._placeholders), self._geometry.pad, ids)
        if not self._geometry.ple:
            return self._parallel.all_reduce(self.tokens.partial(ids)) * self._scale, None
        rows, ple = reduce_together(self._parallel, self.tokens.partial(ids), self.ple_tokens.partial(ids))
        h = rows * self._scale
        return h, self._per_layer(h, ple * self._ple_scale)

    def _per_layer(self, h: Tensor, tokens: Tensor) -> Tensor:
        geometry = self._geometry
        shape = (h.shape[0], len(geometry.layers), geometry.ple)
        context = (self.ple_projection(h) * geometry.hidden**-0.5).view(shape)
        return (rms_norm(context, self.ple_norm, geometry.eps) + tokens.view(shape)) * 2.0**-0.5


class Gemma4(nn.Module):
    """One rank's shard. `geometry` is the whole model's; parameters are empty, of this rank's shapes, on `device`."""

    def __init__(self, geometry: Geometry, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        _check(geometry, parallel.size)
        self.geometry, self.parallel, self.dtype, self.device = geometry, parallel, dtype, device
        self.embedding = Embedding(geometry, parallel, dtype, device)
        self.blocks = nn.ModuleList(Block(geometry, layer, parallel, dtype, device) for layer in geometry.layers)
        self.norm = empty(geometry.hidden, dtype=dtype, device=device)
        self._sharing = max(layer.kv_source for layer in geometry.layers) + 1
        self._frequencies = {(layer.rope, layer.head_dim): _frequencies(layer).to(device) for layer in geometry.layers}

    def forward(self, batch: ForwardBatch, cache: KVCache, attention: AttentionBackend) -> Tensor:
        """[R, hidden]: the final-normed rows of `batch.logit_rows`. Writes the batch's K and V into `cache`."""
        return rms_norm(self.residual(batch, cache, attention), self.norm, self.geometry.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> fp32 [R, vocab / size]: this rank's slice, before the soft cap (`geometry.softcap`)."""
        return self.embedding.tokens.head.wide(hidden)

    def residual(self, batch: ForwardBatch, cache: KVCache, attention: AttentionBackend) -> Tensor:
        """[R, hidden]: the residual stream behind the last layer, before the final norm."""
        h, ple = self.embedding(batch.ids)
        rope = {key: rotary(batch.positions, inverse) for key, inverse in self._frequencies.items()}
        step = _Step(batch, rope, ple)
        for block in self.blocks[: self._sharing]:
            h = block(h, step, cache, attention)
        if batch.logit_rows.shape[0] == batch.ids.shape[0]:
            rest = step
        else:
            h, rest = h[batch.logit_rows], step.logit_rows()
        for block in self.blocks[self._sharing :] if h.shape[0] else ():
            h = block(h, rest, cache, attention)
        return h


def _frequencies(layer: Layer) -> Tensor:
    return inverse_frequencies(layer.rope.theta, layer.rope.pairs, layer.head_dim, layer.rope.factor)


def _check(geometry: Geometry, size: int) -> None:
    check_tp(geometry, size)
    if geometry.ple and geometry.ple_vocab < geometry.vocab:
        raise CheckpointError(f"vocab_size_per_layer_input ({geometry.ple_vocab}) is below vocab_size ({geometry.vocab})")
