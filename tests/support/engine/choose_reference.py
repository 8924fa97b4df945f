"""The choice of a token from all logits of a row: the reference of every sampler."""

import torch
from torch import Tensor

from kernels.sample import gumbel, keep


def choose(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """fp32 [R, V], temperature > 0 fp32 [R], seeds and positions int64 [R] -> token ids int64 [R], nothing cut away."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (logits / temperature[:, None] + gumbel(seeds, positions, ids)).argmax(-1)


def choose_filtered(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """As `choose`, from what top_k (int64 [R]), top_p and min_p (fp32 [R]) keep."""
    scaled, ids = (logits / temperature[:, None]).sort(descending=True, stable=True)  # the lower id first of equal ones
    noisy = scaled.masked_fill(~keep(scaled, top_k, top_p, min_p), -torch.inf) + gumbel(seeds, positions, ids)
    return ids.gather(1, noisy.argmax(-1, keepdim=True)).squeeze(1)
