"""Sampling as a pure function: its distribution against brute force, its noise against plain integers, its edges."""

import math

import pytest
import torch
from torch import Tensor

from kernels.sample import cap, gumbel, hash32, keep, mask
from tests.support.engine.choose_reference import choose, choose_filtered

pytestmark = pytest.mark.cpu

VOCAB = 40
DRAWS = 40_000
COMBINATIONS = [
    # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.15),
    (0.9, 12, 0.9, 0.0),
    (1.0, 20, 0.95, 0.05),
    (1.5, 64, 0.5, 0.02),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-9, 0.0),
]


def logits_row(seed: int = 0) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def reference(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The distribution by the definition, one id after the other, in Python floats."""
    scaled = [value / temperature for value in logits.tolist()]
    order = sorted(range(len(scaled)), key=lambda index: (-scaled[index], index))
    if top_k:
        order = [index for index in order if scaled[index] >= scaled[order[min(top_k, len(order)) - 1]]]
    mass = sum(math.exp(scaled[index]) for index in order)
    kept = []
    for index in order:
        kept.append(index)
        if sum(math.exp(scaled[each]) for each in kept) / mass >= top_p:
            break
    kept = [index for index in kept if math.exp(scaled[index] - scaled[order[0]]) >= min_p]
    mass = sum(math.exp(scaled[index]) for index in kept)
    return [math.exp(value) / mass if index in kept else 0.0 for index, value in enumerate(scaled)]


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, draws: int = DRAWS) -> Tensor:
    """Counts of each id over `draws` positions of a few seeds."""
    rows = torch.arange(draws)
    chosen = choose_filtered(
        logits.expand(draws, -1),
        torch.full((draws,), temperature),
        rows % 7,
        rows // 7,
        torch.full((draws,), top_k),
        torch.full((draws,), top_p),
        torch.full((draws,), min_p),
    )
    return chosen.bincount(minlength=len(logits))


def chi_square(counts: Tensor, probabilities: list[float]) -> float:
    """Pearson's statistic over its bound at a probability of about 1e-7 (Wilson and Hilferty); above 1 is a failure."""
    pairs = [(count, p * int(counts.sum())) for count, p in zip(counts.tolist(), probabilities, strict=True)]
    if any(count and not expected for count, expected in pairs):
        return math.inf
    live = [(count, expected) for count, expected in pairs if expected]
    degrees = len(live) - 1
    statistic = sum((count - expected) ** 2 / expected for count, expected in live)
    if not degrees:
        return statistic
    return statistic / (degrees * (1 - 2 / (9 * degrees) + 5.2 * math.sqrt(2 / (9 * degrees))) ** 3)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_draws_follow_the_reference(combination: tuple[float, int, float, float]) -> None:
    """Forty thousand draws pass a chi-square test against the distribution computed by definition."""
    logits = logits_row()
    assert chi_square(draw(logits, *combination), reference(logits, *combination)) < 1


def test_faults_are_seen() -> None:
    """Without its filters the draws leave the support at once; temperature 1 for 0.7, and the same noise for every row, fail by
    far."""
    logits, plain = logits_row(), reference(logits_row(), 1.0, 0, 1.0, 0.0)
    assert chi_square(draw(logits, 1.0, 0, 1.0, 0.0), reference(logits, 1.0, 20, 0.95, 0.05)) == math.inf
    assert chi_square(draw(logits, 0.7, 0, 1.0, 0.0), plain) > 30
    same = torch.zeros(DRAWS, dtype=torch.int64)
    chosen = choose(logits.expand(DRAWS, -1), torch.ones(DRAWS), same, same)
    assert chi_square(chosen.bincount(minlength=VOCAB), plain) > 100


def plain_hash(seed: int, position: int, token: int) -> int:
    """`hash32` in Python's own integers."""
    low = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & low
        x = ((x ^ (x >> 15)) * 0x735A2D97) & low
        return x ^ (x >> 15)

    key = mix(seed & low)
    key = mix(key ^ (seed >> 32 & low) ^ 0x5BD1E995)
    key = mix(key ^ position ^ 0x27D4EB2F)
    return mix(mix((token + key) & low) ^ mix(key ^ 0x165667B1))


def test_hash_is_plain_integer_arithmetic() -> None:
    """The hash equals Python's unbounded integers: nothing wraps, so every device computes the same; another seed does not."""
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 123456789012345]
    positions = [0, 1, 5, 262_143, 7, 8, 99]
    ids = [0, 1, 2, 1000, 262_143]
    found = hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(ids))
    expected = [[plain_hash(seed, at, token) for token in ids] for seed, at in zip(seeds, positions, strict=True)]
    assert found.tolist() == expected
    assert hash32(torch.tensor(seeds) + 2**33, torch.tensor(positions), torch.tensor(ids)).tolist() != expected


