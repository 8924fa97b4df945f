"""The router's choice and the experts: the references, and every kernel of both in the interpreter."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import kernels.experts
from kernels.experts import choose, experts
from kernels.norm import rms_norm
from kernels.packed import PackedMatrix, fp8_matrix, unpacked
from kernels.route import route, router_logits, router_parts
from tests.support import interpreter
from tests.support.dtypes import both_dtypes
from tests.support.launches import record

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-5  # fp32, another order of sums
ROUNDED = 2**-7  # bf16, relative to the largest output: each assignment's gated activations and y, and the sum, are rounded
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """Tokens, who computes them with what weight, and experts of which the last is chosen by nobody."""

    x: Tensor
    weights: Tensor
    chosen: Tensor
    gate_up: Tensor
    down: Tensor
    dense: Tensor

    @property
    def want(self) -> Tensor:
        """Each token's weighted sum, token by token in fp64."""
        want = torch.zeros(self.x.shape, dtype=torch.float64)
        for token, (weights, chosen) in enumerate(zip(self.weights.double(), self.chosen.tolist(), strict=True)):
            for weight, e in zip(weights, chosen, strict=True):
                g, u = (self.gate_up[e].double() @ self.x[token].double()).chunk(2)
                want[token] += weight * (self.down[e].double() @ (functional.gelu(g, approximate="tanh") * u))
        return want

    def run(self) -> Tensor:
        """y; the dense MLP's rows must come out as they are."""
        out = experts(self.x, self.weights, self.chosen, self.gate_up, self.down, lambda: self.dense)
        dense, y = out.chunk(2, dim=-1)
        assert torch.equal(dense, self.dense)
        return y

    def error(self, y: Tensor) -> float:
        """Relative to the largest output; a NaN is infinite."""
        want = self.want
        return float(((y.double() - want).abs().max() / want.abs().max()).nan_to_num(torch.inf))

    def share(self, rank: int, size: int) -> "Case":
        """What a rank holds: its columns of each expert's width."""
        gate, up = self.gate_up.chunk(2, dim=1)
        rows, columns = (torch.cat([side.chunk(size, 1)[rank] for side in (gate, up)], 1), self.down.chunk(size, 2)[rank])
        return replace(self, gate_up=rows.contiguous(), down=columns.contiguous())


def case(tokens: int, dtype: torch.dtype = torch.float32, n: int = 24, m: int = 16, count: int = 6, top_k: int = 2) -> Case:
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.stack([torch.randperm(count - 1, generator=generator)[:top_k] for _ in range(tokens)]).int()
    gate_up = torch.randn(count, 2 * m, n, generator=generator) / n**0.5
    down = torch.randn(count, n, m, generator=generator) / m**0.5
    gate_up[-1] = torch.nan
    x, dense = torch.randn(2, tokens, n, generator=generator).to(dtype).unbind()
    weights = torch.rand(tokens, top_k, generator=generator)
    return Case(x, weights, chosen, gate_up.to(dtype), down.to(dtype), dense)


def scored(tokens: int, dtype: torch.dtype, n: int = 80, count: int = 18) -> tuple[Tensor, ...]:
    """h, proj, scale, the experts' norm, and what each expert is scaled with."""
    generator = torch.Generator().manual_seed(tokens)
    h = (3 * torch.randn(tokens, n, generator=generator)).to(dtype)
    proj, norms = torch.randn(count, n, generator=generator), 1 + 0.3 * torch.randn(2, n, generator=generator)
    return h, proj, norms[0], norms[1].to(dtype), 1 + 0.2 * torch.randn(count, generator=generator)


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


def test_route() -> None:
    """Softmax over all, the top k, renormalised, then scaled: written out for each row."""
    logits, scale = torch.randn(50, 16) * 2, 1 + 0.2 * torch.randn(16)
    weights, chosen = route(logits, scale, 4)
    for row, (w, e) in enumerate(zip(weights, chosen, strict=True)):
        best = sorted(range(16), key=lambda expert, row=row: -float(logits[row, expert]))[:4]
        assert e.tolist() == best
        p = logits[row, best].double().exp()
        assert torch.allclose(w.double(), p / p.sum() * scale[best], atol=TOLERANCE)
    unscaled, _ = route(logits, torch.ones(16), 4)
    assert torch.allclose(unscaled.sum(-1), torch.ones(50))
    assert (weights - unscaled).abs().max() > 100 * TOLERANCE


