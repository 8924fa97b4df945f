"""The bench of products reaches its end on the CPU, in the interpreter."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from engine.quantisation import read_quantisation
from kernels import linear
from kernels.tiles import GemmShape, Tile, choose
from tests.bench.layer_products import Chain, parse, tiles_of
from tests.nano.model_shapes import PUBLIC
from tests.nano.random_models import model_folder
from tests.support.engine.listed_steps import TP, step
from tests.support.engine.products import products
from tests.support.launches import record

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


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("member", ["31b", "26b-a4b"])
def test_the_chain_packs_rows_where_the_model_does(member: str, rows: int) -> None:
    """The bench's fp8 layers launch a step's products, packings and norms in its order, but for the head. Planted: plain norms."""
    wanted = {"_scale_rows", "_gemv", "_gemm", "_allreduce_norm"}
    fp8 = read_quantisation(model_folder(f"dummy:{member}"), "fp8")
    of_step = [node.kernel for node in step(member, rows, weights=fp8) if node.kernel in wanted]
    chain = Chain(PUBLIC[member], TP, PUBLIC[member].layers, torch.device("meta"), "fp8")

    def launched() -> list[str]:
        with record((9, 0)) as nodes:
            chain.run(chain.prepare(rows))
        return [node.kernel for node in nodes if node.kernel in wanted]

    assert launched() == of_step[:-1]
    chain.norms = chain.norms._replace(packs=False)
    assert launched() != of_step[:-1]


def test_tiles_are_tried_where_they_can_be() -> None:
    """A gemv of one and two rows, a gemm of up to `most` rows and a change of one field of a table's tile are tried together. All
    other products keep their table's tiles."""
    down, o = GemmShape(5376, 21504), GemmShape(5376, 8192)
    names = [(product.name, product.shape) for product in products(PUBLIC["31b"], 1)]
    text = "down:gemv,2,1024,3,warps=2+down:32,128,5,swap+o_full:stages=4"
    with tiles_of(parse(text, names, PUBLIC["31b"]), most=64):
        taken = [linear.choose(rows, down, 232448, load="fp8") for rows in (1, 2, 9, 64)]
        changed = linear.choose(9, GemmShape(5376, 16384), 232448, load="fp8")
        for rows, shape in ((65, down), (1, o), (9, o)):
            assert linear.choose(rows, shape, 232448, load="fp8") == choose(rows, shape, 232448, load="fp8")
    assert changed == replace(choose(9, o, load="fp8") or taken[2], stages=4)
    assert taken[:2] == [Tile("gemv", rows, 2, 1024, 3, warps=2) for rows in (1, 2)]
    assert taken[2:] == [Tile("gemm", rows, 32, 128, stages=5, swap=True) for rows in (16, 64)]
