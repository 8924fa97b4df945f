"""Per-layer embeddings: a norm of the projected hidden state, and the token's own row.

    ple = ( rms_norm(context * a; w) + tokens * b ) / sqrt(2)          rms_norm over each layer's part

Each of the five results is rounded, as in transformers.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.norm import rms_norm
from kernels.numerics import cast

_BLOCK = 2048  # elements of a CTA


def per_layer_inputs(context: Tensor, tokens: Tensor, norm: Tensor, eps: float, a: float, b: float) -> Tensor:
    """context and tokens [T, layers * n] of one dtype, contiguous; norm [n] -> [T, layers, n]."""
    shape = (context.shape[0], context.shape[1] // len(norm), len(norm))
    if not enabled(context):
        return (rms_norm((context * a).view(shape), norm, eps) + (tokens * b).view(shape)) * 2.0**-0.5
    check_contiguous(context, tokens)
    out = context.new_empty(shape)
    width = next_power_of_2(len(norm))
    layers = min(next_power_of_2(shape[1]), max(1, _BLOCK // width))
    launch(
        _per_layer, (shape[0], cdiv(shape[1], layers)), context, tokens, norm, out, eps, a, b,
        LAYERS=shape[1], N=len(norm), HELD=layers, WIDTH=width,
    )  # fmt: skip
    return out


@triton.jit
def _per_layer(
    context, tokens, norm, out, eps, a, b,
    LAYERS: constexpr, N: constexpr, HELD: constexpr, WIDTH: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    DTYPE: constexpr = out.dtype.element_ty
    layer = tl.program_id(1) * HELD + tl.arange(0, HELD)
    lane = tl.arange(0, WIDTH)
    live = (layer < LAYERS)[:, None] & (lane < N)[None, :]
    offset = (tl.program_id(0).to(tl.int64) * LAYERS + layer[:, None]) * N + lane[None, :]
    weight = tl.load(norm + lane, lane < N, 0.0).to(tl.float32)[None, :]
    wait(PDL)
    value = cast(tl.load(context + offset, live, 0.0).to(tl.float32) * a, DTYPE).to(tl.float32)
    own = cast(tl.load(tokens + offset, live, 0.0).to(tl.float32) * b, DTYPE).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 1) / N + eps)[:, None] * weight
    total = cast(cast(normed, DTYPE).to(tl.float32) + own, DTYPE).to(tl.float32)
    tl.store(out + offset, cast(total * 0.7071067811865476, DTYPE), live)
