"""What sampling kernels share: the bounds of `kernels.sampling_batch`; the soft cap, and Gumbel noise of (seed, position, id), as
`kernels.sample` has them."""

import triton
import triton.language as tl
from triton.language import constexpr

from kernels.sampling_batch import GREEDY_BELOW, SMALL_TOP_K

GREEDY, SMALL = constexpr(GREEDY_BELOW), constexpr(SMALL_TOP_K)


@triton.jit
def _mix(x):
    """As `kernels.sample` mixes: uint32, or int64 holding 32 bits."""
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
    """Standard Gumbel noise of each id, hashed in 32 bits: int64 takes longer. -log1p(-v) by its series where 1 - v would round the
    small v away: they decide the argmax."""
    hashed = _mix(_mix(ids.to(tl.uint32) + key.to(tl.uint32)) ^ _mix(key ^ 0x165667B1).to(tl.uint32))
    v = tl.minimum((hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.015625, series, -tl.log(1.0 - v)))


@triton.jit
def soft_capped(x, cap):
    """cap * tanh(x / cap)."""
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)
