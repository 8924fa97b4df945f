"""Packed weight matrices, and activations packed for their products.

    fp8     W = values * scale      a scale for each output channel
            x = values * scale      a scale for each row: its largest magnitude / 448
    int4    W = (q - z) * scale     `kernels.four_bits`; x is not packed

fp8 products sum in fp32 and multiply by both scales.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.four_bits import unpacked_groups
from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.numerics import cast

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
_LEAST_SCALE = 1e-12  # of a row of zeros
_CTAS = 128  # at most, that take parts of few rows
_LEAST_PART = 1024
Load = Literal["plain", "fp8", "int4"]


class PackedMatrix(NamedTuple):
    """W [m, n], or [experts, m, n], as kernels load it.

    plain   values [..., m, n]
    fp8     values e4m3 [..., m, n], scale fp32 [..., m]
    int4    values int32 [..., m, n / 8], scale [..., m, groups] of x's dtype, zero int32 [..., m / 8, groups] or None
    """

    values: Tensor
    scale: Tensor | None = None
    load: Load = "plain"
    zero: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[-2]

    @property
    def columns(self) -> int:
        return self.values.shape[-1] * (8 if self.load == "int4" else 1)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that x must have, or None."""
        kept = {"plain": self.values, "int4": self.scale}.get(self.load)
        return kept.dtype if kept is not None else None

    @property
    def group(self) -> int:
        if self.load != "int4":
            return 0
        assert self.scale is not None
        return self.columns // self.scale.shape[-1]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.values, self.scale, self.zero) if tensor is not None]

    def of_expert(self, expert: int) -> "PackedMatrix":
        scale = None if self.scale is None else self.scale[expert]
        zero = None if self.zero is None else self.zero[expert]
        return PackedMatrix(self.values[expert], scale, self.load, zero)


Matrix = Tensor | PackedMatrix


@dataclass(frozen=True)
class PackedRows:
    """x [T, n] as values e4m3 [T, n] and scale fp32 [T]; dtype: the original."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, x: Tensor) -> "PackedRows":
        return cls(x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), dtype=torch.float32), x.dtype)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    @property
    def is_meta(self) -> bool:
        return self.values.is_meta

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.values.new_empty(shape, dtype=dtype or self.dtype)


Activations = Tensor | PackedRows


def packed_matrix(matrix: Matrix) -> PackedMatrix:
    return PackedMatrix(matrix) if isinstance(matrix, Tensor) else matrix


def fp8_matrix(matrix: Tensor) -> PackedMatrix:
    scale = (matrix.abs().amax(-1).float() / LARGEST).clamp_min(_LEAST_SCALE)
    return PackedMatrix((matrix.float() / scale[..., None]).to(E4M3), scale, "fp8")


def unpacked(matrix: PackedMatrix) -> Tensor:
    """Values: fp32, or for int4 its scale's dtype."""
    if matrix.load == "int4":
        assert matrix.scale is not None
        return unpacked_groups(matrix.values, matrix.scale, matrix.zero)
    values = matrix.values.float()
    return values if matrix.scale is None else values * matrix.scale[..., None]


def pack_rows(x: Activations) -> PackedRows:
    """x [T, n] -> e4m3 rows. A row with NaN or infinity gives NaN."""
    if isinstance(x, PackedRows):
        return x
    check_contiguous(x)
    if not enabled(x):
        scale = (x.float().abs().amax(1) / LARGEST).clamp_min(_LEAST_SCALE)
        return PackedRows((x.float() / scale[:, None]).to(E4M3), scale, x.dtype)
    out = PackedRows.empty(x)
    rows, n = x.shape
    block = next_power_of_2(n)
    parts = max(1, _CTAS // max(16, next_power_of_2(rows)))  # the classes of rows of `kernels.tiles`: no more variants
    part = min(block, max(_LEAST_PART, block // parts))
    launch(_scale_rows, (rows, cdiv(n, part)), x, out.values, out.scale, N=n, BLOCK=block, PART=part, warps=scale_warps(block))
    return out


def operands(x: Activations, weight: PackedMatrix) -> tuple[Tensor, Tensor | None]:
    if weight.load != "fp8":
        assert isinstance(x, Tensor), "only products of fp8 weights read packed rows"
        return x, None
    rows = pack_rows(x)
    return rows.values, rows.scale


def scale_warps(block: int) -> int:
    """More warps would wait while the previous product runs."""
    return 4 if block <= 8192 else 8


def scaled_product(x: PackedRows, weight: PackedMatrix, out: Tensor) -> Tensor:
    """x [T, n] times an fp8 weight [m, n] -> `out` [T, m]; the library needs multiples of 16 on a GPU."""
    assert weight.scale is not None
    multiples = x.shape[1] % 16 == 0 and weight.rows % 16 == 0
    if out.is_cuda and enabled(out) and out.dtype == torch.bfloat16 and multiples and len(out):
        scales = x.scale[:, None], weight.scale[None]
        return torch._scaled_mm(x.values, weight.values.t(), *scales, out_dtype=out.dtype, use_fast_accum=True, out=out)
    sums = x.values.double() @ weight.values.double().t()  # exact, so equal whatever rows x has
    return out.copy_(sums.float() * (x.scale[:, None] * weight.scale))


@triton.jit
def scaled_tile(total, x_scale, scale, SWAP: constexpr):
    """total [rows, outputs], with SWAP transposed, by both scales."""
    if SWAP:
        factor = x_scale[None, :] * scale[:, None]
    else:
        factor = x_scale[:, None] * scale[None, :]
    return total * factor


@triton.jit
def row_scale(x):
    return tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)


@triton.jit
def store_scaled(x, values, scale, row, N: constexpr, BLOCK: constexpr):
    """Write row x [BLOCK], fp32 with zeros from N on, to row `row` of values and scale."""
    lane = tl.arange(0, BLOCK)
    factor = row_scale(x)
    tl.store(values + row * N + lane, cast(x / factor, values.dtype.element_ty), lane < N)
    tl.store(scale + row, factor)


@triton.jit
def _scale_rows(x, values, scale, N: constexpr, BLOCK: constexpr, PART: constexpr, PDL: constexpr):
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    wait(PDL)
    whole = tl.load(x + row * N + lane, lane < N, 0.0).to(tl.float32)
    if PART == BLOCK:
        store_scaled(whole, values, scale, row, N, BLOCK)
    else:
        factor = row_scale(whole)
        lane = tl.program_id(1) * PART + tl.arange(0, PART)
        part = tl.load(x + row * N + lane, lane < N, 0.0).to(tl.float32)
        tl.store(values + row * N + lane, cast(part / factor, values.dtype.element_ty), lane < N)
        tl.store(scale + row, factor)
