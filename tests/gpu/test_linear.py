"""Products of few rows on a GPU: real shapes against fp32, graphs against eager, and dependent launches in a row."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deploy.models.public_shapes import PUBLIC
from kernels.launch import compilations, record
from kernels.linear import _run, linear, linear_geglu
from kernels.tiles import GemmShape, row_class
from tests.bench.gemms import streams
from tests.support.engine.products import Product, products

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOLERANCE = 2**-8  # one rounding to bf16, relative to the largest output; sums are fp32
RANKS = [("31b", 4), ("26b-a4b", 1), ("26b-a4b", 4), ("e2b", 1), ("e4b", 1), ("12b", 2)]
CASES = [
    pytest.param(product, id=f"{member}-tp{tp}-{product.name}-{product.shape.m}")
    for member, tp in RANKS
    for product in products(PUBLIC[member], tp)
]

SHAPES = list(dict.fromkeys(product.shape for product in products(PUBLIC["31b"], 4) if product.name != "head"))
RAGGED = GemmShape(1031, 1032)


def run(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return linear_geglu(x, weight) if gated else linear(x, weight)


def tensors(product: Product, rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    shape = product.shape
    x = torch.randn(rows, shape.n, device=DEVICE).bfloat16()
    weight = torch.empty(shape.m * (1 + shape.gated), shape.n, dtype=torch.bfloat16, device=DEVICE)
    return x, weight.normal_(std=shape.n**-0.5)


def error(out: Tensor, x: Tensor, weight: Tensor, gated: bool) -> float:
    torch.backends.cuda.matmul.allow_tf32 = False
    want = x.float() @ weight.float().t()
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = functional.gelu(gate, approximate="tanh") * up
    return float((out.float() - want).abs().max() / want.abs().max())


def exact(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """The formula in fp64."""
    want = x.double() @ weight.double().t()
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = functional.gelu(gate, approximate="tanh") * up
    return want


@pytest.mark.parametrize("product", CASES)
def test_real_shapes(product: Product) -> None:
    """Every product of a rank at every class of rows is the formula; with another row's input it is not. A row's bits do not depend
    on the rows beside it."""
    for rows in (1, 2, 3, 8, 24, 64, 100):
        x, weight = tensors(product, rows)
        out = run(x, weight, product.shape.gated)
        assert error(out, x, weight, product.shape.gated) < TOLERANCE
        assert error(out, x.flip(1), weight, product.shape.gated) > 100 * TOLERANCE
        x[:-1] = torch.nan
        assert torch.equal(run(x, weight, product.shape.gated)[-1], out[-1])


@pytest.mark.parametrize("rows", [5, 8, 16, 27, 64, 100])
@pytest.mark.parametrize("shape", [*SHAPES, RAGGED, replace(RAGGED, gated=True)], ids=str)
def test_streams(shape: GemmShape, rows: int) -> None:
    """Every candidate by TMA is the formula in fp64, where its tiles divide the sizes and where not, whatever lies behind x's rows;
    with another row's input it is not. A row's bits do not depend on the rows beside it, nor on how often it is computed."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is sm_90's")
    x, weight = tensors(Product("stream", shape, 1), rows)
    around = torch.full((rows + 2, shape.m), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    out, want = around[1:-1], exact(x, weight, shape.gated)
    other = exact(x.flip(1), weight, shape.gated)
    for tile in streams(shape, 8 if rows <= 8 else row_class(rows) or 0):
        _run(tile, x, weight, out.fill_(torch.nan), gated=shape.gated)
        first = out.clone()
        assert around[[0, -1]].isnan().all(), tile
        assert float((out.double() - want).abs().max() / want.abs().max()) < TOLERANCE, tile
        assert float((out.double() - other).abs().max() / want.abs().max()) > 100 * TOLERANCE, tile
        poisoned = torch.full_like(x, torch.nan)
        poisoned[-1] = x[-1]
        _run(tile, poisoned, weight, out, gated=shape.gated)
        assert torch.equal(out[-1], first[-1]), tile
        for _ in range(20):
            _run(tile, x, weight, out, gated=shape.gated)
        assert torch.equal(out, first), tile


class Stack:
    """Sixty layers of products, each reading what the one before wrote; a norm at the end of a layer keeps the size of the rows."""

    def __init__(self, rows: int, width: int = 2048) -> None:
        def weights(m: int) -> Tensor:
            return torch.empty(60, m, width, dtype=torch.bfloat16, device=DEVICE).normal_(std=width**-0.5)

        torch.manual_seed(rows)
        self.x = torch.randn(rows, width, device=DEVICE).bfloat16()
        self.h, self._a, self._b = (torch.empty_like(self.x) for _ in range(3))
        self._layers = list(zip(weights(2 * width), weights(width), weights(width), strict=True))

    def step(self, after: Callable[[], None]) -> None:
        """x -> h; `after` is called behind every launch."""
        self.h.copy_(self.x)
        for gate_up, down, square in self._layers:
            linear_geglu(self.h, gate_up, self._a)
            after()
            linear(self._a, down, self._b)
            after()
            linear(self._b, square, self._a)
            after()
            self.h.copy_(functional.rms_norm(self._a, self._a.shape[1:]))
            after()


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_dependent_launches_in_a_graph(rows: int) -> None:
    """Products that may start before their predecessor has ended, in a graph, give the bits that they give on an idle device;
    replays repeat them, and nothing is compiled on the way. Another input gives other bits."""
    stack = Stack(rows)
    with record() as nodes:
        stack.step(torch.cuda.synchronize)
    assert [node.constexprs["PDL"] for node in nodes] == [torch.cuda.get_device_capability() >= (9, 0)] * 180
    want, compiled = stack.h.clone(), compilations()
    assert 0.5 < want.float().std() < 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stack.step(lambda: None)
    for _ in range(20):
        stack.h.zero_()
        graph.replay()
        assert torch.equal(stack.h, want)
    assert compilations() == compiled
    stack.x.mul_(-1)
    graph.replay()
    assert not torch.equal(stack.h, want)


def test_the_head_keeps_fp32() -> None:
    """Asked for fp32, the product of bf16 is not rounded: nearer to fp32 by far than one rounding."""
    head = next(product for product in products(PUBLIC["31b"], 4) if product.name == "head")
    for rows in (1, 8, 100, 200):
        x, weight = tensors(head, rows)
        wide = linear(x, weight, dtype=torch.float32)
        assert error(wide, x, weight, False) < 3e-5
        assert error(wide.bfloat16(), x, weight, False) > 3e-4
