"""The gate of Gemma's MLP, of its experts and of its per-layer embeddings.

    gelu_mul(g, u) = cast( gelu_tanh(g) * u )      gelu_tanh(x) = x/2 (1 + tanh( sqrt(2/pi) (x + 0.044715 x^3) ))

In fp32, with one cast.
"""

import torch
from torch import Tensor
from torch.nn import functional


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up of one shape and dtype -> the same."""
    assert gate.shape == up.shape, (gate.shape, up.shape)
    assert gate.dtype == up.dtype, (gate.dtype, up.dtype)
    return _gelu_mul_reference(gate, up)


def geglu(gate_up: Tensor) -> Tensor:
    """[..., 2 n], gate first -> [..., n]."""
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    return gelu_mul(*gate_up.chunk(2, dim=-1))


def _gelu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    if gate.dtype == torch.float32:
        return functional.gelu(gate, approximate="tanh") * up
    return (functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)
