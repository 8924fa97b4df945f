"""RMSNorm and the residual fused norm, against fp64 and against transformers' order of casts."""

import pytest
import torch
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from kernels.norm import norm_add, rms_norm
from tests.support.dtypes import both_dtypes

pytestmark = pytest.mark.cpu

EPS = 1e-6


@pytest.fixture(autouse=True)
def draws() -> None:
    """The same in every process: of all that can be drawn some scales are near one, and some fp32 rows are rounded thrice."""
    torch.manual_seed(0)


@both_dtypes
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(dtype: torch.dtype, weighted: bool) -> None:
    """Equal to transformers bit for bit, and to the formula in fp64 within a rounding; 1 + w is not."""
    x, weight = (torch.randn(7, 3, 96) * 3).to(dtype), torch.randn(96).to(dtype)
    theirs = Gemma4RMSNorm(96, EPS, with_scale=weighted)
    if weighted:
        theirs.weight.data = weight
    ours = rms_norm(x, weight if weighted else None, EPS)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs(x).detach())
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() if weighted else 1.0)
    assert torch.allclose(ours.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert not torch.allclose(rms_norm(x, weight + 1, EPS).double(), exact, rtol=0.1)


def test_wide_output() -> None:
    """Asked for fp32, the norm of bf16 is not rounded."""
    x = torch.randn(5, 96).bfloat16()
    wide = rms_norm(x, None, EPS, torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, rms_norm(x.float(), None, EPS))
    assert not torch.equal(wide, wide.bfloat16().float())


@both_dtypes
def test_norm_add(dtype: torch.dtype) -> None:
    """The norm is rounded, then added, rounded, then scaled: as transformers does, bit for bit."""
    residual, x, weight, scalar = (torch.randn(shape).to(dtype) for shape in ((5, 96), (5, 96), (96,), (1,)))
    theirs = (residual + rms_norm(x, weight, EPS)) * scalar
    assert torch.equal(norm_add(residual, x, weight, EPS, scalar), theirs)
    assert torch.equal(norm_add(residual, x, weight, EPS), residual + rms_norm(x, weight, EPS))
    assert not torch.allclose(norm_add(residual, x, weight, EPS), theirs)
