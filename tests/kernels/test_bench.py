"""The products that benches list are those of a step."""

import pytest

from tests.nano.model_shapes import PUBLIC
from tests.support.engine.products import products

pytestmark = pytest.mark.cpu


def test_products_of_a_step() -> None:
    """31B at TP=4 reads 15.348 GB of product weights a step, its four kinds of layer product and the head in their known shapes."""
    found = products(PUBLIC["31b"], 4)
    assert sum(product.count * product.weight_bytes for product in found) == 15_348_006_912
    sizes = {product.name: (product.shape.m, product.shape.n, product.count) for product in found}
    assert sizes["qkv_full"] == (4608, 5376, 10)
    assert sizes["o_sliding"] == (5376, 2048, 50)
    assert sizes["head"] == (65536, 5376, 1)
