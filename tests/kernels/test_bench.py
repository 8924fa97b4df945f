"""The bench of products reaches its end on the CPU, in the interpreter."""

import subprocess
import sys

import pytest

from tests.nano.model_shapes import PUBLIC
from tests.support.engine.products import products

pytestmark = pytest.mark.cpu


@pytest.mark.slow
def test_layers_of_products() -> None:
    """Tiles that are tried give the residual of those in force; a product that no layer has is refused by name."""
    command = [sys.executable, "-m", "tests.bench.layer_products", "--dry", "--model", "26b-a4b", "--rows", "3", "--try"]
    tried = "o_sliding:16,32,2,splits=2+experts_up:32,32,3,swap"
    done = subprocess.run([*command, tried], capture_output=True, text=True, timeout=200, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["3"]
    done = subprocess.run([*command, "up:16,32,2"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "qkv_sliding, o_sliding, gate_up, down, qkv_full, o_full" in done.stderr


def test_products_of_a_step() -> None:
    """31B at TP=4 reads 15.348 GB of product weights a step, its four kinds of layer product and the head in their known shapes."""
    found = products(PUBLIC["31b"], 4)
    assert sum(product.count * product.weight_bytes for product in found) == 15_348_006_912
    sizes = {product.name: (product.shape.m, product.shape.n, product.count) for product in found}
    assert sizes["qkv_full"] == (4608, 5376, 10)
    assert sizes["o_sliding"] == (5376, 2048, 50)
    assert sizes["head"] == (65536, 5376, 1)
