"""Kernel and tile of a product of few rows: a measured table by load, shape and rows, cut to shared memory.

A pure function, so all ranks choose alike. Figures come from `python -m tests.bench.layer_products`; an unknown shape takes the
nearest one's tile and is logged once.
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from kernels.launch import cdiv
from kernels.packed import Load

Kind = Literal["gemv", "gemm"]
MOST_ROWS = 64  # of a tile of ours
_GEMV_ROWS = 2  # of any product: at three, its arithmetic takes as long as what the padded tiles of an MMA lose
_FEW_OUTPUTS = 256  # those of per-layer embeddings
_FEW = 2048  # rows x outputs of products that fill few processors: a gemv's CTAs of a row each read the weights from L2
_PROCESSORS, _LEAST_TURNS = 132, 4  # of an H200, one for a CTA of a product that is cut finer; turns of a part's CTA
LARGE_SHARED = 232448  # bytes a block may have on sm_90 and sm_100

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tile:
    kind: Kind
    rows: int  # of x that a CTA takes; gemv: exactly
    bn: int  # outputs of a CTA
    bk: int  # of the inner dimension, a turn
    early: int = 0  # weight tiles prefetched before the wait
    warps: int = 4
    stages: int = 1  # of gemm's pipeline
    swap: bool = False  # the weight is the MMA's left operand, whose 64 rows it fills
    splits: int = 1  # CTAs that share the inner dimension of the same outputs

    def shared_bytes(self, gated: bool, load: Load = "plain") -> int:
        if self.kind == "gemv":
            return 0
        width = self.bn * (2 if gated else 1)
        of_x, of_weight = _BYTES[load]
        turn = self.rows * self.bk * of_x + int(width * self.bk * of_weight)
        return self.stages * turn + (2 * self.bn * self.bk if load == "int4" else 0)


class GemmShape(NamedTuple):
    """gated: the weight has 2 m rows, gate first."""

    m: int
    n: int
    gated: bool = False

    def distance(self, other: "GemmShape") -> float:
        if self.gated != other.gated:
            return math.inf
        return abs(math.log(self.m / other.m)) + abs(math.log(self.n / other.n))


def _tiles(gemv: tuple[int, int], *gemms: tuple[int, int], bk: tuple[int, int] = (1024, 128)) -> dict[int, Tile]:
    """Tiles by most rows: (outputs, early tiles) of the gemv, (outputs, stages) of gemms of 16, 32 and 64 rows. bk: of gemv and
    gemms."""
    by_rows = zip((16, 32, 64), gemms, strict=True)
    return {1: Tile("gemv", 1, gemv[0], bk[0], gemv[1])} | {
        rows: Tile("gemm", rows, bn, bk[1], stages=stages, swap=bn <= 64 and rows < 64) for rows, (bn, stages) in by_rows
    }


def _four_bit_tiles(*gemms: tuple[int, int, int]) -> dict[int, Tile]:
    """(outputs, columns a turn, stages) of gemms of 16, 32, 64 and 128 rows."""
    by_rows = zip((16, 32, 64, 128), gemms, strict=True)
    return {rows: Tile("gemm", rows, bn, bk, stages=stages, swap=True) for rows, (bn, bk, stages) in by_rows}


# Above, cuBLAS. The fastest of those tried on an H200 for 31B at TP=4. Of 16 to 64 rows measured in a whole captured step: 84 CTAs
# need deep pipelines, which leave room for the next kernel's.
_Table = dict[GemmShape, dict[int, Tile]]
TABLE: _Table = {
    GemmShape(4096, 5376): _tiles((4, 4), (64, 8), (64, 6), (32, 6)),
    **{GemmShape(m, 5376): _tiles((4, 4), (64, 8), (64, 6), (64, 6)) for m in (4608, 5376)},
    **{GemmShape(5376, n): _tiles((4, 2), (64, 8), (64, 6), (64, 6)) for n in (2048, 4096)},
    GemmShape(65536, 5376): _tiles((4, 4), (64, 4), (128, 3), (128, 3)),
    GemmShape(5376, 5376, gated=True): _tiles((2, 4), (64, 4), (64, 4), (64, 4)),
}
_FP8_HEAD = Tile("gemm", 64, 64, 128, stages=6, swap=True)
_FP8_TABLE: _Table = {
    GemmShape(262144, 2816): _tiles((8, 3), (64, 6), (64, 6), (64, 6)) | {64: _FP8_HEAD},
    GemmShape(262144, 5376): _tiles((4, 4), (64, 6), (64, 6), (64, 6)) | {64: _FP8_HEAD},
    GemmShape(8192, 2816): _tiles((4, 4), (64, 6), (64, 6), (64, 6), bk=(1024, 256)),
    **{
        GemmShape(m, n): _tiles((4, 4), (64, 6), (64, 6), (64, 6), bk=(2048, 256))
        for m, n in ((16384, 5376), (5376, 8192), (5376, 21504))
    },
    GemmShape(21504, 5376, gated=True): _tiles((2, 3), (64, 4), (64, 4), (64, 4), bk=(2048, 256)),
}
_SHORT = _four_bit_tiles((64, 256, 4), (64, 256, 4), (64, 256, 3), (64, 128, 3))
_LONG = _four_bit_tiles((128, 256, 3), (128, 256, 3), (64, 128, 4), (64, 128, 4))
_GATED = _four_bit_tiles((64, 256, 3), (64, 256, 3), (64, 256, 3), (64, 128, 3))
# One or two rows: a gemv's instructions take longer than the 31B's words, a gemm's few CTAs longer than the E4B's.
_FEW_WORDS = {1: Tile("gemv", 1, 2, 1024, 1, warps=1)}
_INT4_TABLE: _Table = {
    GemmShape(5376, 8192): _SHORT,
    GemmShape(5376, 21504): _LONG,
    GemmShape(21504, 5376, gated=True): _GATED,
    GemmShape(2560, 2048): _FEW_WORDS | _SHORT,
    GemmShape(2560, 10240): _FEW_WORDS | _LONG,
    GemmShape(10240, 2560, gated=True): _FEW_WORDS | _GATED,
}
TABLES: dict[Load, _Table] = {"plain": TABLE, "fp8": _FP8_TABLE, "int4": _INT4_TABLE}
# of a number of x and of a weight, with its group's scale and zero point, in shared memory
_BYTES: dict[Load, tuple[int, float]] = {"plain": (2, 2), "fp8": (1, 1), "int4": (2, 0.625)}


@cache
def choose(rows: int, shape: GemmShape, shared: int = LARGE_SHARED, *, parts: bool = False, load: Load = "plain") -> Tile | None:
    """The tile for `rows` rows of x and `shared` bytes of shared memory; None: the library. parts: the inner dimension may be
    split."""
    table = TABLES[load]
    tiles = table[_nearest(shape, load)]
    if rows > max(tiles):
        few = shape.m <= _FEW_OUTPUTS and cdiv(rows, 16) * cdiv(shape.m, tiles[16].bn) <= _PROCESSORS
        return fit(tiles[16], shape.gated, shared, load) if few else None
    if 1 in tiles and rows <= _GEMV_ROWS:
        return replace(tiles[1], rows=rows)
    if 1 in tiles and rows * shape.m <= _FEW:
        return tiles[1]
    tile = tiles[min(most for most in tiles if rows <= most)]
    # If a second wave of CTAs would leave half of the processors idle, two share one.
    second_wave = cdiv(shape.m, tile.bn) - _PROCESSORS
    tile = fit(tile, shape.gated, shared // 2 if 0 < second_wave <= _PROCESSORS // 2 else shared, load)
    # If outputs leave many processors idle, the inner dimension is split, or a tile takes fewer outputs.
    if parts and load == "int4":
        return replace(tile, splits=_four_bit_splits(tile, shape))
    if parts:
        finer = 2
        while finer * cdiv(shape.m, tile.bn) <= _PROCESSORS and shape.n % (finer * tile.bk * _LEAST_TURNS) == 0:
            tile = replace(tile, splits=finer)
            finer = 2 * finer
    elif shape not in table and not tile.swap:
        while 2 * cdiv(shape.m, tile.bn) <= _PROCESSORS and tile.bn > 16:
            tile = replace(tile, bn=tile.bn // 2)
    return tile


def _four_bit_splits(tile: Tile, shape: GemmShape) -> int:
    """Several CTAs share a processor, since converting weights waits for the MMA."""
    ctas = cdiv(shape.m, tile.bn)
    most = 4 * _PROCESSORS if tile.rows <= 32 else 2 * _PROCESSORS
    fine = (splits for splits in (6, 4, 3, 2) if splits * ctas <= most and shape.n % (splits * tile.bk) == 0)
    return next(fine, 1)


def fit(tile: Tile, gated: bool, shared: int, load: Load = "plain") -> Tile:
    """`tile` with fewer stages (at least three), then half the columns, until its pipeline fits `shared` minus 1 KiB for
    reductions."""
    while tile.shared_bytes(gated, load) > shared - 1024:
        fewer = replace(tile, stages=tile.stages - 1)
        tile = fewer if tile.stages > 3 else replace(tile, bk=tile.bk // 2, stages=4)
    return tile


@cache
def _nearest(shape: GemmShape, load: Load) -> GemmShape:
    if shape in TABLES[load]:
        return shape
    nearest = min(TABLES[load], key=shape.distance)
    _logger.info("no %s tile measured for %s: taking those of %s", load, shape, nearest)
    return nearest
