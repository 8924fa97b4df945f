"""Products of few rows: both kernels in the interpreter against fp64, the library's path, and the choice of tiles."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import geglu, geglu_rows
from kernels.fused_allreduce_norm import Norms, fused_allreduce_norm
from kernels.launch import plain_torch
from kernels.linear import FP32, GEGLU, NONE, _run, linear, linear_parts
from kernels.packed import PackedRows, fp8_matrix, pack_rows, packed_matrix
from kernels.tiles import LARGE_SHARED, MOST_ROWS, TABLE, GemmShape, Tile, choose, fit
from tests.support import interpreter
from tests.support.dtypes import both_dtypes
from tests.support.judge.oracle import error
from tests.support.launches import record

pytestmark = pytest.mark.cpu

# Largest error relative to the largest output: sums in fp32, and one rounding to bf16.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def gemv(bn: int, bk: int, early: int) -> Tile:
    return Tile("gemv", 1, bn, bk, early)


def gemm(rows: int, bn: int, bk: int, stages: int, *, swap: bool = False) -> Tile:
    return Tile("gemm", rows, bn, bk, stages=stages, swap=swap)


TILES = [
    gemv(4, 64, early=4),
    gemv(2, 256, early=1),
    gemv(4, 64, early=9),
    replace(gemv(4, 64, early=4), rows=2),
    gemm(16, 32, 64, stages=2),
    gemm(32, 16, 32, stages=3, swap=True),
]


def product(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """The formula in fp64."""
    y = x.double() @ weight.double().t()
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def case(rows: int, m: int, n: int, dtype: torch.dtype, gated: bool) -> tuple[Tensor, Tensor]:
    """x [rows, n] and a weight whose products are of order 1; the last column weighs, so that its loss shows."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, n, generator=generator)
    x[:, -1] = 4
    weight = torch.randn(m * (1 + gated), n, generator=generator) / n**0.5
    return x.to(dtype), weight.to(dtype)


