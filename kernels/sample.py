"""From logits to tokens: a pure function of a row's logits, its seed, the position of its token, and token ids.

    cap      l  <- c tanh(l / c)                                 the model's own soft cap
    mask     l_i <- -inf                                         for forbidden ids
    scale    s = l / temperature
    top_k    keep the k largest s_i                              equal values: lower id first; 0: all
    top_p    p = softmax over what is kept; in descending order (equal values: lower id first) keep the shortest
             prefix whose mass is at least top_p, one token at least                            1: all
    min_p    keep s_i >= max s + ln(min_p)                       that is p_i >= min_p max p;    0: all
    choose   argmax over what is kept of s_i + g_i               g_i = -ln(-ln(1 - v)) is standard Gumbel noise, so the
                                                                 choice follows softmax(s) over what is kept

v = (h + 1/2) / 2^32 with h a hash of (seed, position, token id): there is no state and no order of rows. The hash is int64
arithmetic without overflow, so every device computes the same bits.
"""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_HIGHEST = 1.0 - 2.0**-24  # largest fp32 below one: keeps the noise finite


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """fp32 [R, V] -> the same, soft-capped; None: no cap."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def mask(logits: Tensor, ids: Tensor, first: int) -> Tensor:
    """logits [R, n] are those of ids first .. first + n - 1; ids int64 [R, m], negative: none -> -inf where forbidden."""
    local = ids - first
    hit = (ids >= 0) & (local >= 0) & (local < logits.shape[1])
    ceiling = torch.where(hit, -torch.inf, torch.inf).to(logits.dtype)
    return logits.scatter_reduce(1, local.clamp(0, logits.shape[1] - 1), ceiling, "amin")


def hash32(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """seeds and positions int64 [R], ids int64 [R, n] or [n] -> int64 [R, n], each in [0, 2^32)."""
    key = _mix(seeds & _LOW)
    key = _mix(key ^ ((seeds >> 32) & _LOW) ^ 0x5BD1E995)
    key = _mix(key ^ (positions & _LOW) ^ 0x27D4EB2F)
    return _mix(_mix((ids + key[:, None]) & _LOW) ^ _mix(key ^ 0x165667B1)[:, None])


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32 [R, n], of each (seed, position, id); arguments as for `hash32`."""
    v = (hash32(seeds, positions, ids).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v.clamp(max=_HIGHEST)))


def choose_kept(
    scaled: Tensor, ids: Tensor, seeds: Tensor, positions: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Token ids int64 [R], from what top_k (int64 [R]), top_p and min_p (fp32 [R]) keep of scaled logits fp32 [R, n] of ids int64
    [R, n], ascending where logits are equal; seeds and positions int64 [R]."""
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    kept = scaled.masked_fill(~keep(scaled, top_k, top_p, min_p), -torch.inf)
    best = (kept + gumbel(seeds, positions, ids)).argmax(-1, keepdim=True)
    return ids.gather(1, best).squeeze(1)


def keep(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [R, V]: what the filters keep of `scaled`, fp32 [R, V], each row in descending order. The first is always kept."""
    width = scaled.shape[1]
    kept = torch.arange(width, device=scaled.device) < torch.where(top_k > 0, top_k, width)[:, None]
    p = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
    before = p.cumsum(-1) - p
    kept &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    kept &= scaled >= scaled[:, :1] + min_p[:, None].log()
    kept[:, 0] = True  # also where a top_p is so small that rounding would drop it
    return kept


def _mix(x: Tensor) -> Tensor:
    """A bijection of [0, 2^32) that spreads every bit; its factors lie below 2^31, so no product leaves int64."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW
    return x ^ (x >> 15)
