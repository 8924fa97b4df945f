"""A decode step's attention of a layer, from the raw product to the output, against fp64, with NaN wherever nothing may be read.

The reference runs here; the Triton kernel in `interpreted_*`, under the interpreter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import paged_attention
from kernels.decode import DecodeScratch, DecodeTile, decode_attention, decode_splits
from tests.bench import attention as bench
from tests.bench import verify_cuts
from tests.support import interpreter
from tests.support.attention import E4M3, Case, Shape, decode_case, decode_node, unrotated
from tests.support.launches import record

pytestmark = pytest.mark.cpu

TOLERANCE = 2e-5  # fp32 against fp64, sums over a few hundred keys of unit size
FAULT = 100 * TOLERANCE
WINDOW = 64
LENGTHS = [1, 31, 32, 33, 0, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 16, 5 * WINDOW + 7]
SHAPES = [
    Shape(8, 4, 32, 16, window=WINDOW),
    Shape(8, 1, 64, 8, kv_projections=1),
    Shape(4, 4, 16, 8, kv_projections=0, window=WINDOW - 3),
    Shape(16, 1, 16, 4, window=1, page=16),
    Shape(6, 2, 32, 16, page=64),
]
NAMES = [f"{s.heads}/{s.kv_heads} d{s.d} kv_projections {s.kv_projections} window {s.window} page {s.page}" for s in SHAPES]


@dataclass
class Call:
    """One call of `decode_attention`: the output, the pool as it leaves it, and the scratch it used."""

    out: Tensor
    pool: Tensor
    scratch: DecodeScratch


def attend(
    case: Case, splits: int = 1, tile: DecodeTile | None = None, window: int | None = -1, scratch: DecodeScratch | None = None
) -> Call:
    """`window` in place of the case's own."""
    shape, rows = case.shape, case.qkv.shape[0]
    pool, out = case.pool.clone(), torch.full((rows, shape.heads * shape.d), torch.nan, dtype=case.qkv.dtype)
    scratch = scratch or DecodeScratch(rows, shape.heads, shape.kv_heads, shape.d, rows * splits, torch.device("cpu"))
    decode_attention(*case.inputs(pool), shape.window if window == -1 else window, scratch, out, splits, tile)
    return Call(out, pool, scratch)


def error(call: Call, case: Case) -> float:
    """The largest absolute one; NaN counts as infinite."""
    return float((call.out.double() - case.want).abs().nan_to_num(torch.inf).max())


