"""What lies between the QKV product and attention: head norms, rotary embedding, and the write of K and V into pages.

    norm_rope(x; w)      x' = rms_norm(x; w) over each head, then for the rotated pairs (i, i + d/2), i < pairs:
                         (x'_i, x'_j) -> (x'_i cos - x'_j sin, x'_j cos + x'_i sin);  all other dims pass through
    write_pages          pool[table[slot, p // page], 0 | 1, :, p % page] = k | v       for a token of `slot` at position p

Angles, cos and sin, norm and rotation are fp32, with one cast at the end. transformers rounds the norm, cos and sin to the
activation's dtype first; at position 100 000 that costs no accuracy of the angle, but three roundings where one will do, and
a fused kernel holds all of it in registers anyway.
"""

import torch
from torch import Tensor

from kernels.norm import rms_norm


def inverse_frequencies(theta: float, pairs: int, head_dim: int, factor: float = 1.0) -> Tensor:
    """fp32 [pairs] on the CPU: theta ** (-2 i / head_dim) / factor, in transformers' order of operations."""
    exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents) / factor


def rotary(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions int64 [T], frequencies fp32 [pairs] -> (cos, sin), fp32 [T, pairs] each."""
    assert frequencies.dtype == torch.float32, frequencies.dtype
    angles = positions[:, None].float() * frequencies
    return angles.cos(), angles.sin()


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [T, heads, d], weight [d], cos and sin fp32 [T, pairs] with pairs <= d/2 -> [T, heads, d] in x's dtype."""
    assert cos.shape == sin.shape == (x.shape[0], cos.shape[1]), (cos.shape, sin.shape, x.shape)
    assert 2 * cos.shape[1] <= x.shape[2], (cos.shape, x.shape)
    return _rope_reference(rms_norm(x, weight, eps, torch.float32), cos, sin).to(x.dtype)


def write_pages(pool: Tensor, table: Tensor, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [T, kv_heads, d] in one layer's pool [pages, 2, kv_heads, page, d] through table int32 [slots, width].

    Page numbers become int64 before they are multiplied: a pool exceeds 2^31 elements at real sizes.
    """
    assert k.shape == v.shape == (slots.shape[0], pool.shape[2], pool.shape[4]), (k.shape, v.shape, pool.shape)
    assert k.dtype == v.dtype == pool.dtype, (k.dtype, v.dtype, pool.dtype)
    page = pool.shape[3]
    pages = table[slots, positions // page].long()
    offsets = positions % page
    pool[pages, 0, :, offsets] = k
    pool[pages, 1, :, offsets] = v


def _rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half, pairs = x.shape[-1] // 2, cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :pairs], x[..., half : half + pairs]
    turned = x.clone()
    turned[..., :pairs] = first * cos - second * sin
    turned[..., half : half + pairs] = second * cos + first * sin
    return turned
