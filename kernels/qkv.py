"""From the QKV product to attention: head norms, rotary embedding, and the write of K and V into pages.

    norm_rope(x; w)      x' = rms_norm(x; w) over each head, then for the rotated pairs (i, i + d/2), i < pairs:
                         (x'_i, x'_j) -> (x'_i cos - x'_j sin, x'_j cos + x'_i sin)

fp32 with one cast at the end; transformers also rounds the norm, cos and sin.
"""


import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import check_contiguous, enabled, launch, trigger, wait
from kernels.norm import rms_norm
from kernels.numerics import cast


def inverse_frequencies(theta: float, pairs: int, head_dim: int, factor: float = 1.0) -> Tensor:
    """fp32 [pairs] on the CPU: theta ** (-2 i / head_dim) / factor, in transformers' order."""
    exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents) / factor


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """x [T, heads, d], weight [d], cos and sin fp32 [T, pairs], pairs <= d/2 -> [T, heads, d]."""
    half = x.shape[-1] // 2
    pairs = cos.shape[1]
    rotated = rms_norm(x, weight, eps, torch.float32)
    cos = cos[:, None]
    sin = sin[:, None]
    first = rotated[..., :pairs].clone()
    second = rotated[..., half : half + pairs].clone()
    rotated[..., :pairs], rotated[..., half : half + pairs] = first * cos - second * sin, second * cos + first * sin
    return rotated.to(dtype or x.dtype)


def query_dtype(qkv: Tensor, pool: Tensor) -> torch.dtype:
    """fp16 where kernels read e4m3 pages, since products take keys as fp16; else qkv's."""
    return torch.float16 if enabled(qkv) and pool.element_size() == 1 else qkv.dtype


