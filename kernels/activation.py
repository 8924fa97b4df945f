"""The gate of Gemma's MLP, of its experts and of its per-layer embeddings.

    gelu_mul(g, u) = cast( gelu_tanh(g) * u )      gelu_tanh(x) = x/2 (1 + tanh( sqrt(2/pi) (x + 0.044715 x^3) ))

In fp32, with one cast.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.grid import cdiv, next_power_of_2
from kernels.launch import launch, trigger, usable, wait


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up of one shape and dtype -> the same."""
    assert gate.shape == up.shape, (gate.shape, up.shape)
    assert gate.dtype == up.dtype, (gate.dtype, up.dtype)
    return _gelu_mul_reference(gate, up)


def geglu(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """[..., 2 n], gate first -> [..., n], into `out` where it is given."""
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    if usable(gate_up, __name__):
        return _launch(gate_up, gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2) if out is None else out)
    gated = gelu_mul(*gate_up.chunk(2, dim=-1))
    return gated if out is None else out.copy_(gated)


def _launch(gate_up: Tensor, out: Tensor) -> Tensor:
    assert gate_up.is_contiguous(), gate_up.stride()
    assert out.is_contiguous(), out.stride()
    n = out.shape[-1]
    block = min(1024, next_power_of_2(n))
    launch(_geglu, (out.numel() // n, cdiv(n, block)), gate_up, out, N=n, BLOCK=block, warps=4)
    return out


@triton.jit
def gelu(x: tl.tensor) -> tl.tensor:
    """gelu_tanh of fp32: tanh(y) = 2 sigmoid(2 y) - 1, so x/2 (1 + tanh y) = x sigmoid(2 y)."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _geglu(gate_up: tl.tensor, out: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    gate = tl.load(gate_up + row * 2 * N + column, column < N, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + column, column < N, 0.0).to(tl.float32)
    tl.store(out + row * N + column, (gelu(gate) * up).to(out.dtype.element_ty), column < N)


def _gelu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    if gate.dtype == torch.float32:
        return functional.gelu(gate, approximate="tanh") * up
    return (functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)