def test_hash_is_uniform_and_its_neighbours_unrelated() -> None:
    """Each byte of the hash is uniform over seeds, positions and ids, alone and against its neighbours; a plain sum's are not."""
    grid = torch.arange(200)
    whole = hash32(grid.repeat_interleave(200), grid.repeat(200), torch.arange(64)).view(200, 200, 64)
    for shift in (0, 8, 16, 24):
        byte = whole >> shift & 255
        for sample in (byte, byte[1:] ^ byte[:-1], byte[:, 1:] ^ byte[:, :-1], byte[..., 1:] ^ byte[..., :-1]):
            assert chi_square(sample.flatten().bincount(minlength=256), [1 / 256] * 256) < 1
    plain = (grid[:, None, None] + grid[:, None] + torch.arange(64)) & 255
    assert chi_square((plain[1:] ^ plain[:-1]).flatten().bincount(minlength=256), [1 / 256] * 256) > 100


def test_noise_is_standard_gumbel() -> None:
    """Mean 0.5772, variance pi^2 / 6, finite everywhere, with a tail as heavy as a vocabulary of 262 144 needs."""
    noise = gumbel(torch.arange(64), torch.arange(64), torch.arange(20_000)).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.577216) < 0.006
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    assert 11 < noise.max() < 22  # of 1.28 million: ln n = 14


def test_filters_on_ties_and_edges() -> None:
    """top_k and top_p cut ties by position; the first is kept whatever is asked; off is off."""
    scaled = torch.tensor([[3.0, 2.0, 2.0, 1.0, -torch.inf]]).expand(5, -1)
    top_k = torch.tensor([2, 0, 1, 99, 0])
    top_p = torch.tensor([1.0, 1e-12, 1.0, 1.0, 0.7])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.99, 0.0])
    found = keep(scaled, top_k, top_p, min_p).tolist()
    assert found[0] == [True, True, False, False, False]
    assert found[1] == [True, False, False, False, False]
    assert found[2] == [True, False, False, False, False]
    assert found[3] == [True, False, False, False, False]
    assert found[4] == [True, True, False, False, False]  # 0.53 + 0.20 >= 0.7
    assert keep(scaled[:1], top_k[1:2], torch.ones(1), torch.zeros(1)).all()


def test_mask_hits_its_ids_and_no_others() -> None:
    """Forbidden ids become -inf where this slice holds them; -1, other slices' ids and repeats touch nothing else."""
    logits = torch.arange(10.0).repeat(3, 1)
    ids = torch.tensor([[-1, -1, -1], [20, 20, 25], [19, 30, 29]])
    masked = mask(logits, ids, first=20)
    expected = logits.clone()
    expected[1, [0, 5]] = -torch.inf
    expected[2, 9] = -torch.inf
    assert torch.equal(masked, expected)
    assert not torch.equal(mask(logits, ids, first=19), expected)
    assert torch.equal(mask(logits, ids[:, :0], first=20), logits)


def test_cap_is_tanh() -> None:
    """The cap bounds, keeps order and sign; none is the identity."""
    logits = torch.tensor([[-1e4, -30.0, 0.0, 1.0, 1e4]])
    assert torch.allclose(cap(logits, 30.0), 30 * torch.tanh(logits / 30))
    assert cap(logits, 30.0).abs().max() <= 30
    assert torch.equal(cap(logits, None), logits)
