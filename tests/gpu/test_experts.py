"""Router and experts of the 26B-A4B's shapes on a GPU: against fp32, in graphs, on one rank and in quarters."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.experts import experts
from kernels.launch import on_second_stream
from kernels.packed import PackedMatrix, fp8_matrix, unpacked
from kernels.route import route, router_logits, router_parts
from tests.nano.model_shapes import PUBLIC

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPE = PUBLIC["26b-a4b"]
TOLERANCE = 2**-7  # bf16, relative to the largest output: gated activations, each assignment's y, and their sum are rounded
ROWS = [1, 3, 8, 9, 24, 100, 256, 1024]


@dataclass(frozen=True)
class Layer:
    """One layer's experts, and tokens that chose some of them."""

    gate_up: Tensor
    down: Tensor
    x: Tensor
    dense: Tensor
    weights: Tensor
    chosen: Tensor

    def run(self) -> Tensor:
        return experts(self.x, self.weights, self.chosen, self.gate_up, self.down, lambda: self.dense)

    def want(self) -> Tensor:
        """y in fp32."""
        total = torch.zeros(self.x.shape, device=DEVICE)
        for expert in range(SHAPE.experts):
            tokens, places = torch.where(self.chosen == expert)
            gate, up = (self.x[tokens].float() @ self.gate_up[expert].float().t()).chunk(2, dim=-1)
            y = (functional.gelu(gate, approximate="tanh") * up) @ self.down[expert].float().t()
            total.index_add_(0, tokens, y * self.weights[tokens, places, None])
        return total


@pytest.fixture(scope="module", params=[1, 4])
def tensors(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """gate_up and down of one rank."""
    n, m = SHAPE.hidden, SHAPE.moe_mlp // request.param
    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = False
    gate_up = torch.empty(SHAPE.experts, 2 * m, n, dtype=torch.bfloat16, device=DEVICE).normal_(std=n**-0.5)
    return gate_up, torch.empty(SHAPE.experts, n, m, dtype=torch.bfloat16, device=DEVICE).normal_(std=m**-0.5)


def layer(tensors: tuple[Tensor, Tensor], rows: int) -> Layer:
    torch.manual_seed(rows)
    x, dense = torch.randn(2, rows, SHAPE.hidden, device=DEVICE).bfloat16().unbind()
    logits = torch.randn(rows, SHAPE.experts, device=DEVICE)
    return Layer(*tensors, x, dense, *route(logits, torch.ones(SHAPE.experts, device=DEVICE), SHAPE.top_k))


@pytest.mark.parametrize("rows", ROWS)
def test_experts(tensors: tuple[Tensor, Tensor], rows: int) -> None:
    """The formula in fp32, with the other branch's part before it. Experts in another order are not. A row's bits do not depend on
    the rows beside it, whatever these choose."""
    it = layer(tensors, rows)
    dense, y = it.run().chunk(2, dim=-1)
    want = it.want()
    off = lambda found: float((found.float() - want).abs().max() / want.abs().max())  # noqa: E731
    assert torch.equal(dense, it.dense)
    assert off(y) < TOLERANCE
    it.chosen[:-1] = 5
    assert rows == 1 or torch.equal(it.run()[-1, SHAPE.hidden :], y[-1])
    it.chosen[-1] = it.chosen[-1].roll(1)
    assert off(it.run()[:, SHAPE.hidden :]) > 10 * TOLERANCE


@pytest.mark.parametrize("rows", [1, 8, 100])
def test_fp8_experts(tensors: tuple[Tensor, Tensor], rows: int) -> None:
    """The formula of the rounded weights, to the roundings of packed rows. Planted: doubled scales."""
    gate_up, down = (fp8_matrix(each) for each in tensors)
    assert gate_up.scale is not None
    it = layer((unpacked(gate_up), unpacked(down)), rows)
    want = it.want()

    def off(gate_up: PackedMatrix) -> float:
        y = experts(it.x, it.weights, it.chosen, gate_up, down, lambda: it.dense)[:, SHAPE.hidden :]
        return float((y.float() - want).abs().max() / want.abs().max())

    tolerance = 2**-4  # elements of both rows are rounded by up to so much
    assert off(gate_up) < tolerance
    assert off(gate_up._replace(scale=2 * gate_up.scale)) > 4 * tolerance


@pytest.mark.parametrize("rows", ROWS)
def test_router(rows: int) -> None:
    """Logits to fp32's last digits, and the choice that torch makes of them; with a bf16 router neither."""
    torch.manual_seed(rows)
    torch.backends.cuda.matmul.allow_tf32 = False
    n = SHAPE.hidden
    h = (3 * torch.randn(rows, n, device=DEVICE)).bfloat16()
    proj, scale, each = (torch.randn(*shape, device=DEVICE) for shape in ((SHAPE.experts, n), (n,), (SHAPE.experts,)))
    logits, _ = router_logits(h, router_parts(proj, scale), torch.ones(n, dtype=torch.bfloat16, device=DEVICE), 1e-6)
    z = h.double() / (h.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale * n**-0.5
    want = z @ proj.double().t()
    assert (logits - want).abs().max() < 1e-5
    assert (z.bfloat16().double() @ proj.bfloat16().double().t() - want).abs().max() > 1e-3
    weights, chosen = route(logits, each, SHAPE.top_k)
    best = logits.topk(SHAPE.top_k, dim=-1)
    assert torch.equal(chosen.long(), best.indices)
    assert torch.allclose(weights, best.values.softmax(-1) * each[best.indices], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 8, 24, 256])
def test_in_a_graph(tensors: tuple[Tensor, Tensor], rows: int) -> None:
    """Twenty layers in one graph, launches overlapping and the other branch on another stream, give the bits of an idle device at
    every replay; other tokens others."""
    it = layer(tensors, rows)
    torch.manual_seed(1)
    proj, ones = torch.randn(SHAPE.experts, SHAPE.hidden, device=DEVICE), torch.ones(SHAPE.hidden, device=DEVICE)
    parts = router_parts(proj, ones)
    h, out = torch.empty_like(it.x), torch.empty(rows, 2 * SHAPE.hidden, dtype=torch.bfloat16, device=DEVICE)

    def chain(idle: bool) -> None:
        h.copy_(it.x)
        for _ in range(20):
            dense = on_second_stream(partial(torch.mul, h, 2), h)
            logits, x = router_logits(h, parts, ones.bfloat16(), 1e-6)
            weights, chosen = route(logits, ones[: SHAPE.experts], SHAPE.top_k)
            out.copy_(experts(x, weights, chosen, it.gate_up, it.down, dense))
            h.copy_(functional.rms_norm((out[:, : SHAPE.hidden] + out[:, SHAPE.hidden :]), (SHAPE.hidden,)))
            if idle:
                torch.cuda.synchronize()

    chain(True)
    want = out.clone()
    assert want.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(False)
    for _ in range(5):
        out.zero_()
        graph.replay()
        assert torch.equal(out, want)
    it.x.mul_(-1)
    graph.replay()
    assert not torch.equal(out, want)