def test_router_logits() -> None:
    """The raw residual, normed without a weight, times scale and 1 / sqrt(n), in fp64; and the experts' input beside it."""
    h, proj, scale, norm, _ = scored(5, torch.float32)
    logits, x = router_logits(h, router_parts(proj, scale), norm, EPS)
    z = h.double() / (h.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt() * scale * 80**-0.5
    assert (logits - z @ proj.double().t()).abs().max() < TOLERANCE
    assert (logits - (z / scale) @ proj.double().t()).abs().max() > 100 * TOLERANCE
    assert torch.equal(x, rms_norm(h, norm, EPS))


def test_experts() -> None:
    """The reference is the formula, token by token in fp64; experts that nobody chose are not touched; ranks' shares add up."""
    it = case(20)
    assert it.error(it.run()) < TOLERANCE
    assert it.error(replace(it, chosen=it.chosen.flip(1)).run()) > 100 * TOLERANCE
    halves = [it.share(rank, 2).run() for rank in range(2)]
    assert it.error(halves[0] + halves[1]) < TOLERANCE
    assert it.error(halves[0]) > 100 * TOLERANCE


@pytest.mark.parametrize(("count", "top_k"), [(18, 3), (128, 8)])
def interpreted_route(count: int, top_k: int) -> None:
    """The reference's experts in its order, and its weights; equal logits: the lower expert. A NaN spoils a row's weights alone."""
    generator = torch.Generator().manual_seed(count)
    logits, scale = 2 * torch.randn(9, count, generator=generator), 1 + 0.2 * torch.randn(count, generator=generator)
    best = logits.topk(top_k, dim=-1).indices
    logits[1, 5] = torch.nan
    logits[2] = torch.nan
    logits[3] = 0.5
    weights, chosen = route(logits, scale, top_k)
    sound = [0, *range(4, 9)]
    assert torch.equal(chosen[sound].long(), best[sound])
    want = logits[sound].gather(1, best[sound]).softmax(-1) * scale[best[sound]]
    assert (weights[sound] - want).abs().max() < TOLERANCE
    assert (weights[sound] - logits[sound].gather(1, best[sound]).softmax(-1)).abs().max() > 100 * TOLERANCE
    assert chosen[3].tolist() == list(range(top_k))
    assert weights[1:3].isnan().all()
    assert bool(((chosen >= 0) & (chosen < count)).all())


@pytest.mark.parametrize("shared", [101376, 166912, 232448])
def test_tiles_fit(shared: int) -> None:
    """Both products take as many rows a tile, more where an expert has more, and what a block may have of shared memory."""
    pairs = [choose(assignments, 128, shared) for assignments in (8, 1024, 2048, 8192, 65536)]
    assert [up.rows for up, _ in pairs] == [down.rows for _, down in pairs] == [16, 16, 32, 64, 128]
    assert all(max(up.shared_bytes(True), down.shared_bytes(False)) < shared for up, down in pairs)
    assert not all(down.shared_bytes(True) < shared for _, down in pairs)


@both_dtypes
@pytest.mark.parametrize("tokens", [1, 3, 11, 40, 60, 200])
def interpreted_experts(tokens: int, dtype: torch.dtype) -> None:
    """Each tile's number of tokens, sizes that no tile divides: the formula. Other experts, other weights, or a lost column of the
    width are not; and an expert that nobody chose is not read."""
    tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
    it = case(tokens, dtype, n=72, m=44)
    with record() as nodes:
        found = it.run()
    rows = {40: 32, 60: 64, 200: 128}.get(tokens, 16)
    assert [node.constexprs["BM"] for node in nodes[-3:-1]] == [rows, rows]
    assert [node.kernel for node in nodes] == ["_group"] * (tokens > 1) + ["_grouped", "_grouped", "_combine"]
    assert it.error(found) < tolerance
    if tokens not in {1, 11, 200}:
        return
    assert it.error(replace(it, chosen=(it.chosen + 1) % 5).run()) > 100 * tolerance
    assert it.error(replace(it, weights=it.weights.roll(1, 1)).run()) > 10 * tolerance
    narrow = replace(it, gate_up=it.gate_up.unflatten(1, (2, 44))[:, :, :-1].flatten(1, 2), down=it.down[..., :-1].contiguous())
    assert it.error(narrow.run()) > 4 * tolerance


@pytest.mark.parametrize("tokens", [1, 11, 60])
def interpreted_fp8_experts(tokens: int) -> None:
    """Each kernel multiplies e4m3 weights by packed rows and scales sums. Scales of other channels or experts show."""
    it = case(tokens, n=72, m=44)
    gate_up, down = fp8_matrix(it.gate_up), fp8_matrix(it.down)
    exact = replace(it, gate_up=unpacked(gate_up), down=unpacked(down))

    def off(gate_up: PackedMatrix, down: PackedMatrix) -> float:
        with record() as nodes:
            y = experts(it.x, it.weights, it.chosen, gate_up, down, lambda: it.dense).chunk(2, dim=-1)[1]
        assert sum(node.kernel == "_scale_rows" for node in nodes) == 2
        return exact.error(y)

    tolerance = 2**-4  # elements of both rows are rounded by up to so much
    assert off(gate_up, down) < tolerance
    assert gate_up.scale is not None
    assert down.scale is not None
    for dimension in (0, 1):
        assert off(gate_up._replace(scale=gate_up.scale.nan_to_num(0.0015).roll(7, dimension)), down) > 2 * tolerance
        assert off(gate_up, down._replace(scale=down.scale.roll(7, dimension))) > 2 * tolerance


def interpreted_skew(monkeypatch: pytest.MonkeyPatch) -> None:
    """One expert with every token, more than a CTA takes at once, and assignments that one block does not hold; a row's bits do
    not depend on the rows beside it, nor but for roundings (numpy's, whose products depend on a row's place) on its place."""
    it = case(150, n=16, m=16, count=4, top_k=1)
    monkeypatch.setattr(kernels.experts, "_GROUP_BLOCK", 64)
    it = replace(it, chosen=torch.zeros_like(it.chosen))
    found = it.run()
    assert it.error(found) < TOLERANCE
    beside = replace(it, x=it.x.clone(), chosen=it.chosen.clone())
    beside.x[:-1] = torch.nan
    assert torch.equal(beside.run()[-1], found[-1])
    beside.chosen[1:-1] = 1
    torch.testing.assert_close(beside.run()[-1], found[-1])
