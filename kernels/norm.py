"""RMSNorm and the fused norm of Gemma's sandwich.

    rms_norm(x; w)       = cast( x * (mean(x^2) + eps)^(-1/2) * w )            in fp32; w as stored, not 1 + w
    norm_add(r, x; w, s) = ( r + rms_norm(x; w) ) * s                          in x's dtype, as in transformers
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., n], weight [n] or None -> [..., n] in `dtype`, by default x's."""
    wide = x.float()
    normed = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    if weight is not None:
        normed = normed * weight.float()
    return normed.to(dtype or x.dtype)


def norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float, scalar: Tensor | None = None) -> Tensor:
    """residual and x [T, n], weight [n], scalar [1] or None -> [T, n]."""
    total = residual + rms_norm(x, weight, eps)
    return total if scalar is None else total * scalar
