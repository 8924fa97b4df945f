"""A row's best logits are replaced by those of the plain table, the others stay."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.launch import plain_torch
from kernels.recheck import COUNT, block_of, recheck
from tests.support import interpreter

pytestmark = pytest.mark.cpu

TOLERANCE = 1e-5  # of fp32 logits near 1: another order of sums
SHAPES = ((3, 25607, 40), (33, 130, 2100))  # rows, ids, hidden
DTYPES = (torch.float32, torch.bfloat16)


def drawn(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exact logits, those of an e4m3 product's error, x, and the table."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    table = (torch.randn(n, k, generator=generator) * k**-0.5).to(dtype)
    table[40:90] = table[40]  # equal logits, as of ids that were never trained
    exact = x.float() @ table.float().T
    return exact, exact + 0.04 * torch.randn(rows, n, generator=generator), x, table


def wrong(found: Tensor, exact: Tensor, near: Tensor) -> float:
    """Largest error among each row's best; infinity if another one changed."""
    n = near.shape[1]
    count = min(COUNT, -(-n // block_of(n)))
    best = near.topk(count).indices
    changed = found != near
    if (changed & ((found - exact).abs() > TOLERANCE)).any() or (changed.sum(1) > max(4 * count, 128)).any():
        return torch.inf
    return (found - exact).gather(1, best).abs().max().item()


def check(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    exact, near, x, table = drawn(rows, n, k, dtype)
    found = near.clone()
    recheck(found, x, table)
    assert wrong(found, exact, near) < TOLERANCE
    assert wrong(near, exact, near) > 100 * TOLERANCE, "left out"
    faults: list[Callable[[], Tensor]] = [
        lambda: torch.where(found != near, found.roll(1, 1), near),
        lambda: found.roll(1, 0),
    ]
    assert all(wrong(fault(), exact, near) > 100 * TOLERANCE for fault in faults)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_the_best_are_exact(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """The reference: a row's best logits are the table's. Faults are seen: left out, at the neighbour's id, of another row."""
    check(rows, n, k, dtype)


def test_a_row_of_nan_stays() -> None:
    exact, near, x, table = drawn(*SHAPES[0], torch.float32)
    near[1] = torch.nan
    found = near.clone()
    recheck(found, x, table)
    assert found[1].isnan().all()
    assert wrong(found[[0, 2]], exact[[0, 2]], near[[0, 2]]) < TOLERANCE


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def interpreted_the_best_are_exact(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """The kernels likewise; where no logits are equal they change the ids that the reference changes."""
    check(rows, n, k, dtype)
    _, near, x, table = drawn(rows, n, k, dtype)
    found = near.clone()
    recheck(found, x, table)
    expected = near.clone()
    with plain_torch():
        recheck(expected, x, table)
    assert torch.equal(found != near, expected != near)
    assert (found - expected).abs().max() < TOLERANCE


def interpreted_a_row_of_equal_logits() -> None:
    """Only the first COUNT blocks are read."""
    exact, near, x, table = drawn(*SHAPES[0], torch.float32)
    equal = torch.full_like(near, 9.0)
    recheck(equal, x, table)
    end = COUNT * block_of(near.shape[1])
    assert (equal[:, end:] == 9.0).all()
    assert (equal - exact)[:, :end].abs().max() < TOLERANCE
