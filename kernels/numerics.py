"""Casts and products for Triton kernels that give the same on a GPU and under the interpreter.

The interpreter cuts fp32 off where bf16 rounds to nearest, and multiplies bf16 operands' bit patterns; see `kernels.launch`.
"""

import triton
import triton.language as tl

from kernels.launch import INTERPRET

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def cast(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 -> DTYPE, to the nearest, ties to even."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(DTYPE)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a [m, k] times b [k, n] of one dtype, summed in fp32; fp32 operands are not cut to tf32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="ieee")
