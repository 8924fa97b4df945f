"""The experts' MLPs, each applied to the tokens that chose it.

    y_t = sum_k w_tk * down_e( gelu_tanh(g) * u ),   [g; u] = gate_up_e x_t,   e = e_tk      gate is the first half of gate_up

Products in x's dtype, the weighted sum over experts in fp32, one cast. Where experts are cut along their width, y is a rank's part.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import geglu


def experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, n]; weights fp32 and chosen int64 [T, top_k]; gate_up [experts, 2 m, n]; down [experts, n, m] -> [T, n]."""
    assert weights.shape == chosen.shape, (weights.shape, chosen.shape)
    assert weights.shape[0] == x.shape[0], (weights.shape, x.shape)
    assert gate_up.shape[0] == down.shape[0], (gate_up.shape, down.shape)
    assert gate_up.shape[1:] == (2 * down.shape[2], x.shape[1]), (gate_up.shape, down.shape, x.shape)
    assert down.shape[1] == x.shape[1], (down.shape, x.shape)
    return _experts_reference(x, weights, chosen, gate_up, down)


def _experts_reference(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        tokens, places = torch.where(chosen == expert)
        part = functional.linear(geglu(functional.linear(x[tokens], gate_up[expert])), down[expert])
        total.index_add_(0, tokens, part.float() * weights[tokens, places, None])
    return total.to(x.dtype)
