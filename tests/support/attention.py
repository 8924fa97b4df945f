"""Decode rows and prefill chunks for the attention kernels: inputs in shuffled pages amid NaN, and the answer in fp64.

The answer is worked out from the raw product by formulas of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.decode import DecodeScratch, DecodeTile, decode_attention
from kernels.qkv import replace_unturned
from kernels.verify import VerifyTile, verify_attention, verify_cut_of
from tests.support.launches import Node, record

EPS = 1e-6
E4M3 = torch.float8_e4m3fn
OUTSIDE = 2**31 - 7  # a page id that no pool has


@dataclass(frozen=True)
class Shape:
    """One layer on one rank. kv_projections: 2; 1: v is k's raw product; 0: K and V are another layer's."""

    heads: int
    kv_heads: int
    d: int
    pairs: int
    kv_projections: int = 2
    window: int | None = None
    page: int = 32

    @property
    def read_pairs(self) -> int:
        """Pairs that are read of K where V is its raw product; 0: all of K is."""
        return self.pairs * (self.kv_projections == 1)


def unrotated(shape: Shape) -> Tensor:
    """bool [d]: the dims that rope does not turn. Where v is k's raw product, K's are V's times K's weight."""
    return torch.arange(shape.d) % (shape.d // 2) >= shape.pairs


@dataclass(frozen=True)
class Case:
    """Inputs of `decode_attention` on the CPU, the output it must give, and the pool it must leave."""

    shape: Shape
    qkv: Tensor
    pool: Tensor
    page_ids: Tensor
    positions: Tensor
    cos_sin: Tensor
    q_norm: Tensor
    k_norm: Tensor | None
    want: Tensor
    pool_after: Tensor

    def inputs(self, pool: Tensor | None = None) -> tuple[Any, ...]:
        """The first arguments of `decode_attention`, with another pool than the case's own if that is given."""
        pool = self.pool if pool is None else pool
        return self.qkv, pool, self.page_ids, self.positions, self.cos_sin, self.q_norm, self.k_norm, EPS


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    """x [..., d] over its root mean square, in fp64."""
    x = x.double()
    x = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    return x if weight is None else x * weight.double()


def turned(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, d] with its first pairs (i, i + d/2) rotated, in fp64."""
    pairs, half = cos_sin.shape[1] // 2, x.shape[-1] // 2
    turn = torch.complex(*(side.double() for side in cos_sin.split(pairs, 1)))[:, None]
    rotated = torch.complex(x[..., :pairs].double(), x[..., half : half + pairs].double()) * turn
    x = x.double().clone()
    x[..., :pairs], x[..., half : half + pairs] = rotated.real, rotated.imag
    return x


def attended(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None, spans: Sequence[tuple[int, int]] = ()
) -> Tensor:
    """q [n, heads, d] at `positions` over k, v [length, kv_heads, d], in fp64; positions of a span see each other."""
    group = q.shape[1] // k.shape[1]
    k, v = (side.double().repeat_interleave(group, 1) for side in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k)
    queries, keys = positions[:, None], torch.arange(len(k))
    seen = keys <= queries
    for first, last in spans:
        seen |= (first <= queries) & (queries < last) & (first <= keys) & (keys < last)
    seen &= keys > queries - (window or 1 << 30)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def stored_as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x in its dtype, as pages of `dtype` hold it; None: of x's own."""
    return x if dtype is None else x.to(dtype).to(x.dtype)


Dense = Sequence[tuple[Tensor, Tensor]]  # K and V [length, kv_heads, d] of each row


