"""A decode step's attention of a layer, from the raw product to the output, against fp64, with NaN wherever nothing may be read."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.decode import DecodeScratch, decode_attention, decode_splits, most_parts
from tests.support.attention import EPS, Case, Shape, decode_case

pytestmark = pytest.mark.cpu

TOLERANCE = 2e-5  # fp32 against fp64, sums over a few hundred keys of unit size
FAULT = 100 * TOLERANCE
WINDOW = 64
LENGTHS = [1, 31, 32, 33, 0, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 16, 5 * WINDOW + 7]
SHAPES = [
    Shape(8, 4, 32, 16, window=WINDOW),
    Shape(8, 1, 64, 8, sides=1),
    Shape(4, 4, 16, 8, sides=0, window=WINDOW - 3),
    Shape(16, 1, 16, 4, window=1, page=16),
    Shape(6, 2, 32, 16, page=64),
]
NAMES = [f"{s.heads}/{s.kv_heads} d{s.d} sides {s.sides} window {s.window} page {s.page}" for s in SHAPES]


def attend(case: Case, splits: int = 1, window: int | None = -1) -> tuple[Tensor, Tensor]:
    """The output and the pool as the call leaves it; `window` in place of the case's own."""
    shape, rows = case.shape, case.qkv.shape[0]
    pool, out = case.pool.clone(), torch.full((rows, shape.heads * shape.d), torch.nan, dtype=case.qkv.dtype)
    scratch = DecodeScratch(rows, shape.heads, shape.kv_heads, shape.d, rows * splits, torch.device("cpu"))
    given = (case.qkv, pool, case.page_ids, case.positions, case.cos_sin, case.q_norm, case.k_norm, EPS)
    decode_attention(*given, shape.window if window == -1 else window, scratch, out, splits)
    return out, pool


def error(out: Tensor, case: Case) -> float:
    """The largest absolute one; NaN counts as infinite."""
    return float((out.double() - case.want).abs().nan_to_num(torch.inf).max())


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_equals_dense_attention(shape: Shape) -> None:
    """Every length, a padding row among them: the output is dense attention's, the pool gains each row's K and V."""
    case = decode_case(shape, LENGTHS)
    out, pool = attend(case)
    assert error(out, case) < TOLERANCE
    assert (out[LENGTHS.index(0)] == 0).all()
    assert torch.allclose(pool, case.pool_after, rtol=0, atol=TOLERANCE, equal_nan=True)
    untouched = ~(pool.isnan() | case.pool.isnan())
    assert torch.equal(pool[untouched], case.pool[untouched])


FAULTS: dict[str, Callable[[Case], Case]] = {
    "K as V": lambda case: replace(case, pool=case.pool.flip(1)),
    "a wrong page": lambda case: replace(case, page_ids=case.page_ids.index_fill(1, torch.tensor([0]), 2)),
    "a shifted position": lambda case: replace(case, positions=(case.positions - 1).clamp(min=-1)),
    "no rope": lambda case: replace(case, cos_sin=torch.tensor([1.0, 0.0]).repeat_interleave(16).expand_as(case.cos_sin)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    """A planted fault strays by a hundred tolerances, where the case as it stands does not."""
    case = decode_case(SHAPES[0], LENGTHS)
    assert error(attend(case)[0], case) < TOLERANCE
    assert error(attend(FAULTS[fault](case))[0], case) > FAULT


@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one_is_seen(by: int) -> None:
    """One key more or less in the window strays by a hundred tolerances."""
    case = decode_case(SHAPES[0], [WINDOW + 9, 2 * WINDOW + 22])
    assert error(attend(case, window=WINDOW + by)[0], case) > FAULT


def test_splits_fill_the_gpu_and_no_more() -> None:
    """One row of a window of 1024 takes a page or two a split; many rows take one; the scratch covers every bucket."""
    assert decode_splits(1, 4, 33, 132) == 17
    assert decode_splits(1, 1, 33, 132) == 17
    assert decode_splits(100, 4, 33, 132) == 1
    assert decode_splits(1, 1, 1, 132) == 1
    buckets = (1, 2, 4, 8, 16, 24, 32, 256)
    most = most_parts(buckets, 4, 33, 132)
    assert most == 256
    assert all(rows * decode_splits(rows, 4, 33, 132) <= most for rows in buckets)


def test_wrong_sizes_are_refused() -> None:
    """Rows or splits beyond the scratch, and an output of other rows, fail."""
    case = decode_case(SHAPES[0], [3, 5])
    shape, device = SHAPES[0], torch.device("cpu")
    given = (case.qkv, case.pool, case.page_ids, case.positions, case.cos_sin, case.q_norm, case.k_norm, EPS, shape.window)
    out = torch.zeros(2, shape.heads * shape.d)
    for rows, parts, result in ((1, 8, out), (2, 7, out), (2, 8, out[:1]), (2, 8, out[:, 1:])):
        scratch = DecodeScratch(rows, shape.heads, shape.kv_heads, shape.d, parts, device)
        with pytest.raises(AssertionError):
            decode_attention(*given, scratch, result, 4)
