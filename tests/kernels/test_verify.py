"""Attention of rows of several queries against fp64, with NaN wherever nothing may be read.

The reference runs here; the Triton kernel in `interpreted_*`, under the interpreter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.config import VERIFY_ROWS
from kernels.decode import DecodeScratch
from kernels.slots import gather_pages
from kernels.verify import MOST_QUERIES, VerifyTile, verify_attention, verify_cut, verify_cut_of
from tests.support import interpreter
from tests.support.attention import E4M3, Shape, attended, in_pages, stored_as, unrotated, verify_nodes
from tests.support.compiled import compile_node
from tests.support.launches import record

pytestmark = pytest.mark.cpu

TOLERANCE = 2e-5  # fp32 against fp64, sums over a few hundred keys of unit size
FAULT = 100 * TOLERANCE
WINDOW, PAGE = 64, 32
# Keys before a row's first query.
EDGES = [0, 1, PAGE - 2, PAGE - 1, PAGE, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + PAGE - 2, 2 * WINDOW + 16]


@dataclass(frozen=True)
class VerifyCase:
    """Rows of `q_len` queries behind prefixes, and each row's keys and values, whole."""

    shape: Shape
    q: Tensor
    pool: Tensor
    page_ids: Tensor
    positions: Tensor
    dense: list[tuple[Tensor, Tensor]]

    def want(self, positions: Tensor, windows: Tensor | None = None) -> Tensor:
        """The answer for queries at `positions`, each with a window of its own where they are given."""
        answer = torch.zeros(self.q.shape, dtype=torch.float64)
        for i, position in enumerate(positions.tolist()):
            if position >= 0:
                window = self.shape.window if windows is None else int(windows[i])
                k, v = self.dense[i // (len(self.q) // len(self.dense))]
                answer[i : i + 1] = attended(self.q[i : i + 1], k, v, positions[i : i + 1], window)
        return answer


def verify_case(
    shape: Shape, q_len: int, rows: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None
) -> VerifyCase:
    """rows: keys before the first query, and how many queries there are; 0: a row of padding. stored: dtype of pages, None:
    `dtype`."""
    draw = torch.Generator().manual_seed(q_len)
    positions = torch.full((len(rows), q_len), -1, dtype=torch.int32)
    dense = []
    for row, (start, width) in enumerate(rows):
        positions[row, :width] = torch.arange(start, start + width)
        k, v = torch.randn((2, start + width if width else 0, shape.kv_heads, shape.d), generator=draw).to(dtype)
        dense.append((stored_as(k / shape.d**0.25, stored), stored_as(v, stored)))
    oldest = [max(0, start - shape.window + 1) if shape.window and width else 0 for start, width in rows]
    pool, page_ids = in_pages(dense, oldest, shape.page, draw)
    pool = pool.to(stored or dtype)
    q = torch.randn((len(rows) * q_len, shape.heads, shape.d), generator=draw).to(dtype) / shape.d**0.25
    return VerifyCase(shape, q, pool, page_ids, positions.flatten(), dense)


def attend(case: VerifyCase, splits: int = 1, tile: VerifyTile | None = None, positions: Tensor | None = None) -> Tensor:
    """`positions` in place of the case's own."""
    shape, rows, out = case.shape, len(case.page_ids), torch.full_like(case.q, torch.nan)
    scratch = DecodeScratch(rows, shape.heads, shape.kv_heads, shape.d, len(case.q) * splits, torch.device("cpu"))
    scratch.parts.fill_(torch.nan)
    positions = case.positions if positions is None else positions
    _, usual = verify_cut_of(case.pool, rows, len(case.q) // rows * shape.heads // shape.kv_heads, case.page_ids.shape[1])
    verify_attention(case.q, case.pool, case.page_ids, positions, shape.window, scratch, out, splits, tile or usual)
    assert not scratch.tickets.any()
    return out


def error(out: Tensor, want: Tensor) -> float:
    """The largest absolute one; NaN counts as infinite."""
    return float((out.double() - want).abs().nan_to_num(torch.inf).max())


def check(case: VerifyCase, splits: int = 1, tile: VerifyTile | None = None, tolerance: float = TOLERANCE) -> None:
    """Every query's output is dense attention's, and padding's is zero."""
    assert error(attend(case, splits, tile), case.want(case.positions)) < tolerance


SLIDING, FULL = Shape(4, 2, 32, 16, window=WINDOW), Shape(6, 1, 16, 8)


@pytest.mark.parametrize("shape", [SLIDING, FULL, Shape(4, 4, 16, 8, window=1, page=16)])
@pytest.mark.parametrize("q_len", [1, 3, 9])
def test_equals_dense_attention(shape: Shape, q_len: int) -> None:
    """At every page edge and window edge, with fewer queries than a row may have, and for rows of padding."""
    check(verify_case(shape, q_len, [(start, 1 + (row + 4) % q_len) for row, start in enumerate(EDGES)] + [(5, 0)]))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_fault_is_seen(splits: int) -> None:
    """Every query has its own last key and its own window: what queries would give that all see the last position, or that have the
    first one's window, is not what comes out."""
    case = verify_case(SLIDING, 4, [(3, 4), (WINDOW - 1, 4), (2 * WINDOW + 16, 4)])
    out, rows = attend(case, splits), case.positions.view(3, 4)
    assert error(out, case.want(case.positions)) < TOLERANCE
    assert error(out, case.want(rows[:, 3:].expand(3, 4).flatten())) > FAULT
    wider = WINDOW + (rows - rows[:, :1]).flatten()
    assert error(out[4:], case.want(case.positions, wider)[4:]) > FAULT
    assert error(attend(case, splits, positions=case.positions - 1), case.want(case.positions)) > FAULT


def test_wrong_sizes_are_refused() -> None:
    """Queries that no rows make up, too many, and a scratch that is too small fail."""
    case = verify_case(FULL, 4, [(3, 4), (5, 2)])
    pool, pages, out = case.pool, case.page_ids, torch.empty_like(case.q)
    scratch = DecodeScratch(2, 6, 1, 16, 8, torch.device("cpu"))
    for q, positions in ((case.q[:7], case.positions[:7]), (case.q, case.positions[:4]), (case.q.repeat(3, 1, 1), case.positions)):
        with pytest.raises(AssertionError):
            verify_attention(q, pool, pages, positions, None, scratch, out, 1, VerifyTile(32, 16, 1, 4, 2))
    with pytest.raises(AssertionError, match="do not fit"):
        verify_cut(1, 1, VERIFY_ROWS, 512, 32, 9, 132, 2, 101376)
    assert verify_cut(8, 1, 64, 512, 32, 9, 132, 2, 101376, 64)[1].shared_bytes(512) <= 101376
    assert verify_cut(8, 1, 72, 512, 32, 9, 132, 4, 232448)[1].shared_bytes(512, 4) <= 232448  # eight drafts of the E2B in fp32
    with pytest.raises(AssertionError, match=str(VERIFY_ROWS + 1)):
        verify_cut(1, 1, VERIFY_ROWS + 1, 512, 32, 9, 132, 2, 232448)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_pages_are_gathered_once_a_sequence(window: int | None) -> None:
    """From the first page that the first row sees to the last row's own; entries behind are left, and all of a row of padding."""
    table, slots = torch.arange(60, dtype=torch.int32).view(3, 20), torch.tensor([2, 0, 1], dtype=torch.int32)
    rows = [(PAGE * 4 - 2, 4), (WINDOW - 1, 3), (-1, 0)]
    positions = torch.full((3, 4), -1, dtype=torch.int32)
    out = torch.full((3, 6), -7, dtype=torch.int32)
    for row, (start, width) in enumerate(rows):
        positions[row, :width] = torch.arange(start, start + width)
    gather_pages(table, slots.repeat_interleave(4), positions.flatten(), PAGE, window, out)
    for row, (start, width) in enumerate(rows):
        first = 0 if window is None else max(0, start - window + 1) // PAGE
        want = [20 * int(slots[row]) + entry for entry in range(first, (start + width - 1) // PAGE + 1)] if width else []
        assert out[row].tolist() == want + [-7] * (6 - len(want))


# Heads and KV heads of the members at TP 1, 2 and 4, sliding and full: 31B, 26B, 12B, E4B, E2B.
_SLIDING = [(32, 16), (16, 8), (8, 4), (4, 2), (8, 2), (4, 1), (2, 1), (8, 1)]
_FULL = [(32, 4), (16, 2), (8, 1), (4, 1), (16, 1), (8, 2), (2, 1)]
MEMBERS = [Shape(*heads, 256, 128, window=1024) for heads in _SLIDING] + [Shape(*heads, 512, 64) for heads in _FULL]


def test_the_largest_cuts_compile() -> None:
    """Rows of as many queries as there may be, on the GPU that has run the rest, within shared memory and nearly without spills."""
    target, shared, done = (9, 0), 232448, set[tuple[VerifyTile, int]]()
    for shape in MEMBERS:
        for queries, pairs in ((MOST_QUERIES, 0), *((queries, 64) for queries in (2, 4, 8) if shape.d == 512)):
            lanes = shape.heads // shape.kv_heads * queries
            if lanes > VERIFY_ROWS:
                continue
            _, tile = verify_cut(32, shape.kv_heads, lanes, shape.d, shape.page, 40, 132, 2, shared, pairs)
            if (tile, shape.d) in done:
                continue
            done.add((tile, shape.d))
            kernel = compile_node(verify_nodes(shape, queries, target, 32, tile)[0], target)
            what = (tile, shape, kernel.registers, kernel.shared, kernel.stack)
            assert kernel.stack <= 56, what
            assert kernel.shared <= tile.shared_bytes(shape.d) <= shared, what


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


CUTS = [
    (SLIDING, 1, 1, None),
    (SLIDING, 4, 2, None),
    (SLIDING, 8, 3, VerifyTile(16, 32, 2, 4, 2)),
    (FULL, 5, 2, VerifyTile(32, 16, 1, 4, 2)),
    (Shape(16, 1, 16, 8), 8, 2, VerifyTile(128, 32, 1, 4, 2)),
    (Shape(8, 1, 16, 8), 9, 2, VerifyTile(128, 32, 1, 4, 2)),
    (Shape(3, 1, 16, 8, page=64, window=WINDOW), 3, 2, VerifyTile(16, 16, 1, 4, 2)),
]


@pytest.mark.parametrize(("shape", "q_len", "splits", "tile"), CUTS)
def interpreted_equals_dense_attention(shape: Shape, q_len: int, splits: int, tile: VerifyTile | None) -> None:
    """Page edges and window edges under every way to cut the work, in one launch."""
    starts = [0, PAGE - 1, WINDOW - 1, WINDOW + 1, WINDOW + PAGE - 2, 170]
    case = verify_case(shape, q_len, [(start, q_len - row % q_len) for row, start in enumerate(starts)] + [(9, 0)])
    with record() as nodes:
        check(case, splits, tile)
    adds = tile is not None and tile.values > 1  # else the last CTA does
    assert [node.kernel for node in nodes] == ["verify_kernel", "combine_kernel"][: 1 + adds]


def interpreted_keys_are_read_from_values() -> None:
    """Where rope does not turn K, it is V times a weight that q has: it is not read there, and may be NaN. Without the weight the
    output strays."""
    shape, tile = Shape(4, 2, 64, 16), VerifyTile(16, 32, 1, 4, 2, pairs=16)
    case = verify_case(shape, 3, [(PAGE - 1, 3), (0, 1), (100, 2)])
    rest = unrotated(shape)
    weight = torch.where(rest, torch.linspace(0.5, 1.5, shape.d), 1.0)
    want = replace(case, dense=[(torch.where(rest, v * weight, k), v) for k, v in case.dense]).want(case.positions)
    case.pool[:, 0, ..., rest] = torch.nan
    assert error(attend(replace(case, q=case.q * weight), 2, tile), want) < TOLERANCE
    assert error(attend(case, 2, tile), want) > FAULT


def interpreted_bfloat16() -> None:
    """bf16 in and out strays by the rounding of the softmax's weights and of the output."""
    check(verify_case(SLIDING, 4, [(0, 4), (33, 2), (170, 4)], torch.bfloat16), 2, tolerance=0.03)


FP16 = 1e-3  # of the softmax's weights and of q, which are fp16 where pages are e4m3


@pytest.mark.parametrize(("shape", "q_len", "splits", "tile"), CUTS)
def interpreted_e4m3_pages(shape: Shape, q_len: int, splits: int, tile: VerifyTile | None) -> None:
    """Every cut over pages of e4m3, whose numbers are exact in products; K and V exchanged are seen."""
    case = verify_case(shape, q_len, [(0, q_len), (WINDOW + 1, 1), (170, q_len), (9, 0)], stored=E4M3)
    check(case, splits, tile, tolerance=FP16)
    want = case.want(case.positions)
    assert error(attend(replace(case, pool=case.pool.flip(1)), splits, tile), want) > 100 * FP16


interpreted_a_fault_is_seen = test_a_fault_is_seen
interpreted_pages_are_gathered_once_a_sequence = test_pages_are_gathered_once_a_sequence
interpreted_wrong_sizes_are_refused = test_wrong_sizes_are_refused
