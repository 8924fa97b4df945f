"""Head norm, rotary embedding and the write into pages, against transformers' own functions."""

import pytest
import torch
from torch import Tensor

from kernels.norm import rms_norm
from kernels.qkv import inverse_frequencies, norm_rope, qkv_post
from tests.support import interpreter
from tests.support.attention import Shape, normed, turned, unrotated

pytestmark = pytest.mark.cpu

EPS = 1e-6


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' own; imported here, because the interpreter's process does without."""
    from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

    return apply_rotary_pos_emb(x, cos, sin)  # type: ignore[no-any-return]


def theirs(x: Tensor, weight: Tensor, positions: Tensor, theta: float, pairs: int) -> Tensor:
    """transformers' form: frequencies over the whole head, zero behind the rotated pairs."""
    d = x.shape[-1]
    frequencies = torch.zeros(d // 2)
    frequencies[:pairs] = 1.0 / theta ** (torch.arange(0, 2 * pairs, 2).float() / d)
    angles = positions[:, None].float() * frequencies
    both = torch.cat((angles, angles), -1)
    return rotated(rms_norm(x, weight, EPS), both.cos(), both.sin())


@pytest.mark.parametrize(("d", "theta", "pairs"), [(256, 1e4, 128), (512, 1e6, 64)], ids=["sliding", "full"])
def test_norm_rope(d: int, theta: float, pairs: int) -> None:
    """Equal to transformers' rotation in fp32; a shifted position is not; dims that do not rotate pass through."""
    positions = torch.tensor([0, 1, 31, 1000, 131071])
    x, weight = torch.randn(5, 3, d), torch.randn(d)
    frequencies = inverse_frequencies(theta, pairs, d)
    angles = positions[:, None].float() * frequencies
    ours = norm_rope(x, weight, angles.cos(), angles.sin(), EPS)
    assert torch.allclose(ours, theirs(x, weight, positions, theta, pairs), rtol=0, atol=1e-6)
    assert (ours - theirs(x, weight, positions + 1, theta, pairs)).abs().max() > 0.1
    normed = rms_norm(x, weight, EPS)
    assert torch.equal(ours[..., pairs : d // 2], normed[..., pairs : d // 2])
    assert torch.equal(ours[..., d // 2 + pairs :], normed[..., d // 2 + pairs :])
    assert torch.equal(ours[0], normed[0])
    assert torch.equal(inverse_frequencies(theta, pairs, d, 4.0), frequencies / 4.0)


def test_bfloat16_is_rounded_once() -> None:
    """In bf16 the result is the fp32 one, rounded; transformers' three roundings stray further."""
    positions = torch.arange(200)
    x, weight = torch.randn(200, 2, 256).bfloat16(), torch.randn(256).bfloat16()
    angles = positions[:, None].float() * inverse_frequencies(1e4, 128, 256)
    cos, sin = angles.cos(), angles.sin()
    exact = norm_rope(x.float(), weight.float(), cos, sin, EPS)
    ours = norm_rope(x, weight, cos, sin, EPS)
    both = (torch.cat((side, side), -1).bfloat16() for side in (cos, sin))
    rounded = rotated(rms_norm(x, weight, EPS), *both)
    assert torch.equal(ours, exact.bfloat16())
    assert (ours.float() - exact).pow(2).mean() < 0.5 * (rounded.float() - exact).pow(2).mean()


@pytest.mark.parametrize("kv_projections", [0, 1, 2])
def test_qkv_post(kv_projections: int) -> None:
    """From the raw product to q and to K and V in their pages; padding rows write zeros to q alone. One projection: v is k's raw,
    and q has k's weight where rope does not turn it."""
    heads, kv_heads, d, pairs = 4, 2, 16, 4
    table = torch.tensor([[5, 2, 0], [7, 8, 0]], dtype=torch.int32)
    slots = torch.tensor([0, 0, 1, 0, 1], dtype=torch.int32)
    positions = torch.tensor([31, 32, 5, -1, 63], dtype=torch.int32)
    qkv, cos_sin = torch.randn(5, (heads + kv_projections * kv_heads) * d), torch.randn(5, 2 * pairs)
    q_norm, k_norm = torch.randn(d), torch.randn(d)
    pool = torch.full((9, 2, kv_heads, 32, d), torch.nan)
    q = torch.full((5, heads, d), torch.nan)
    norms, fold = (q_norm, k_norm if kv_projections else None), kv_projections == 1
    qkv_post(qkv, pool, table, slots, positions, cos_sin, *norms, EPS, q, fold=fold)
    if fold:
        q_norm = torch.where(unrotated(Shape(heads, kv_heads, d, pairs)), q_norm * k_norm, q_norm)
    raw = qkv.view(5, -1, d)
    live = positions >= 0
    assert not q[~live].any()
    assert torch.allclose(q.double()[live], turned(normed(raw[:, :heads], q_norm), cos_sin)[live], rtol=0, atol=1e-5)
    places = {0: (5, 31), 1: (2, 0), 2: (7, 5), 4: (8, 31)} if kv_projections else {}
    for row, (page, offset) in places.items():
        k = turned(normed(raw[:, heads : heads + kv_heads], k_norm), cos_sin)[row]
        assert torch.allclose(pool[page, 0, :, offset].double(), k, rtol=0, atol=1e-5)
        v = normed(raw[row, -kv_heads:], None)
        assert torch.allclose(pool[page, 1, :, offset].double(), v, rtol=0, atol=1e-5)
        assert not torch.allclose(pool[page, 1, :, offset].double(), k, rtol=0, atol=1e-2)
    assert (~pool.isnan()).sum() == len(places) * 2 * kv_heads * d


def test_e4m3_saturates() -> None:
    """Of e4m3 pages K and V are the exact ones rounded once; beyond 448 they are 448, and NaN stays NaN. A K rounded to bf16 first
    is another one, as is one that does not saturate."""
    heads, kv_heads, d, pairs = 2, 1, 512, 4
    qkv, cos_sin, k_norm = torch.randn(3, (heads + 2 * kv_heads) * d), torch.randn(3, 2 * pairs), torch.full((d,), 60.0)
    qkv[1] = 0.0
    qkv[1, [heads * d, (heads + 1) * d]] = torch.tensor([-9.0, 7.0])  # norms of 22.6 times the weight
    qkv[2, heads * d] = torch.nan
    pool, q = torch.zeros((2, 2, kv_heads, 16, d), dtype=torch.float8_e4m3fn), torch.empty(3, heads, d)
    table, slots, positions = torch.ones((1, 1), dtype=torch.int32), *torch.tensor([[0, 0, 0], [0, 1, 2]], dtype=torch.int32)
    cos_sin[1] = torch.tensor([1.0] * pairs + [0.0] * pairs)
    qkv_post(qkv, pool, table, slots, positions, cos_sin, torch.ones(d), k_norm, EPS, q)
    held = pool[1].float()
    raw = qkv.view(3, -1, d)
    k, v = turned(normed(raw[:1, heads : heads + 1], k_norm), cos_sin[:1])[0, 0], normed(raw[0, -1], None)
    assert torch.equal(held[:, 0, 0], torch.stack([k.float(), v.float()]).to(torch.float8_e4m3fn).float())
    assert not torch.equal(held[:, 0, 0], torch.stack([k.bfloat16(), v.bfloat16()]).to(torch.float8_e4m3fn).float())
    assert held[:, 0, 1].aminmax() == (-448.0, 22.0), "V of 22.6 rounds to 22, K of -1357 saturates"
    assert held[0, 0, 2].isnan().all()
    assert not held[1, 0, 2].isnan().any()


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


interpreted_qkv_post = test_qkv_post
interpreted_e4m3_saturates = test_e4m3_saturates
