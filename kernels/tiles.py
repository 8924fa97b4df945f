"""Which kernel and tile a product of few rows takes: a committed table by shape and rows, cut to the GPU's shared memory.

The choice is a pure function of (rows, shape, shared memory): nothing is timed at run time, and all ranks choose alike. The
figures come from `python -m tests.bench.kernels --sweep`; a shape that is not in the table takes the nearest one's tile and says
so once.
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from kernels.launch import cdiv

Kind = Literal["gemv", "gemm"]
MOST_ROWS = 64  # of a tile of ours
_GEMV_ROWS = 2  # of any product: at three, its arithmetic takes as long as what the padded tiles of an MMA lose
_SMALL, _SMALL_ROWS = 1 << 20, 8  # weights of a product that fills few processors: a gemv's CTAs of a row each read them from L2
_PROCESSORS, _LEAST_TURNS = 132, 4  # of an H200, one for a CTA of a product that is cut finer; turns of a part's CTA
LARGE_SHARED = 232448  # bytes a block may have on sm_90 and sm_100

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tile:
    """One variant of a kernel. `rows` of x a CTA takes (gemv: exactly), `bn` of its outputs, `bk` of the inner dimension a turn.

    `early`: weight tiles asked for before the kernel waits for its predecessors, into registers (gemv) or L2 (gemm).
    `swap`: the weight is the MMA's left operand, whose 64 rows it fills, and x the right one. `stages`: depth of gemm's pipeline.
    `start`: the next kernel may start with this one; it pays where that is a product too and has weights to ask for (31B TP=4 on
    H200: 4.42 against 4.50 ms a step, gate_up alone).
    `splits`: CTAs that share the inner dimension of the same outputs, each with sums of its own.
    """

    kind: Kind
    rows: int
    bn: int
    bk: int
    early: int
    warps: int = 4
    stages: int = 1
    swap: bool = False
    start: bool = False
    splits: int = 1

    def shared_bytes(self, gated: bool) -> int:
        """What gemm's pipeline holds of x and weight, in two bytes a number; 0 for gemv, which needs only its sums' few bytes."""
        width = self.bn * (2 if gated else 1)
        return self.stages * (self.rows + width) * self.bk * 2 if self.kind == "gemm" else 0


class GemmShape(NamedTuple):
    """m outputs of n inputs each; `gated`: the weight has 2 m rows, gate first."""

    m: int
    n: int
    gated: bool = False

    def distance(self, other: "GemmShape") -> float:
        """Factors between the two shapes' sizes, summed as logarithms; gated ones never stand for others."""
        if self.gated != other.gated:
            return math.inf
        return abs(math.log(self.m / other.m)) + abs(math.log(self.n / other.n))


# Tiles by the most rows that they take; above, cuBLAS. The fastest of those tried on an H200 for 31B at TP=4. Of 16 to 64 rows
# measured in a whole captured step: 84 CTAs need deep pipelines, beside which the next kernel's still fit.
_SHALLOW = Tile("gemm", 16, 64, 128, 4, stages=4, swap=True)
TABLE: dict[GemmShape, dict[int, Tile]] = {
    **{
        GemmShape(m, n): {
            1: Tile("gemv", 1, 4, 1024, early),
            16: Tile("gemm", 16, 64, 128, 4, stages=8, swap=True),
            32: Tile("gemm", 32, 64, 128, 1, stages=6, swap=True),
            64: Tile("gemm", 64, 64, 128, 1, stages=6),
        }
        for m, n, early in ((4096, 5376, 4), (4608, 5376, 4), (5376, 2048, 2), (5376, 4096, 2), (5376, 5376, 4))
    },
    GemmShape(65536, 5376): {
        1: Tile("gemv", 1, 4, 1024, 4),
        16: _SHALLOW,
        32: Tile("gemm", 32, 128, 128, 1, stages=3),
        64: Tile("gemm", 64, 128, 128, 1, stages=3),
    },
    GemmShape(5376, 5376, gated=True): {  # `start`: the MLP's down product follows
        1: Tile("gemv", 1, 2, 1024, 4, start=True),
        16: replace(_SHALLOW, start=True),
        32: Tile("gemm", 32, 64, 128, 1, stages=4, swap=True, start=True),
        64: Tile("gemm", 64, 64, 128, 1, stages=4, start=True),
    },
}


@cache
def choose(rows: int, shape: GemmShape, shared: int = LARGE_SHARED, *, parts: bool = False) -> Tile | None:
    """The tile for `rows` rows of x on a GPU whose blocks may have `shared` bytes of shared memory; None: use cuBLAS.

    Up to `_GEMV_ROWS` rows take the tile for one row, and with small weights up to `_SMALL_ROWS`, a CTA each. Where a product's
    outputs leave many processors idle, its inner dimension is shared out if it may be in `parts`; else a tile that was measured for
    another shape takes fewer outputs, unless they are the MMA's rows (`swap`).
    """
    if rows > MOST_ROWS:
        return None
    tiles = TABLE[_nearest(shape)]
    if rows <= _GEMV_ROWS:
        return replace(tiles[1], rows=rows)
    if rows <= _SMALL_ROWS and shape.m * shape.n <= _SMALL:
        return tiles[1]
    tile = fit(tiles[min(most for most in tiles if rows <= most)], shape.gated, shared)
    if parts:
        finer = 2
        while finer * cdiv(shape.m, tile.bn) <= _PROCESSORS and shape.n % (finer * tile.bk * _LEAST_TURNS) == 0:
            tile, finer = replace(tile, splits=finer), 2 * finer
    elif shape not in TABLE and not tile.swap:
        while 2 * cdiv(shape.m, tile.bn) <= _PROCESSORS and tile.bn > 16:
            tile = replace(tile, bn=tile.bn // 2)
    return tile


def fit(tile: Tile, gated: bool, shared: int) -> Tile:
    """`tile` with fewer stages, then a smaller `bk`, until its pipeline fits in `shared` bytes beside 1 KiB for reductions."""
    while tile.shared_bytes(gated) > shared - 1024:
        tile = replace(tile, stages=tile.stages - 1) if tile.stages > 2 else replace(tile, bk=tile.bk // 2)
    return tile


@cache
def _nearest(shape: GemmShape) -> GemmShape:
    if shape in TABLE:
        return shape
    nearest = min(TABLE, key=shape.distance)
    _logger.info("no tile measured for %s: taking those of %s", shape, nearest)
    return nearest
