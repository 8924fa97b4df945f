"""Head norm and rotary embedding of vision towers, in fp32 with one cast.

    head_norm(x)             rms_norm(x) over each head, without weight
    norm_axial_rope(x; w)    x' = rms_norm(x; w) over each head, then `kernels.qkv.norm_rope`'s rotation of each half, the first by
                             x positions, the second by y: pairs (i, i + d/4), i < d/4
"""


import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.norm import rms_norm
from kernels.numerics import cast

_ROWS = 16  # heads of a program


def axial_tables(x: Tensor, y: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """x and y int [T], frequencies fp32 [d/4] -> cos and sin, fp32 [T, d/2]."""
    angles = torch.cat([axis[:, None] * frequencies for axis in (x, y)], 1)
    return angles.cos(), angles.sin()


def norm_axial_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [T, heads, d], weight [d], cos and sin fp32 [T, d/2] -> [T, heads, d]."""
    if len(x) and enabled(x):
        return _launch(x, weight, cos, sin, eps)
    first, second = rms_norm(x, weight, eps, torch.float32).unflatten(2, (2, 2, -1)).unbind(3)
    cos, sin = (table.unflatten(1, (1, 2, -1)) for table in (cos, sin))
    return torch.stack([first * cos - second * sin, second * cos + first * sin], 3).flatten(2).to(x.dtype)


def head_norm(x: Tensor, eps: float) -> Tensor:
    return _launch(x, x, x, x, eps) if len(x) and enabled(x) else rms_norm(x, None, eps)


def _launch(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    check_contiguous(x)
    (rows, heads, d), out = x.shape, torch.empty_like(x)
    launch(
        _norm_axial_rope, (cdiv(rows * heads, _ROWS),), x, weight, cos, sin, out, rows * heads,
        HEADS=heads, D=d, BLOCK=next_power_of_2(d), ROWS=_ROWS, EPS=eps, ROTATED=weight is not x,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _norm_axial_rope(
    x, weight, cos, sin, out, count,
    HEADS: constexpr, D: constexpr, BLOCK: constexpr, ROWS: constexpr, EPS: constexpr, ROTATED: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    QUARTER: constexpr = D // 4
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK)
    live = (row < count)[:, None] & (dim < D)[None, :]
    offset = row.to(tl.int64)[:, None] * D
    wait(PDL)
    own = tl.load(x + offset + dim[None, :], live, 0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(own * own, 1) / D + EPS)[:, None]
    own = own * scale
    if ROTATED:
        left = dim // QUARTER % 2 == 0
        other = tl.where(left, dim + QUARTER, dim - QUARTER)  # the other one of its pair
        angle = dim // (2 * QUARTER) * QUARTER + dim % QUARTER
        table = (row // HEADS).to(tl.int64)[:, None] * (D // 2) + angle[None, :]
        partner = tl.load(x + offset + other[None, :], live, 0.0).to(tl.float32) * scale
        partner *= tl.load(weight + other, dim < D, 0.0).to(tl.float32)[None, :]
        own *= tl.load(weight + dim, dim < D, 0.0).to(tl.float32)[None, :]
        own = own * tl.load(cos + table, live, 0.0) + tl.where(left[None, :], -partner, partner) * tl.load(sin + table, live, 0.0)
    tl.store(out + offset + dim[None, :], cast(own, out.dtype.element_ty), live)