def run(tile: Tile, x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """`tile`'s kernel on x, its output within a larger tensor of NaN, nothing of which is written beside it."""
    rows, m = x.shape[0], weight.shape[0] // (1 + gated)
    around = torch.full((rows + 2, m), torch.nan, dtype=x.dtype)
    _run(tile, x, packed_matrix(weight), around[1:-1], GEGLU if gated else NONE)
    assert around[[0, -1]].isnan().all()
    return around[1:-1]


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@both_dtypes
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def interpreted_kernels(tile: Tile, gated: bool, dtype: torch.dtype) -> None:
    """Each kernel is the formula, also where no tile divides the sizes; a lost column or swapped halves are not."""
    few, many = (tile.rows, 3 * tile.rows) if tile.kind == "gemv" else (1, tile.rows - 1)
    for rows, m, n in ((few, 14, 200), (many, 8, 256)):
        x, weight = case(rows, m, n, dtype, gated)
        out, want = run(tile, x, weight, gated), product(x, weight, gated)
        assert error(out, want) < TOLERANCE[dtype]
        assert error(out, product(x[:, :-1], weight[:, :-1], gated)) > 4 * TOLERANCE[dtype]
        if gated:
            assert error(out, product(x, weight.roll(m, 0), gated)) > 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def interpreted_fp8_products(tile: Tile, gated: bool) -> None:
    """Each kernel multiplies e4m3 operands and scales sums by row and by output channel; scales of other channels or rows show."""
    rows, m, n = (3 * tile.rows if tile.kind == "gemv" else tile.rows - 1), 14, 200
    x, plain = case(rows, m, n, torch.bfloat16, gated)
    x *= torch.linspace(0.5, 1.5, rows)[:, None]
    weight, packed = fp8_matrix(plain * torch.linspace(0.5, 1.5, len(plain))[:, None]), pack_rows(x)
    assert weight.scale is not None
    out = _run(tile, x, weight, x.new_empty(rows, m), GEGLU if gated else NONE)

    def expected(x_scale: Tensor, scale: Tensor) -> Tensor:
        return product(packed.values.double() * x_scale[:, None], weight.values.double() * scale[:, None], gated)

    assert error(out, expected(packed.scale, weight.scale)) < TOLERANCE[torch.bfloat16]
    assert error(out, expected(packed.scale, weight.scale.roll(1))) > 4 * TOLERANCE[torch.bfloat16]
    assert rows == 1 or error(out, expected(packed.scale.roll(1), weight.scale)) > 4 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("columns", [300, 5000])
@pytest.mark.parametrize("rows", [1, 3])
def interpreted_packed_rows(rows: int, columns: int) -> None:
    """A row of zeros stays zero, others are rounded to e4m3's three bits, and fused producers give the bits of `pack_rows`, which
    are torch's. Planted: a scale of the first columns alone."""
    x, _ = case(rows + 1, 4, columns, torch.bfloat16, False)
    x[0] = 0
    with plain_torch():
        by_torch = pack_rows(x)
    packed = pack_rows(x)
    assert torch.equal(packed.values.view(torch.uint8), by_torch.values.view(torch.uint8))
    assert torch.equal(packed.scale, by_torch.scale)
    assert not torch.equal(pack_rows(x[:, :250].contiguous()).scale, packed.scale)
    assert not packed.values[0].float().any()
    rounded = packed.values.float() * packed.scale[:, None]
    assert ((rounded - x.float()).abs() <= 2**-4 * x.float().abs() + 2**-9 * packed.scale[:, None]).all()
    both = torch.cat([x, x.flip(1)], 1)
    for made, by_hand in (
        (geglu_rows(both), pack_rows(geglu(both))),
        (packed_norm(x), pack_rows(plain_norm(x))),
    ):
        assert torch.equal(made.values.view(torch.uint8), by_hand.values.view(torch.uint8))
        assert torch.equal(made.scale, by_hand.scale)


def packed_norm(x: Tensor) -> PackedRows:
    """x of a fused norm whose product reads packed rows."""
    _, packed = fused_allreduce_norm(x, x.roll(1, 1), Norms(x[-1], x[-1], packs=True), 1e-6)
    assert isinstance(packed, PackedRows)
    return packed


def plain_norm(x: Tensor) -> Tensor:
    """The same, not packed."""
    _, normed = fused_allreduce_norm(x, x.roll(1, 1), Norms(x[-1], x[-1]), 1e-6)
    assert isinstance(normed, Tensor)
    return normed


@pytest.mark.parametrize("tile", TILES, ids=str)
def interpreted_rows_do_not_touch_each_other(tile: Tile) -> None:
    """A row's bits are the same beside rows of NaN, in another place, and alone; those of another row are not."""
    least = tile.rows if tile.kind == "gemv" else 1
    x, weight = case(max(tile.rows, 2 * least), 12, 150, torch.bfloat16, False)
    whole = run(tile, x, weight, False)
    poisoned = torch.full_like(x, torch.nan)
    poisoned[-1] = x[0]
    assert torch.equal(run(tile, poisoned, weight, False)[-1], whole[0])
    assert torch.equal(run(tile, x[:least], weight, False)[0], whole[0])
    assert not torch.equal(whole[1], whole[0])


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 70])
def interpreted_wrappers_take_the_tables_tile(rows: int) -> None:
    """On shapes that nobody measured the wrappers still compute the formula, in one launch, fp32 if asked."""
    x, weight = case(rows, 24, 96, torch.bfloat16, True)
    with record() as nodes:
        gate = linear(x, weight, GEGLU)
        out = linear(x, weight)
        wide = linear(x, weight, FP32)
    assert len(nodes) == 3
    assert error(gate, product(x, weight, True)) < TOLERANCE[torch.bfloat16]
    assert error(out, product(x, weight, False)) < TOLERANCE[torch.bfloat16]
    assert error(wide, product(x, weight, False)) < TOLERANCE[torch.float32]
    assert error(wide.bfloat16(), product(x, weight, False)) > TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [1, 5, 9, 130])
def interpreted_parts(rows: int) -> None:
    """Few outputs of a long inner dimension come in parts that add up to the product; one part less does not. Of one row, of few
    rows and small weights, and of more rows than tiles hold, the product is whole."""
    x, weight = case(rows, 256, 1024, torch.bfloat16, False)
    parts = linear_parts(x, weight)
    if rows != 9:
        assert torch.equal(parts, linear(x, weight))
        return
    assert parts.shape[1:] == (rows, 256)
    assert parts.shape[0] > 1
    assert error(parts.sum(0), product(x, weight, False)) < TOLERANCE[torch.float32]
    assert error(parts[1:].sum(0), product(x, weight, False)) > 100 * TOLERANCE[torch.float32]


def interpreted_many_rows_take_the_library() -> None:
    """Above the largest class, of more than a few outputs, and for no rows at all, the product is torch's, and only the gate a
    kernel of its own."""
    x, weight = case(MOST_ROWS + 1, 257, 32, torch.float32, True)
    with record() as nodes:
        plain, gated, none = linear(x, weight), linear(x, weight, GEGLU), linear(x[:0], weight)
    assert [node.kernel for node in nodes] == ["_gelu_mul"]
    assert torch.equal(plain, functional.linear(x, weight))
    assert torch.equal(gated, geglu(plain))
    assert none.shape == (0, 514)


