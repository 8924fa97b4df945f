"""The kernel bench reaches its end on the CPU: every mode, at small shapes, in the interpreter."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from kernels.tiles import LARGE_SHARED, fit
from tests.bench.gemms import candidates
from tests.bench.kernels import best_tiles
from tests.nano.model_shapes import PUBLIC
from tests.support.engine.products import products

pytestmark = pytest.mark.cpu


def rows(*arguments: str) -> list[dict[str, Any]]:
    """What a dry run prints."""
    command = [sys.executable, "-m", "tests.bench.kernels", "--dry", "--tp", "4", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_committed_tiles() -> None:
    """A row for our kernel and one for torch's product, both right to a bf16 rounding."""
    ours, theirs = rows("--rows", "40", "--only", "o_sliding")
    assert (ours["kernel"], theirs["kernel"]) == ("gemm", "cublas")
    assert max(ours["error"], theirs["error"]) < 2**-6
    assert ours["bytes"] == theirs["bytes"] > 0


def test_candidates_fit() -> None:
    """At most 24 tiles a shape and number of rows, each once, within shared memory, holding the rows."""
    for product in products(PUBLIC["31b"], 4):
        for count in (1, 2, 4, 8, 16, 32, 64, 100):
            tiles = candidates(product.shape, count)
            assert 0 < len(tiles) <= 24
            assert len(set(tiles)) == len(tiles)
            assert all(tile.rows >= count and tile == fit(tile, product.shape.gated, LARGE_SHARED) for tile in tiles)
    assert candidates(product.shape, 129) == []


def test_products_of_a_step() -> None:
    """31B at TP=4 reads 15.348 GB of product weights a step, its four kinds of layer product and the head in their known shapes."""
    found = products(PUBLIC["31b"], 4)
    assert sum(product.count * product.weight_bytes for product in found) == 15_348_006_912
    sizes = {product.name: (product.shape.m, product.shape.n, product.count) for product in found}
    assert sizes["qkv_full"] == (4608, 5376, 10)
    assert sizes["o_sliding"] == (5376, 2048, 50)
    assert sizes["head"] == (65536, 5376, 1)


def test_the_fastest_tile_of_each_product_is_named() -> None:
    """With cuBLAS's time beside it, where that was measured."""
    timed = [
        {"case": case, "rows": 1, "kernel": kernel, "us": us, "floor_us": 1.0, "tile": kernel, "tb_per_s": 1.0}
        for case, kernel, us in (("down", "gemv", 15.0), ("down", "gemm", 16.0), ("down", "cublas", 17.0), ("head", "gemv", 155.0))
    ]
    best = [(row["tile"], row["us"], row["cublas_us"]) for row in best_tiles(timed)]
    assert best == [("gemv", 15.0, 17.0), ("gemv", 155.0, None)]


@pytest.mark.slow
def test_launch_cost() -> None:
    """The host's time of a launch is shown each way, and known launches take less than half of Triton's."""
    command = [sys.executable, "-m", "tests.bench.launch_cost", "--member", "nano:31b", "--rows", "12", "--repeats", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    by_triton, known = (float(found) for found in re.findall(r"a launch ([\d.]+) and ([\d.]+) us", done.stdout)[0])
    assert 0 < known < by_triton / 2, done.stdout
