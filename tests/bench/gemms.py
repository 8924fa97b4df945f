"""The few-row products of one rank as bench cases: the committed tiles, cuBLAS, and the candidates of a sweep.

Predicted time: 1.05 times the floor and 1.4 us (fitted to one-row products on an H200), or what L2 needs to hand every CTA its
weights and all of x, whichever is longer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import geglu
from kernels.linear import _run
from kernels.tiles import LARGE_SHARED, GemmShape, Tile, choose, fit
from tests.bench.timing import COLD_BYTES, L2_RATE, READ_RATE, Case, Made
from tests.support.engine.products import Product

CHECKED = 4096  # outputs that are compared with fp32; all of them would take longer than the timing


def gemv(bn: int, bk: int, early: int, warps: int = 4) -> Tile:
    return Tile("gemv", 1, bn, bk, early, warps)


def gemm(rows: int, bn: int, bk: int, stages: int, warps: int = 4, swap: bool = False) -> Tile:
    return Tile("gemm", rows, bn, bk, warps=warps, stages=stages, swap=swap)


@dataclass(frozen=True)
class GemmCase(Case):
    """A product of `rows` rows; `choice` None: cuBLAS."""

    name: str
    shape: GemmShape
    rows: int
    choice: Tile | None

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return self.choice.kind if self.choice else "cublas"

    @property
    def tile(self) -> str:  # type: ignore[override]
        return describe(self.choice)

    @property
    def bytes(self) -> int:
        return self._weight_bytes + 2 * self.rows * (self.shape.n + self.shape.m)

    @property
    def predicted_us(self) -> float:
        ctas = ceil(self.shape.m / self.choice.bn) if self.choice else 1
        shared = (self._weight_bytes + 2 * self.rows * self.shape.n * ctas) / L2_RATE
        return 1e6 * max(1.05 * self.bytes / READ_RATE, shared) + 1.4

    @property
    def _weight_bytes(self) -> int:
        return 2 * self.shape.m * self.shape.n * (2 if self.shape.gated else 1)

    def make(self, device: torch.device) -> Made:
        m, n = self.shape.m * (2 if self.shape.gated else 1), self.shape.n
        copies = max(1, ceil(COLD_BYTES / self._weight_bytes)) if device.type == "cuda" else 1
        x = torch.empty(self.rows, n, dtype=torch.bfloat16, device=device).normal_()
        weights = torch.empty(copies, m, n, dtype=torch.bfloat16, device=device).normal_(std=n**-0.5)
        out = torch.empty(self.rows, self.shape.m, dtype=torch.bfloat16, device=device)
        error = partial(_error, x, weights[0], out, self.shape.gated)
        gated = self.shape.gated
        return Made(lambda i: multiply(self.choice, x, weights[i % copies], out, gated), copies, error)


def multiply(choice: Tile | None, x: Tensor, weight: Tensor, out: Tensor, gated: bool) -> None:
    """The product by our kernel with a tile, or by cuBLAS, with the gate as a kernel of its own behind it."""
    if choice is not None:
        _run(choice, x, weight, out, gated=gated)
    elif gated:
        out.copy_(geglu(torch.mm(x, weight.t())))
    else:
        torch.mm(x, weight.t(), out=out)


def _error(x: Tensor, weight: Tensor, out: Tensor, gated: bool) -> float:
    """Largest error of the first outputs, relative to the largest of them."""
    few = min(CHECKED, out.shape[1])
    want = x.float() @ weight[:few].float().t()
    if gated:
        half = weight.shape[0] // 2
        want = functional.gelu(want, approximate="tanh") * (x.float() @ weight[half : half + few].float().t())
    return float((out[:, :few].float() - want).abs().max() / want.abs().max())


def describe(tile: Tile | None) -> str:
    """`gemv 4x1024 early 4 warps 4`: the arguments of `gemv` and `gemm` in their order."""
    if tile is None:
        return "cublas"
    parts = [f"{tile.kind} {tile.rows}x{tile.bn}x{tile.bk} early {tile.early} warps {tile.warps}"]
    parts += [f"stages {tile.stages}"] if tile.kind == "gemm" else []
    parts += ["swap"] if tile.swap else []
    return " ".join(parts)


def committed(products: Iterable[Product], rows: Iterable[int]) -> Iterator[GemmCase]:
    """Each product with its tile of the table, and cuBLAS beside it."""
    for product in products:
        for count in rows:
            tile = choose(count, product.shape)
            for choice in dict.fromkeys((tile, None)):
                yield GemmCase(product.name, product.shape, count, choice)


def sweep(products: Iterable[Product], rows: Iterable[int]) -> Iterator[GemmCase]:
    """Each product with every candidate tile, and cuBLAS."""
    for product in products:
        for count in rows:
            for choice in (None, *candidates(product.shape, count)):
                yield GemmCase(product.name, product.shape, count, choice)


def candidates(shape: GemmShape, rows: int) -> list[Tile]:
    """At most 24 tiles worth timing: what compiles without spills and fits a shape's size and shared memory."""
    if rows > 128:
        return []
    size = 1 << (rows - 1).bit_length()
    found = [*(_gemvs() if size == 1 else ()), *_gemms(max(size, 16), rows)]
    if shape.gated:
        found = [_halved(tile) for tile in found]
    whole = 1 << (shape.n - 1).bit_length()
    found = [replace(tile, bk=min(tile.bk, whole)) for tile in found]
    fitting = [tile for tile in found if tile == fit(tile, shape.gated, LARGE_SHARED)]
    return list(dict.fromkeys(fitting))[:24]


def _halved(tile: Tile) -> Tile:
    """A tile for a gated product, two weight rows an output: half the outputs, but no fewer than an MMA takes."""
    return replace(tile, bn=max(tile.bn // 2, 1 if tile.kind == "gemv" else 16))


def _gemvs() -> list[Tile]:
    """Tiles of 8 KiB a warp group and turn or about."""
    return [
        *(gemv(4, 1024, early) for early in (4, 3, 2, 1)),
        *(gemv(2, 1024, early) for early in (4, 6)),
        *(gemv(8, 1024, early, warps=8) for early in (2, 4)),
        *(gemv(8, 512, early) for early in (2, 4)),
        *(gemv(4, 2048, early, warps=8) for early in (2, 3)),
        gemv(2, 2048, 3),
        gemv(4, 512, 6, warps=2),
        gemv(4, 512, 4),
        gemv(8, 1024, 2),
    ]


def _gemms(size: int, rows: int) -> list[Tile]:
    """`size` padded rows. Few outputs a CTA keep all SMs busy; many spare L2 the repeated reading of x."""
    narrow = [(16, 256, 4), (32, 128, 5), (32, 256, 3), (32, 256, 4)]
    wide = [(64, 64, 6), (64, 128, 5), (64, 128, 6), (64, 128, 8), (64, 256, 3), (128, 128, 3), (128, 128, 4)]
    shapes = narrow[1:] if rows <= 4 else [*narrow, *wide[1:5]] if size == 16 else [*narrow[1:], *wide]
    plain = [gemm(size, bn, bk, stages) for bn, bk, stages in shapes]
    swapped = [gemm(size, bn, bk, stages, swap=True) for bn, bk, stages in wide] if rows > 4 else []
    eight = [gemm(size, bn, bk, stages, warps=8) for bn, bk, stages in wide[3:]] if size >= 64 else []
    return [*plain, *swapped, *eight]
