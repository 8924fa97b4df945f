"""Products of few rows on a GPU: real shapes against fp32, graphs against eager, and dependent launches in a row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.launch import plain_torch
from kernels.linear import FP32, GEGLU, linear
from kernels.recheck import recheck
from kernels.tiles import choose
from tests.bench.recheck import tables
from tests.nano.model_shapes import PUBLIC
from tests.support.engine.products import Product, products
from tests.support.launches import compilations, record

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOLERANCE = 2**-8  # one rounding to bf16, relative to the largest output; sums are fp32
RANKS = [("31b", 4), ("26b-a4b", 1), ("26b-a4b", 4), ("e2b", 1), ("e4b", 1), ("12b", 2)]
CASES = [
    pytest.param(product, id=f"{member}-tp{tp}-{product.name}-{product.shape.m}")
    for member, tp in RANKS
    for product in products(PUBLIC[member], tp)
]


def run(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return linear(x, weight, GEGLU) if gated else linear(x, weight)


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


@pytest.mark.parametrize("hidden", [2816, 5376])
def test_an_fp8_head(hidden: int) -> None:
    """The best logits of each row are the table's, and the greedy choices. Planted: without the recheck they are not."""
    table, packed = tables(262144, hidden)
    for rows in (1, 3, 64):
        x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
        near = linear(x, packed, FP32)
        found, expected = near.clone(), near.clone()
        recheck(found, x, table)
        with plain_torch():
            recheck(expected, x, table)
            exact = linear(x, table, FP32)
        off = float((found - expected).abs().max())
        lost = float((exact.amax(1) - exact.gather(1, found.argmax(1, keepdim=True))[:, 0]).max())
        assert max(off, lost) < 1e-4  # fp32 sums in another order
        assert float((near - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("product", CASES)
def test_real_shapes(product: Product) -> None:
    """Every product of a rank at every class of rows is the formula; with another row's input it is not. A row's bits do not depend
    on the rows beside it."""
    for rows in (1, 2, 3, 8, 24, 64, 100):
        x, weight = tensors(product, rows)
        out = run(x, weight, product.shape.gated)
        rounded = product.shape.gated and choose(rows, product.shape) is None  # cuBLAS rounds gate and up before their product
        assert error(out, x, weight, product.shape.gated) < (3 if rounded else 1) * TOLERANCE
        assert error(out, x.flip(1), weight, product.shape.gated) > 100 * TOLERANCE
        x[:-1] = torch.nan
        assert torch.equal(run(x, weight, product.shape.gated)[-1], out[-1])


class Stack:
    """Sixty layers of products, each reading what the one before wrote; a norm at the end of a layer keeps the size of the rows."""

    def __init__(self, rows: int, width: int = 2048) -> None:
        def weights(m: int) -> Tensor:
            return torch.empty(60, m, width, dtype=torch.bfloat16, device=DEVICE).normal_(std=width**-0.5)

        torch.manual_seed(rows)
        self.x = torch.randn(rows, width, device=DEVICE).bfloat16()
        self.h = torch.empty_like(self.x)
        self._layers = list(zip(weights(2 * width), weights(width), weights(width), strict=True))

    def step(self, after: Callable[[], None]) -> None:
        """x -> h; `after` is called behind every launch."""
        self.h.copy_(self.x)
        for gate_up, down, square in self._layers:
            gated = linear(self.h, gate_up, GEGLU)
            after()
            projected = linear(gated, down)
            after()
            squared = linear(projected, square)
            after()
            self.h.copy_(functional.rms_norm(squared, squared.shape[1:]))
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
        wide = linear(x, weight, FP32)
        assert error(wide, x, weight, False) < 3e-5
        assert error(wide.bfloat16(), x, weight, False) > 3e-4
