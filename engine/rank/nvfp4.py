"""Matrices of NVFP4 folders: packed again in fp8, or kept in four bits with products in four bits.

    W = values * scale * factor     e2m1, e4m3 for each 16 columns, fp32 for each row
    x = values * scale * factor     the same, made in each step: a row's factor is its largest magnitude / (6 * 448)

FlashInfer computes on GPUs (docs/blackwell.md has its rules), plain torch on a CPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.errors import ConfigError
from engine.rank.flashinfer_front import check_arguments
from engine.rank.fp8 import pack
from engine.rank.weight import OwnProduct
from kernels.packed import E4M3

QUANTISE_ARGUMENTS = ("a", "a_global_sf", "backend", "per_token_activation", "nvfp4_4over6")
MULTIPLY_ARGUMENTS = ("a", "b", "a_descale", "b_descale", "alpha", "out_dtype", "backend")
_LARGEST = 6.0 * 448.0  # of e2m1 and e4m3
_GROUP = 16  # columns of a scale
_UNIT = 32  # the kernel's rows of W and columns come in multiples of it
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by exponent and mantissa; the fourth bit is the sign


class Fp4Calls(NamedTuple):
    quantise: Callable[..., Any]
    multiply: Callable[..., Any]


def load_calls() -> Fp4Calls:
    """ConfigError: FlashInfer is missing, or lacks an argument."""
    try:
        import flashinfer
        from flashinfer import mm_fp4, nvfp4_quantize
    except ImportError as error:
        raise ConfigError(f"weights: nvfp4 needs FlashInfer (make install-gpu): {error}") from error
    for call, names in ((nvfp4_quantize, QUANTISE_ARGUMENTS), (mm_fp4, MULTIPLY_ARGUMENTS)):
        check_arguments("weights: nvfp4", flashinfer.__version__, call, names)
    return Fp4Calls(nvfp4_quantize, mm_fp4)


class Nvfp4Weight(OwnProduct):
    """values uint8 [m, n / 2], scale e4m3 [m, n / 16], factor fp32 [m, 1]; `arrange` pads and reorders."""

    values: Tensor
    scale: Tensor
    factor: Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self.calls: Fp4Calls | None = None
        self.alpha: Tensor | None = None
        self.ratios: Tensor | None = None  # fp32 [m], of the factors to alpha, unless all are 1

    def loaded(self) -> None:
        if self.device.type == "cuda":
            self.arrange(load_calls())

    def arrange(self, calls: Fp4Calls) -> None:
        rows, columns = self.shape
        values = pad(self.values, (0, -columns % _UNIT // 2, 0, -rows % _UNIT))
        self.values = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(in_tiles(self.scale), requires_grad=False)
        self.alpha = self.factor.amax().clamp_min(1e-30).reshape(1)  # a matrix of zeros may have the factor 0
        ratios = self.factor[:, 0] / self.alpha
        if not bool((ratios == 1).all()):
            self.ratios = ratios
        self.calls = calls

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """fp32 [rows, n], without the factor."""
        scale = self.scale
        if self.calls is not None:
            scale = out_of_tiles(scale)[: self.shape[0], : self.shape[1] // _GROUP]
        values = e2m1(self.values[: self.shape[0]][rows, : self.shape[1] // 2])
        return values * scale[rows].float().repeat_interleave(_GROUP, 1)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return (self.numbers() * self.factor).to(self.dtype)

    def rows_product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if self.calls is None:
            return self.reference(x).to(dtype)
        if x.shape[1] % _UNIT:
            x = pad(x, (0, -x.shape[1] % _UNIT))
        values, scale, factor = self.calls.quantise(
            x.contiguous(), 1 / _LARGEST, backend="cuda", per_token_activation=True, nvfp4_4over6=None
        )
        found = self.calls.multiply(
            values, self.values.t(), scale, self.scale.t(), self.alpha, out_dtype=x.dtype, backend="cutlass"
        )
        by = factor[:, None]
        if self.ratios is not None:
            by = by * self.ratios
        return found[:, : self.shape[0]].contiguous().to(dtype).mul_(by)

    def reference(self, x: Tensor, rows: slice = slice(None)) -> Tensor:
        """fp32 [T, rows] in plain torch."""
        values, factor = rounded(x)
        sums = values.double() @ self.numbers(rows).double().t()  # exact up to about a thousand columns, whatever rows x has
        return sums.float() * (factor * self.factor[rows].t())


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, n] -> fp32 [T, n] and factors [T, 1]."""
    groups = x.float().unflatten(1, (-1, _GROUP))
    factor = x.float().abs().amax(1, keepdim=True) / _LARGEST
    inverse = torch.where(factor > 0, 1 / factor, 0.0)
    scale = (groups.abs().amax(2) / 6 * inverse).clamp_max(448).to(E4M3).float()[..., None]
    ratio = torch.where(scale > 0, groups * inverse[..., None] / scale, 0.0).clamp(-6, 6)
    step = 0.5 * (1 + (ratio.abs() >= 2) + 2 * (ratio.abs() >= 4))
    return ((ratio / step).round() * step * scale).flatten(1), factor


def e2m1(values: Tensor) -> Tensor:
    """uint8 [..., n / 2] -> fp32 [..., n]."""
    numbers = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)], device=values.device)
    pairs = torch.stack((values & 15, values >> 4), -1).flatten(-2)
    return numbers[pairs.int()]


def in_tiles(scale: Tensor) -> Tensor:
    """e4m3 [m, groups] -> padded tiles."""
    rows, columns = scale.shape
    padded = pad(scale.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4)).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded.shape).view(E4M3)


def out_of_tiles(scale: Tensor) -> Tensor:
    rows, columns = scale.shape
    tiles = scale.view(torch.uint8).view(rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns).view(E4M3)


def from_factor(values: Tensor, scale: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [m, n / 2], scales e4m3 [m, n / 16] and the matrix's [1, 1]; exact."""
    return values, scale, factor.float().expand(len(values), 1)


def from_divisor(values: Tensor, scale: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return from_factor(values, scale, 1 / divisor.float())


def fp8_from_factor(values: Tensor, scale: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return pack(e2m1(values) * (scale.float() * factor.float()).repeat_interleave(_GROUP, 1))


def fp8_from_divisor(values: Tensor, scale: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    return fp8_from_factor(values, scale, 1 / divisor.float())