def check(case: Case, call: Call, tolerance: float = TOLERANCE) -> None:
    """The output is dense attention's, padding rows are zero, the pool has gained each row's K and V and is else the same bits."""
    assert error(call, case) < tolerance
    assert (call.out[case.positions < 0] == 0).all()
    pool, given = call.pool.float(), case.pool.float()
    assert torch.allclose(pool, case.pool_after.float(), rtol=0, atol=tolerance, equal_nan=True)
    assert torch.equal(pool[~given.isnan()], given[~given.isnan()])
    assert not call.scratch.tickets.any()


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_equals_dense_attention(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """Every length, a padding row among them, equals dense attention, in blocks of rows or not; K and V of each are appended."""
    case = decode_case(shape, LENGTHS)
    check(case, attend(case))
    monkeypatch.setattr(paged_attention, "_GATHERED", 4 * shape.page * shape.kv_heads * shape.d)
    check(case, attend(case))


FAULTS: dict[str, Callable[[Case], Case]] = {
    "K as V": lambda case: replace(case, pool=case.pool.flip(1)),
    "a wrong page": lambda case: replace(case, page_ids=case.page_ids.index_fill(1, torch.tensor([0]), case.page_ids[-1, 1])),
    "a shifted position": lambda case: replace(case, positions=(case.positions - 1).clamp(min=-1)),
    "no rope": lambda case: replace(case, cos_sin=torch.tensor([1.0, 0.0]).repeat_interleave(16).repeat(len(case.cos_sin), 1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    """A planted fault strays by a hundred tolerances, where the case as it stands does not."""
    case = decode_case(SHAPES[0], LENGTHS)
    assert error(attend(case), case) < TOLERANCE
    assert error(attend(FAULTS[fault](case)), case) > FAULT


@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_e4m3_pages(shape: Shape) -> None:
    """Over pages of e4m3 it is attention over what they hold; over K and V that are not rounded it strays by 100 tolerances."""
    case = decode_case(shape, LENGTHS, stored=E4M3)
    check(case, attend(case))
    assert error(attend(decode_case(shape, LENGTHS)), case) > FAULT


@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_off_by_one_is_seen(by: int) -> None:
    """One key more or less in the window strays by a hundred tolerances."""
    case = decode_case(SHAPES[0], [WINDOW + 9, 2 * WINDOW + 22])
    assert error(attend(case, window=WINDOW + by), case) > FAULT


def test_splits_fill_the_gpu_and_no_more() -> None:
    """One row of a window of 1024 takes a page or two a split; many rows take one."""
    assert decode_splits(1, 2, 4, 256, 33, 132) == 33
    assert decode_splits(8, 8, 1, 512, 33, 132) == 8
    assert decode_splits(32, 2, 4, 256, 33, 132) == 2
    assert decode_splits(1, 8, 1, 256, 512, 132) == 32
    assert decode_splits(100, 2, 4, 256, 33, 132) == 3
    assert [decode_splits(rows, 8, 1, 256, 17, 132) for rows in (2, 4, 32)] == [17, 9, 6]
    assert [decode_splits(rows, 8, 2, 512, 258, 132) for rows in (16, 24, 32, 40, 100)] == [8, 5, 4, 3, 1]
    assert decode_splits(1, 8, 1, 512, 1, 132) == 1


def test_fewer_rows_take_their_buckets_cut() -> None:
    """A bucket's cut is what its full launch takes by itself; a launch of fewer rows can be told to take it too."""
    shape = bench.LAYERS[1].shape
    full, fewer = (decode_node(shape, rows, 16, (9, 0), pages=33, bucket=4) for rows in (4, 1))
    assert full.constexprs == fewer.constexprs
    assert decode_node(shape, 1, 16, (9, 0), pages=33).constexprs != full.constexprs


def test_wrong_sizes_are_refused() -> None:
    """Rows or splits beyond the scratch, and an output of other rows, fail."""
    case = decode_case(SHAPES[0], [3, 5])
    shape, device = SHAPES[0], torch.device("cpu")
    out = torch.zeros(2, shape.heads * shape.d)
    for rows, parts, result in ((1, 8, out), (2, 7, out), (2, 8, out[:1])):
        scratch = DecodeScratch(rows, shape.heads, shape.kv_heads, shape.d, parts, device)
        with pytest.raises(AssertionError):
            decode_attention(*case.inputs(), shape.window, scratch, result, 4)


@pytest.mark.parametrize("module", [bench, verify_cuts])
def test_the_bench_runs(module: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer goes through the bench's steps, a line each; a launch that strays from the reference is refused."""
    bench.main(module.LAYERS, ["--cpu"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [layer.name for layer in module.LAYERS]
    error = bench.error
    monkeypatch.setattr(bench, "error", lambda out, expected: error(1.02 * out, expected))
    with pytest.raises(AssertionError, match="relative error"):
        bench.main(module.LAYERS, ["--cpu"])


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


CUTS = [
    (Shape(4, 2, 32, 16, window=WINDOW), 3, None),
    (Shape(8, 1, 64, 8, kv_projections=1), 4, DecodeTile(32, 4, 8, 3, early=True)),
    (Shape(8, 1, 64, 16, kv_projections=1), 3, DecodeTile(32, 1, 4, 3, early=False, pairs=16)),
    (Shape(2, 2, 16, 8, kv_projections=0, window=WINDOW - 3), 1, None),
    (Shape(16, 1, 16, 4, window=1, page=16), 2, None),
    (Shape(3, 1, 32, 16, page=64), 5, DecodeTile(64, 2, 4, 3, early=False)),
    (Shape(2, 1, 16, 8, window=WINDOW, page=16), 2, DecodeTile(32, 1, 4, 3, early=True)),
    (Shape(5, 1, 16, 8, page=64, window=2 * WINDOW), 9, DecodeTile(16, 1, 4, 3, early=True)),
]


@pytest.mark.parametrize(("shape", "splits", "tile"), CUTS)
def interpreted_equals_dense_attention(shape: Shape, splits: int, tile: DecodeTile | None) -> None:
    """Page edges and window edges under every way to cut the work, in one launch; runs of half a page, a page and two pages."""
    case = decode_case(shape, [1, 32, 0, *([WINDOW - 1, WINDOW, WINDOW + 1] if shape.window else [shape.page + 1]), 170])
    with record() as nodes:
        call = attend(case, splits, tile)
    check(case, call)
    assert len(nodes) == 1


FP16 = 1e-3  # of the softmax's weights and of q, which are fp16 where pages are e4m3


@pytest.mark.parametrize(("shape", "splits", "tile"), [(*cut[:2], cut[2] and replace(cut[2], pairs=0)) for cut in CUTS])
def interpreted_e4m3_pages(shape: Shape, splits: int, tile: DecodeTile | None) -> None:
    """Every cut over pages of e4m3, whose numbers are exact in products; K and V exchanged are seen."""
    edges = [WINDOW - 1, WINDOW, WINDOW + 1] if shape.window else [shape.page + 1]
    case = decode_case(shape, [1, 32, 0, *edges, 170], stored=E4M3)
    check(case, attend(case, splits, tile), FP16)
    assert shape.window == 1 or error(attend(FAULTS["K as V"](case), splits, tile), case) > 100 * FP16, "it sees its own key alone"


def interpreted_keys_are_read_from_values() -> None:
    """Where rope does not turn K and V is its raw product, K is not read: it may be NaN. With another weight the output strays."""
    case = decode_case(Shape(8, 1, 64, 16, kv_projections=1), [170, 33, 0, 1])
    out = attend(case, 2).out
    case.pool[:, 0, ..., unrotated(case.shape)] = torch.nan
    assert torch.equal(attend(case, 2).out, out)
    assert case.k_norm is not None
    assert error(attend(replace(case, k_norm=1.1 * case.k_norm), 2), case) > FAULT


@pytest.mark.parametrize("group", [1, 3, 5, 8, 16])
def interpreted_group_sizes(group: int) -> None:
    """Query heads a KV head, up to 16; the parts of rows that a product of 16 rows pads are never written."""
    case = decode_case(Shape(group, 1, 16, 4), [40, 1])
    scratch = DecodeScratch(2, group, 1, 16, 4, torch.device("cpu"))
    scratch.parts = torch.full((4, group + 1, 16), 7.0)[:, :group].contiguous()
    check(case, attend(case, 2, scratch=scratch))


@pytest.mark.parametrize("splits", [1, 2, 5, 11, 16])
def interpreted_splits(splits: int) -> None:
    """Up to 16 splits of eleven pages, of three and of one."""
    case = decode_case(Shape(2, 1, 16, 8), [330, 70, 5])
    check(case, attend(case, splits))


def interpreted_bfloat16() -> None:
    """bf16 in and out strays by the rounding of q, of the softmax's weights and of the output."""
    case = decode_case(Shape(4, 2, 32, 16, window=WINDOW), [0, 33, 170], torch.bfloat16)
    check(case, attend(case, 2), 0.03)


def interpreted_scratch_is_left_as_it_was() -> None:
    """Launches may share a scratch, whatever the one before left in it."""
    shape = Shape(2, 1, 16, 8)
    scratch = DecodeScratch(2, 2, 1, 16, 8, torch.device("cpu"))
    scratch.parts.fill_(torch.nan)
    scratch.lse.fill_(torch.nan)
    for lengths in ([200, 40], [40, 200], [1, 0]):
        case = decode_case(shape, lengths)
        check(case, attend(case, 4, scratch=scratch))


def interpreted_a_row_does_not_depend_on_the_others() -> None:
    """The same bits for a row, whatever stands beside it in its bucket."""
    case = decode_case(Shape(4, 2, 32, 16, window=WINDOW), [170, 33, 90])
    whole = attend(case, 3).out
    alone = replace(case, positions=torch.tensor([169, -1, -1], dtype=torch.int32))
    assert torch.equal(attend(alone, 3).out[0], whole[0])


@pytest.mark.parametrize("fault", FAULTS)
def interpreted_a_fault_is_seen(fault: str) -> None:
    """As for the reference."""
    case = decode_case(Shape(2, 1, 32, 16, window=WINDOW), [33, 2 * WINDOW + 16])
    assert error(attend(case, 2), case) < TOLERANCE
    assert error(attend(FAULTS[fault](case), 2), case) > FAULT


interpreted_a_window_off_by_one_is_seen = test_a_window_off_by_one_is_seen
interpreted_wrong_sizes_are_refused = test_wrong_sizes_are_refused
