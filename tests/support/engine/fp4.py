"""NVFP4 by its definition, in fp64 and without the engine: how rows of activations are rounded, and models that multiply so."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from engine.rank.weight import OwnProduct, Weight
from tests.support.engine.quantised import e2m1

LARGEST = 6 * 448
E2M1 = torch.tensor([e2m1(bits) for bits in range(8)], dtype=torch.float64)
# By the definition: four bits of an exponent whose bias is 7, three of mantissa; the highest of them is no number.
E4M3 = torch.tensor(
    [(1 + bits % 8 / 8) * 2.0 ** (bits // 8 - 7) if bits >> 3 else bits / 8 * 2.0**-6 for bits in range(127)], dtype=torch.float64
)


def nearest(sizes: Tensor, table: Tensor) -> Tensor:
    """Codes of the nearest numbers of an ascending table; of two that are as near, the even one."""
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(table.tolist())], dtype=torch.float64)
    below = torch.searchsorted(middles, sizes.contiguous())
    above = torch.searchsorted(middles, sizes.contiguous(), right=True)
    return torch.where(below % 2 == 0, below, above)


def codes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, n] -> codes of numbers [T, n], codes of scales [T, n / 16] and factors fp64 [T]."""
    whole = x.double()
    factor = whole.abs().amax(1) / LARGEST
    groups = (whole / factor.clamp_min(1e-300)[:, None]).unflatten(1, (-1, 16))
    scale = nearest(groups.abs().amax(2) / 6, E4M3)
    sizes = groups.abs() / E4M3[scale].clamp_min(1e-300)[..., None]
    return (nearest(sizes, E2M1) + 8 * (groups < 0)).flatten(1), scale, factor


def numbers(code: Tensor, scale: Tensor) -> Tensor:
    """Codes of numbers [T, n] and of scales [T, n / 16] -> fp64 [T, n]."""
    return E2M1[code & 7] * (1 - 2 * (code >> 3)) * E4M3[scale].repeat_interleave(16, 1)


class RoundedRows(OwnProduct):
    """Products of plain weights with rows that are rounded to NVFP4, in fp64."""

    def rows_product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        code, scale, factor = codes(x)
        return (numbers(code, scale) @ self.weight.double().t() * factor[:, None]).to(dtype)


def round_rows(model: nn.Module) -> None:
    """Gives the matrices of attention and of MLPs in a plain model products of `RoundedRows`."""
    for name, module in model.named_modules():
        if type(module) is Weight and name.rpartition(".")[2] in ("qkv", "o", "gate_up", "down") and ".experts." not in name:
            module.__class__ = RoundedRows
