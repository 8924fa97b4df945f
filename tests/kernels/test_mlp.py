"""The gate, the vocabulary-parallel lookup and the per-layer embeddings."""

import pytest
import torch
from torch.nn import functional

from kernels.activation import geglu
from kernels.embed import embed
from tests.support.dtypes import both_dtypes

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-5


@both_dtypes
def test_geglu(dtype: torch.dtype) -> None:
    """The tanh form of GELU on the first half, times the second, in one rounding; the erf form differs."""
    x = (torch.randn(5, 64) * 2).to(dtype)
    gate, up = x.double().chunk(2, -1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    want = gate / 2 * (1 + inner.tanh()) * up
    got = geglu(x)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(got, geglu(*x.chunk(2, -1)))
    assert (functional.gelu(gate) * up - want).abs().max() > 10 * TOLERANCE
    assert not torch.allclose(geglu(x.roll(32, -1)).double(), want, rtol=0.1, atol=0.1)


def test_embed() -> None:
    """The sum over shards is the whole table's lookup bit for bit, ids at both ends of a shard included; each id has one owner."""
    table = torch.randn(64, 12).bfloat16()
    ids = torch.tensor([0, 15, 16, 17, 31, 32, 63, 63, 5])
    parts = [embed(ids, shard, 16 * rank, torch.zeros(0, dtype=torch.int32), 0) for rank, shard in enumerate(table.chunk(4))]
    assert torch.equal(torch.stack(parts).sum(0), table[ids])
    assert torch.stack([part.any(-1) for part in parts]).sum(0).tolist() == [1] * len(ids)
    assert not torch.equal(torch.stack(parts[:3]).sum(0), table[ids])