def in_pages(dense: Dense, oldest: Sequence[int], page: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each row's keys and values from its oldest one on, in shuffled pages amid NaN; and the ids of its pages from that key's on,
    whose tail names no page."""
    counts = [-(-len(k) // page) - first // page for (k, _), first in zip(dense, oldest, strict=True)]
    _, kv_heads, d = dense[0][0].shape
    pool = torch.full((sum(counts) + 2, 2, kv_heads, page, d), math.nan, dtype=dense[0][0].dtype)
    free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    page_ids = torch.full((len(dense), max(counts) + 3), OUTSIDE, dtype=torch.int32)
    for row, (sides, first) in enumerate(zip(dense, oldest, strict=True)):
        for entry in range(counts[row]):
            page_ids[row, entry] = number = free.pop()
            start = (first // page + entry) * page
            begin, end = max(start, first), min(start + page, len(sides[0]))
            for side in (0, 1):
                pool[number, side, :, begin - start : end - start] = sides[side][begin:end].transpose(0, 1)
    return pool, page_ids


def decode_case(
    shape: Shape, lengths: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, stored: torch.dtype | None = None
) -> Case:
    """A row for each length, its own token included; 0 is a padding row. stored: dtype of pages, None: `dtype`.

    NaN lies in free pages, in the positions not written yet and in pages before the window; the tail of `page_ids` names no page.
    """
    generator = torch.Generator().manual_seed(seed + len(lengths) + shape.d)
    rows, page, window = len(lengths), shape.page, shape.window

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    qkv = draw(rows, (shape.heads + shape.kv_projections * shape.kv_heads) * shape.d).to(dtype)
    q_norm, k_norm = ((1 + 0.1 * draw(shape.d)).to(dtype) / scale for scale in (shape.d**0.25, shape.d**0.25))
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    angles = draw(rows, shape.pairs)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    heads = qkv.view(rows, -1, shape.d).split((shape.heads, *(shape.kv_heads,) * shape.kv_projections), 1)
    q = turned(normed(heads[0], q_norm), cos_sin).to(dtype)
    want = torch.zeros(rows, shape.heads * shape.d, dtype=torch.float64)
    dense = []
    for row, length in enumerate(lengths):
        k, v = (draw(length, shape.kv_heads, shape.d).to(dtype) / scale for scale in (shape.d**0.25, 1))
        if shape.kv_projections == 1:
            k = replace_unturned(k, v * k_norm, shape.pairs)
        if length and shape.kv_projections:
            k[-1] = turned(normed(heads[1][row : row + 1], k_norm), cos_sin[row : row + 1])[0]
            v[-1] = normed(heads[-1][row], None)
        k, v = stored_as(k, stored), stored_as(v, stored)
        dense.append((k, v))
        if length:
            want[row] = attended(q[row : row + 1], k, v, positions[row : row + 1], window).flatten()
    oldest = [0 if window is None else max(0, length - window) for length in lengths]
    after, page_ids = in_pages(dense, oldest, page, generator)
    after = after.to(stored or dtype)
    pool = after.clone()
    for row, (length, first) in enumerate(zip(lengths, oldest, strict=True)):
        if length and shape.kv_projections:
            pool[page_ids[row, (length - 1) // page - first // page], :, :, (length - 1) % page] = math.nan
    return Case(shape, qkv, pool, page_ids, positions, cos_sin, q_norm, k_norm if shape.kv_projections else None, want, after)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory, for launches that are only listed."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    """As `meta`, of int32."""
    return meta(*shape, dtype=torch.int32)


def decode_node(
    shape: Shape,
    rows: int,
    splits: int,
    target: tuple[int, int],
    tile: DecodeTile | None = None,
    dtype: torch.dtype = torch.bfloat16,
    pages: int = 64,
    bucket: int = 0,
) -> Node:
    """The launch of `decode_attention` on a GPU of compute capability `target`."""
    heads, kv_heads, d = shape.heads, shape.kv_heads, shape.d
    with record(target) as nodes:
        decode_attention(
            meta(rows, (heads + shape.kv_projections * kv_heads) * d, dtype=dtype),
            meta(9, 2, kv_heads, shape.page, d, dtype=dtype),
            ints(rows, pages),
            ints(rows),
            meta(rows, 2 * shape.pairs, dtype=torch.float32),
            meta(d, dtype=dtype),
            meta(d, dtype=dtype) if shape.kv_projections else None,
            EPS,
            shape.window,
            DecodeScratch(rows, heads, kv_heads, d, rows * splits, torch.device("meta")),
            meta(rows, heads * d, dtype=dtype),
            splits,
            tile,
            bucket,
        )
    (node,) = nodes
    return node


def verify_nodes(shape: Shape, q_len: int, target: tuple[int, int], rows: int = 3, tile: VerifyTile | None = None) -> list[Node]:
    """The launches of `verify_attention` in four splits: attention, and the sum of its parts."""
    heads, kv_heads, d = shape.heads, shape.kv_heads, shape.d
    q, pool = meta(rows * q_len, heads, d), meta(9, 2, kv_heads, shape.page, d)
    scratch = DecodeScratch(rows, heads, kv_heads, d, 4 * rows * q_len, torch.device("meta"))
    with record(target) as nodes:
        tile = tile or verify_cut_of(pool, rows, q_len * heads // kv_heads, 40)[1]
        verify_attention(q, pool, ints(rows, 40), ints(rows * q_len), shape.window, scratch, torch.empty_like(q), 4, tile)
    return nodes