@both_dtypes
def test_on_the_cpu(dtype: torch.dtype) -> None:
    """Without the interpreter the CPU keeps torch's product, its dtype, and unrounded fp32 where that is asked for."""
    x, weight = case(5, 24, 96, dtype, True)
    assert torch.equal(linear(x, weight), functional.linear(x, weight))
    assert torch.equal(linear(x, weight, GEGLU), geglu(functional.linear(x, weight)))
    out = linear(x, weight, FP32)
    assert out.dtype == torch.float32
    assert error(out, product(x, weight, False)) < TOLERANCE[torch.float32]
    assert dtype == torch.float32 or error(linear(x, weight), product(x, weight, False)) > TOLERANCE[torch.float32]


def test_wrong_arguments_are_refused() -> None:
    """Shapes, dtypes and strides that the kernels could not read fail with the values."""
    x, weight = torch.zeros(3, 32), torch.zeros(8, 32)
    with pytest.raises(AssertionError, match="31"):
        linear(x[:, :31].contiguous(), weight)
    with pytest.raises(AssertionError, match="bfloat16"):
        linear(x.bfloat16(), weight)
    with pytest.raises(AssertionError, match="64"):
        linear(torch.zeros(3, 64)[:, ::2], weight)


def test_every_shape_has_tiles_for_up_to_most_rows() -> None:
    """The table is whole; tiles hold their rows, gemv one or two; `swap` needs the MMA's 64 rows; the least that fits is taken; few
    rows of small weights take a CTA each."""
    for shape, tiles in TABLE.items():
        assert max(tiles) == MOST_ROWS, shape
        for rows, tile in tiles.items():
            assert tile.rows == rows
            assert tile.kind != "gemv" or rows == 1, (shape, tile)
            assert not tile.swap or tile.bn % 64 == 0
            assert tile == fit(tile, shape.gated, 232448), (shape, tile)
    taken = [choose(rows, GemmShape(4096, 5376)) for rows in (1, 2, 9, 16, 17, 64, 65, 129)]
    assert [tile and tile.rows for tile in taken] == [1, 2, 16, 16, 32, 64, None, None]
    small = [choose(rows, GemmShape(256, 2560)) for rows in (2, 3, 8, 9)] + [choose(3, GemmShape(2560, 256))]
    kinds = [("gemv", 2), ("gemv", 1), ("gemv", 1), ("gemm", 16), ("gemm", 16)]
    assert [tile and (tile.kind, tile.rows) for tile in small] == kinds
    many = [choose(rows, GemmShape(256, 1536)) for rows in (65, 528, 529)]
    assert [tile and tile.rows for tile in many] == [16, 16, None]


def test_a_missing_shape_takes_the_nearest_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """It takes the tile of the nearest shape of its kind, with one line in the log; a shape of the table logs nothing."""
    caplog.set_level(logging.INFO, "kernels.tiles")
    for _ in range(2):
        assert choose(1, GemmShape(5376, 2049)) == TABLE[GemmShape(5376, 2048)][1]
        assert choose(16, GemmShape(70000, 5376)) == TABLE[GemmShape(65536, 5376)][16]
        assert choose(1, GemmShape(100, 100, gated=True)) == TABLE[GemmShape(5376, 5376, gated=True)][1]
        assert choose(1, GemmShape(5376, 2048)) == TABLE[GemmShape(5376, 2048)][1]
    assert len(caplog.messages) == 3
    assert "70000" in caplog.messages[1]


def test_less_shared_memory_takes_fewer_stages() -> None:
    """A pipeline is cut until it fits: stages first, then the width of a turn; one that fits is left alone."""
    tile = gemm(64, 64, 256, stages=5)
    assert fit(tile, False, 10**9) == tile
    assert fit(tile, False, 232448) == replace(tile, stages=3)
    assert fit(tile, False, 101376) == replace(tile, stages=3, bk=128)
    assert fit(tile, True, 101376).shared_bytes(True) <= 101376 - 1024
    for shape, tiles in TABLE.items():
        for rows in tiles:
            small = choose(rows, shape, 101376)
            assert small is None or small.shared_bytes(shape.gated) <= 101376 - 1024


@pytest.mark.parametrize("rows", [8, 32, 64])
def test_two_share_a_processor_where_few_are_left_for_a_second_wave(rows: int) -> None:
    """Up to one and a half times as many CTAs as there are processors are made so small that two fit; others are not."""
    tiles = [choose(rows, GemmShape(64 * ctas, 5376, gated=True)) for ctas in (132, 133, 198, 199)]
    assert [tile and tile.shared_bytes(True) <= LARGE_SHARED // 2 - 1024 for tile in tiles] == [False, True, True, False]