def replace_unturned(x: Tensor, other: Tensor, pairs: int) -> Tensor:
    d = x.shape[-1]
    return torch.where(torch.arange(d, device=x.device) % (d // 2) < pairs, x, other)


def by_head(scale: Tensor, heads: int) -> Tensor:
    return scale.repeat_interleave(heads // len(scale))[:, None]


def store_kv(pool: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """k and v [T, kv_heads, d] to `offsets` int [T] of `pages` int [T], in int64: a pool exceeds
    2^31 elements."""
    pages = pages.long()
    offsets = offsets.long()
    pool[pages, 0, :, offsets] = k
    pool[pages, 1, :, offsets] = v


def qkv_post(
    qkv: Tensor,
    pool: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor,
    k_norm: Tensor | None,
    eps: float,
    q: Tensor,
    *,
    fold: bool = False,
    scales: Tensor | None = None,
) -> None:
    """Raw product of T tokens -> normed and roped q [T, heads, d]; K and V go into their pages.

    qkv, cos_sin, norms, pool and scales as in `decode_attention`, K's scale goes into q; table int32 [slots, width]; slots and
    positions int [T], -1: padding, whose q is zero and which writes no pages. fold: multiply q's unrotated dims by k_norm, for
    attention that reads V in K's place.
    """
    heads, (kv_heads, page, d) = q.shape[1], pool.shape[2:]
    kv_projections = (qkv.shape[1] // d - heads) // kv_heads
    assert k_norm is not None or not fold, "q of a layer that stores no K has none of its weight"
    if not enabled(qkv):
        raw, *kv = qkv.unflatten(1, (-1, d)).split((heads, *(kv_heads,) * kv_projections), 1)
        cos, sin = cos_sin.chunk(2, 1)
        if fold and k_norm is not None:
            q_norm = replace_unturned(q_norm, q_norm * k_norm, cos.shape[1])
        if scales is not None:
            q_norm = q_norm.float() * by_head(scales[0], heads)
        q.copy_(norm_rope(raw, q_norm, cos, sin, eps))
        q.masked_fill_((positions < 0)[:, None, None], 0)
        if not kv:
            return
        assert k_norm is not None, "a layer that writes K needs its norm"
        v_norm = None
        if scales is not None:
            k_norm = k_norm.float() / scales[0, :, None]
            v_norm = 1 / scales[1, :, None]
        k = norm_rope(kv[0], k_norm, cos, sin, eps, pool.dtype)
        v = rms_norm(kv[-1], v_norm, eps, torch.float32).to(pool.dtype)
        live = positions >= 0
        if not live.all():
            slots = slots[live]
            positions = positions[live]
            k = k[live]
            v = v[live]
        store_kv(pool, table[slots, positions // page], positions % page, k, v)
        return
    assert scales is None or not fold, "with scales K is not V times a weight"
    inputs = (qkv, pool, table, slots, positions, cos_sin, q_norm, q_norm if k_norm is None else k_norm, q)
    check_contiguous(*inputs)
    launch(
        _post, (qkv.shape[0], kv_heads), *inputs, scales, table.shape[1], eps,
        HEADS=heads, KV_HEADS=kv_heads, D=d, PAIRS=cos_sin.shape[1] // 2, KV_PROJECTIONS=kv_projections, PAGE=page, FOLD=fold,
        warps=4 if heads // kv_heads * d >= 1024 else 2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "slots", "positions"])  # rows may begin anywhere
def _post(
    qkv, pool, table, slots, positions, cos_sin, q_norm, k_norm, q, scales, width, eps,
    HEADS: constexpr, KV_HEADS: constexpr, D: constexpr, PAIRS: constexpr, KV_PROJECTIONS: constexpr, PAGE: constexpr,
    FOLD: constexpr, PDL: constexpr,
):  # fmt: skip
    """It triggers after its wait, so the next kernel may read earlier writes at once (`kernels.verify`)."""
    GROUP: constexpr = HEADS // KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: constexpr = D // 2
    rows = tl.arange(0, triton.next_power_of_2(GROUP))[:, None]
    half = rows * 0 + tl.arange(0, HALF)[None, :]
    live = rows < GROUP
    weight = load_halves(q_norm + half, live, 1.0, HALF)
    if FOLD:
        low, high = load_halves(k_norm + half, live & (half >= PAIRS), 1.0, HALF)
        weight = weight[0] * low, weight[1] * high
    k_scale, v_scale = scales_of(scales, head, KV_HEADS)
    cos_sin += token * 2 * PAIRS
    wait(PDL)
    trigger(PDL)
    position = tl.load(positions + token)
    used = position >= 0
    raw = qkv + token * (HEADS + KV_PROJECTIONS * KV_HEADS) * D
    x = load_halves(raw + (head * GROUP + rows) * D + half, live, 0.0, HALF)
    cos, sin = rope_angles(cos_sin, half, live, PAIRS)
    if KV_PROJECTIONS > 0:  # first, so that q's loads are in flight together with its own
        slot = tl.load(slots + token).to(tl.int64)
        page = tl.load(table + slot * width + position // PAGE, used, 0).to(tl.int64)
        line = pool + page * (2 * KV_HEADS * PAGE * D) + head * PAGE * D + position % PAGE * D
        append_kv(
            raw + (HEADS + head) * D, (KV_PROJECTIONS - 1) * KV_HEADS * D, cos_sin, k_norm, line, used,
            KV_HEADS * PAGE * D, eps, k_scale, v_scale, D, PAIRS,
        )  # fmt: skip
    low, high = norm_and_rope(*x, *weight, cos, sin, norm_scale(*x, eps, D) * k_scale)
    offset = q + (token * HEADS + head * GROUP + rows) * D + half
    tl.store(offset, cast(tl.where(used, low, 0.0), q.dtype.element_ty), live)
    tl.store(offset + HALF, cast(tl.where(used, high, 0.0), q.dtype.element_ty), live)


@triton.jit
def append_kv(raw, v_offset, cos_sin, k_norm, line, used, KEPT: constexpr, eps, k_scale, v_scale, D: constexpr, PAIRS: constexpr):
    """If `used`, write K and V of one head to `line` of a page, V KEPT after K."""
    HALF: constexpr = D // 2
    own = tl.arange(0, HALF)[None, :]
    used &= own < HALF
    cos, sin = rope_angles(cos_sin, own, used, PAIRS)
    k = load_halves(raw + own, used, 0.0, HALF)
    k_weight = load_halves(k_norm + own, used, 1.0, HALF)
    v = load_halves(raw + v_offset + own, used, 0.0, HALF)
    low, high = norm_and_rope(*k, *k_weight, cos, sin, norm_scale(*k, eps, D) / k_scale)
    tl.store(line + own, cast(low, line.dtype.element_ty), used)
    tl.store(line + HALF + own, cast(high, line.dtype.element_ty), used)
    scale = norm_scale(*v, eps, D) / v_scale
    tl.store(line + KEPT + own, cast(v[0] * scale, line.dtype.element_ty), used)
    tl.store(line + KEPT + HALF + own, cast(v[1] * scale, line.dtype.element_ty), used)


@triton.jit
def scales_of(scales, head, KV_HEADS: constexpr):
    if scales is None:
        k = 1.0
        v = 1.0
    else:
        k = tl.load(scales + head)
        v = tl.load(scales + KV_HEADS + head)
    return k, v


@triton.jit
def load_halves(offset, live, other: constexpr, HALF: constexpr):
    """Dims i and i + d/2, fp32 [rows, HALF] each; `other` where not live."""
    return tl.load(offset, live, other=other).to(tl.float32), tl.load(offset + HALF, live, other=other).to(tl.float32)


@triton.jit
def rope_angles(cos_sin, half, live, PAIRS: constexpr):
    """cos and sin of pairs [rows, HALF]; 1 and 0 where not rotated or not live."""
    rotated = live & (half < PAIRS)
    return tl.load(cos_sin + half, rotated, other=1.0), tl.load(cos_sin + PAIRS + half, rotated, other=0.0)


@triton.jit
def norm_and_rope(low, high, weight_low, weight_high, cos, sin, scale):
    low = low * scale * weight_low
    high = high * scale * weight_high
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def norm_scale(low, high, eps, D: constexpr):
    return tl.rsqrt(tl.sum(low * low + high * high, 1) / D + eps)[:, None]
