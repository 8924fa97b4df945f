"""From logits to tokens: a pure function of a row's logits, seed, position and token ids.

    cap      l  <- c tanh(l / c)
    mask     l_i <- -inf                                         for forbidden ids
    scale    s = l / temperature
    top_k    keep the k largest s_i                              ties: the lower id; 0: all
    top_p    p = softmax over kept; keep the shortest descending prefix of mass at least top_p
    min_p    keep s_i >= max s + ln(min_p)                       that is p_i >= min_p max p
    choose   argmax over kept of s_i + g_i                       g_i = -ln(-ln(1 - v)), Gumbel noise

v = (h + 1/2) / 2^32, h a hash of (seed, position, token id) in int64 without overflow: the same bits on every device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.sampling_batch import GREEDY_BELOW, SMALL_TOP_K

GREEDY = constexpr(GREEDY_BELOW)
SMALL = constexpr(SMALL_TOP_K)
_LOW = 0xFFFFFFFF
_HIGHEST = 1.0 - 2.0**-24  # largest fp32 below one: keeps the noise finite


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def mask(logits: Tensor, ids: Tensor, first: int) -> Tensor:
    """-inf at ids int64 [R, m], negative: none. logits [R, n] of ids from `first` on."""
    local = ids - first
    hit = (ids >= 0) & (local >= 0) & (local < logits.shape[1])
    ceiling = torch.where(hit, -torch.inf, torch.inf).to(logits.dtype)
    return logits.scatter_reduce(1, local.clamp(0, logits.shape[1] - 1), ceiling, "amin")


def hash32(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """seeds and positions int64 [R], ids int64 [R, n] or [n] -> int64 [R, n] in [0, 2^32)."""
    mix = _mix.fn
    key = mix(seeds & _LOW)
    key = mix(key ^ ((seeds >> 32) & _LOW) ^ 0x5BD1E995)
    key = mix(key ^ (positions & _LOW) ^ 0x27D4EB2F)
    return mix(mix((ids + key[:, None]) & _LOW) ^ mix(key ^ 0x165667B1)[:, None])


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """fp32 [R, n]; arguments as for `hash32`."""
    v = (hash32(seeds, positions, ids).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v.clamp(max=_HIGHEST)))


def keep(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [R, V]: what the filters keep of `scaled`, fp32 [R, V], rows descending; always the first."""
    width = scaled.shape[1]
    kept = torch.arange(width, device=scaled.device) < torch.where(top_k > 0, top_k, width)[:, None]
    p = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
    before = p.cumsum(-1) - p
    kept &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    kept &= scaled >= scaled[:, :1] + min_p[:, None].log()
    kept[:, 0] = True  # also where a top_p is so small that rounding would drop it
    return kept


# ---- parts of kernels


@triton.jit
def _mix(x):
    """A bijection of [0, 2^32) that spreads every bit. uint32 or int64; its factors are below 2^31."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


@triton.jit
def noise_key(seed, position):
    key = _mix(seed & 0xFFFFFFFF)
    key = _mix(key ^ ((seed >> 32) & 0xFFFFFFFF) ^ 0x5BD1E995)
    return _mix(key ^ (position & 0xFFFFFFFF) ^ 0x27D4EB2F)


@triton.jit
def gumbel_noise(key, ids):
    """`gumbel` of a `noise_key`, hashed in 32 bits for speed. A series where 1 - v would round a small v away: small v decide the
    argmax."""
    hashed = _mix(_mix(ids.to(tl.uint32) + key.to(tl.uint32)) ^ _mix(key ^ 0x165667B1).to(tl.uint32))
    v = tl.minimum((hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.015625, series, -tl.log(1.0 - v)))


@triton.jit
def soft_capped(x, cap):
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)


@triton.jit
def over_temperature(x, capped, row, temperature, cap, CAP: constexpr):
    scaled = soft_capped(x, cap) / temperature if CAP else x / temperature
    if capped is not None:
        scaled = tl.where(tl.load(capped + row) != 0, x / temperature, scaled)
    return scaled
