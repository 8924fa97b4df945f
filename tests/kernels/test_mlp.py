"""The gate, the router's choice, the experts and the vocabulary-parallel lookup."""

import pytest
import torch
from torch.nn import functional

from kernels.activation import geglu, gelu_mul
from kernels.embed import embed
from kernels.experts import experts
from kernels.route import route

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_geglu(dtype: torch.dtype) -> None:
    """The tanh form of GELU on the first half, times the second, in one rounding; the erf form differs."""
    x = (torch.randn(5, 64) * 2).to(dtype)
    gate, up = x.double().chunk(2, -1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    want = gate / 2 * (1 + inner.tanh()) * up
    got = geglu(x)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(got, gelu_mul(*x.chunk(2, -1)))
    assert (functional.gelu(gate) * up - want).abs().max() > 10 * TOLERANCE
    assert not torch.allclose(geglu(x.roll(32, -1)).double(), want, rtol=0.1, atol=0.1)


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
    with pytest.raises(AssertionError, match="bfloat16"):
        route(logits.bfloat16(), scale, 4)


def test_experts() -> None:
    """Each token's weighted sum over its experts, token by token in fp64; experts that nobody chose are not touched."""
    x, gate_up, down = torch.randn(20, 24), torch.randn(6, 2 * 16, 24) / 5, torch.randn(6, 24, 16) / 4
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(20)])
    weights = torch.rand(20, 2)
    gate_up[5] = torch.nan
    want = torch.zeros(20, 24, dtype=torch.float64)
    for token in range(20):
        for place in range(2):
            e = int(chosen[token, place])
            g, u = (gate_up[e].double() @ x[token].double()).chunk(2)
            want[token] += weights[token, place] * (down[e].double() @ (functional.gelu(g, approximate="tanh") * u))
    assert (experts(x, weights, chosen, gate_up, down) - want).abs().max() < TOLERANCE
    assert (experts(x, weights, chosen.flip(1), gate_up, down) - want).abs().max() > 100 * TOLERANCE
    halves = [experts(x, weights, chosen, gate_up[:, rows], down[..., half]) for rows, half in _halves()]
    assert (halves[0] + halves[1] - want).abs().max() < TOLERANCE
    assert (halves[0] - want).abs().max() > 100 * TOLERANCE


def _halves() -> list[tuple[list[int], slice]]:
    """Rows of gate_up and columns of down that each of two ranks holds."""
    return [([*range(8 * r, 8 * r + 8), *range(16 + 8 * r, 24 + 8 * r)], slice(8 * r, 8 * r + 8)) for r in (0, 1)]


def test_embed() -> None:
    """The sum over shards is the whole table's lookup bit for bit, ids at both ends of a shard included; each id has one owner."""
    table = torch.randn(64, 12).bfloat16()
    ids = torch.tensor([0, 15, 16, 17, 31, 32, 63, 63, 5])
    parts = [embed(ids, shard, 16 * rank) for rank, shard in enumerate(table.chunk(4))]
    assert torch.equal(torch.stack(parts).sum(0), table[ids])
    assert torch.stack([part.any(-1) for part in parts]).sum(0).tolist() == [1] * len(ids)
    assert not torch.equal(torch.stack(parts[:3]).sum(0), table[ids])
