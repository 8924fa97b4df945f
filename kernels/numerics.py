"""Casts and products that give the same on a GPU and under the interpreter.

The interpreter truncates fp32 to bf16, mishandles e4m3 (carry, large numbers, NaN), and multiplies
bf16 operands' bit patterns.
"""

import triton
import triton.language as tl

from kernels.launch import INTERPRET

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """fp32 -> DTYPE, to nearest even; e4m3 saturates at 448."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)
    if INTERPRET and tl.float8e4nv == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFFF + ((bits >> 20) & 1)
        rounded = (bits & 0xFFF00000).to(tl.float32, bitcast=True)
        below = (x + 24576.0) - 24576.0  # multiples of 2^-9, below the least normal number
        rounded = tl.minimum(tl.maximum(rounded, -448.0), 448.0)
        code = tl.where(tl.abs(x) < 0.015625, below, rounded).to(DTYPE).to(tl.uint8, bitcast=True)
        return tl.where(x == x, code, 0x7F).to(tl.uint8).to(DTYPE, bitcast=True)  # NaN stays NaN
    return x.to(DTYPE)


@triton.jit
def operand(x):
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)
    return x


@triton.jit
def halves(x):
    """int16 -> its low and its high e4m3 number, in fp16."""
    if INTERPRET:
        low = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        return low, (x >> 8 & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def dot(a, b):
    """a [m, k] times b [k, n], in fp32; fp32 operands are not cut to tf32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_product(x, weight, total, SWAP: tl.constexpr):
    """total [m, n] + x [m, k] weight [n, k]^T; with SWAP total is transposed."""
    if INTERPRET:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if SWAP:
        total = tl.dot(weight, x.T, total, input_precision="ieee")
    else:
        total = tl.dot(x, weight.T, total, input_precision="ieee")
    return total


@triton.jit
def softmax_step(scores, row_max, row_sum):
    """One step of an online softmax in base 2: new row_max, weights, factor of older sums, new
    row_sum."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * LOG2E)
    weights = tl.exp2(scores * LOG2E - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    return new_max, weights, rescale, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def first_use(x):
    """Mark x (16 or 8 bits) as used, so that earlier loads are in flight together."""
    if INTERPRET:
        return x
    PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)


@triton.jit
def prefetch(at):
    if not INTERPRET:
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)
