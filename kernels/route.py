"""The router's choice of experts.

    p = softmax(logits) over all experts;  (e_k, w_k) = top_k(p);  w_k = w_k / sum(w) * per_expert_scale[e_k]

In fp32. The scale comes after the renormalisation, so weights need not sum to one.
"""

import torch
from torch import Tensor


def route(logits: Tensor, per_expert_scale: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """logits fp32 [T, experts], per_expert_scale fp32 [experts] -> (weights fp32 [T, top_k], experts int64 [T, top_k])."""
    assert logits.dtype == per_expert_scale.dtype == torch.float32, (logits.dtype, per_expert_scale.dtype)
    assert per_expert_scale.shape == logits.shape[1:], (per_expert_scale.shape, logits.shape)
    assert 0 < top_k <= logits.shape[1], (top_k, logits.shape)
    return _route_reference(logits, per_expert_scale, top_k)


def _route_reference(logits: Tensor, per_expert_scale: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    weights, chosen = logits.softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) * per_expert_scale[chosen], chosen
