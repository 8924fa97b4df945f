"""The gate of Gemma's MLP, experts and per-layer embeddings.

    geglu(g, u) = gelu_tanh(g) * u        in fp32 with one cast
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.numerics import cast
from kernels.packed import PackedRows, scale_warps, store_scaled


def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """gate and up [T, n] -> [T, n]; up's rows may be strided. Without up, gate is [T, 2 n], gate first."""
    if not enabled(gate):
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return (functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)
    check_contiguous(gate)
    assert up is None or up.stride(1) == 1, up.stride()
    rows, width = gate.shape
    n, up_stride, up_first = (width // 2, width, width // 2) if up is None else (width, up.stride(0), 0)
    out = gate.new_empty(rows, n)
    block = min(1024, next_power_of_2(n))
    launch(
        _gelu_mul, (rows, cdiv(n, block)), gate, gate if up is None else up, out,
        N=n, BLOCK=block, GATE=width, UP=up_stride, UP_FIRST=up_first,
    )  # fmt: skip
    return out


def geglu_rows(gate_up: Tensor) -> PackedRows:
    check_contiguous(gate_up)
    rows = len(gate_up)
    n = gate_up.shape[1] // 2
    out = PackedRows.empty(gate_up[:, :n])
    block = next_power_of_2(n)
    launch(_gelu_mul_rows, (rows,), gate_up, out.values, out.scale, N=n, BLOCK=block, warps=scale_warps(block))
    return out


@triton.jit
def gelu(x):
    """gelu_tanh(x) = x/2 (1 + tanh y) = x sigmoid(2 y), y = sqrt(2/pi) (x + 0.044715 x^3); fp32."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gelu_mul_rows(gate_up, values, scale, N: constexpr, BLOCK: constexpr, PDL: constexpr):
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    wait(PDL)
    left = tl.load(gate_up + row * (2 * N) + lane, lane < N, 0.0).to(tl.float32)
    right = tl.load(gate_up + row * (2 * N) + N + lane, lane < N, 0.0).to(tl.float32)
    product = cast(gelu(left) * right, gate_up.dtype.element_ty).to(tl.float32)
    store_scaled(product, values, scale, row, N, BLOCK)


@triton.jit
def _gelu_mul(gate, up, out, N: constexpr, BLOCK: constexpr, GATE: constexpr, UP: constexpr, UP_FIRST: constexpr, PDL: constexpr):
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    left = tl.load(gate + row * GATE + column, column < N, 0.0).to(tl.float32)
    right = tl.load(up + row * UP + UP_FIRST + column, column < N, 0.0).to(tl.float32)
    tl.store(out + row * N + column, cast(gelu(left) * right, out.dtype.element_ty), column < N)
