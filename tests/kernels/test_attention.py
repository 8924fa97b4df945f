"""Paged attention of chunks against dense attention in fp64, with NaN wherever nothing may be read."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import prefill
from kernels.chunks import extend_tiles
from kernels.prefill import extend_attention, paged_prefill, tile_tokens
from tests.support import interpreter
from tests.support.attention import E4M3, OUTSIDE, attended, in_pages, stored_as
from tests.support.guard_pages import guarded
from tests.support.launches import record

pytestmark = pytest.mark.cpu

PAGE, WINDOW = 32, 64
TOLERANCE = 2e-5  # fp32 against fp64, sums over a few hundred keys of unit size
FAULT = 100 * TOLERANCE
HEADS = [(8, 4, 32), (4, 1, 64), (6, 3, 24)]
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + PAGE // 2, 5 * WINDOW + 7]


@dataclass(frozen=True)
class Paged:
    """Sequences of the given lengths: dense K and V [length, kv_heads, d], and the same in shuffled pages amid NaN."""

    k: list[Tensor]
    v: list[Tensor]
    pool: Tensor
    table: Tensor


def paged(
    lengths: list[int],
    kv_heads: int,
    d: int,
    window: int | None,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
) -> Paged:
    """Only pages that a window behind the last position reads are kept; unused table entries point far outside the pool. stored:
    dtype of pages, None: `dtype`."""
    generator = torch.Generator().manual_seed(len(lengths) + d)
    drawn = [[torch.randn(length, kv_heads, d, generator=generator).to(dtype) for length in lengths] for _ in "kv"]
    sides = [[stored_as(x, stored) for x in side] for side in drawn]
    firsts = [0 if window is None else max(0, length - window) // PAGE for length in lengths]
    pool, ids = in_pages(list(zip(*sides, strict=True)), [PAGE * first for first in firsts], PAGE, generator)
    table = torch.full((len(lengths), -(-max(lengths) // PAGE) + 3), OUTSIDE, dtype=torch.int32)
    for slot, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        count = -(-length // PAGE)
        table[slot, :first], table[slot, first:count] = 0, ids[slot, : count - first]
    return Paged(*sides, pool.to(stored or dtype), table)


def dense(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None, spans: Sequence[tuple[int, int]] = ()) -> Tensor:
    """q [n, heads, d] at start .. start + n - 1 over k, v [length, kv_heads, d], in fp64; positions of a span see each other."""
    return attended(q, k, v, torch.arange(start, start + len(q)), window, spans)


def tiles_of(chunks: Sequence[tuple[int, int, int, int]], tokens: int) -> Tensor:
    """Tiles of up to `tokens` queries of chunks (slot, first row, first position, rows)."""
    return extend_tiles(torch.tensor(chunks, dtype=torch.int32), tokens, sum(chunk[3] for chunk in chunks))


@pytest.mark.parametrize("window", [None, WINDOW, WINDOW - 3, 1])
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill(monkeypatch: pytest.MonkeyPatch, length: int, window: int | None) -> None:
    """A last chunk of any size, in blocks of queries or not, equals dense attention; a window off by one does not."""
    heads, kv_heads, d = HEADS[0]
    for size in {1, min(33, length), length}:
        start = length - size
        it = paged([length], kv_heads, d, None if window is None else window + size - 1)
        q = torch.randn(size, heads, d) / d**0.5
        want = dense(q, it.k[0], it.v[0], start, window)
        for scores in (1 << 26, heads * length * 5):
            monkeypatch.setattr(prefill, "_SCORES", scores)
            got = paged_prefill(q, it.pool, it.table[0], start, window)
            assert (got - want).abs().max() < TOLERANCE, (size, scores)
        if window is not None and length > window:
            assert (got - dense(q, it.k[0], it.v[0], start, window + 1)).abs().max() > FAULT


@pytest.mark.parametrize("window", [None, WINDOW])
def test_extend(window: int | None) -> None:
    """Chunks of several sequences in tiles equal the same chunks one by one, rows of no tile are left, a tile too few is seen."""
    heads, kv_heads, d = HEADS[0]
    lengths, sizes = [100, 33, 200], [70, 33, 3]
    it = paged(lengths, kv_heads, d, None)
    chunks = [(0, 0, 30, 70), (1, 72, 0, 33), (2, 105, 197, 3)]
    q = torch.randn(110, heads, d) / d**0.5
    want = torch.full_like(q, 7.0)
    for slot, row, start, size in chunks:
        want[row : row + size] = dense(q[row : row + size], it.k[slot], it.v[slot], start, window)
    tiles = tiles_of(chunks, 16)
    assert tiles[:, 3].sum() == sum(sizes)
    assert tiles[:, 3].max() == 16
    for given, strays in ((tiles, False), (tiles[1:], True)):
        out = torch.full_like(q, 7.0)
        extend_attention(q, it.pool, it.table, given, window, out)
        assert ((out - want).abs().max() > FAULT) == strays
        assert strays or (out - want).abs().max() < TOLERANCE


def last_seen(spans: Sequence[tuple[int, int]], positions: Tensor) -> Tensor:
    """int32 [n], the last position that each of `positions` sees."""
    seen = positions.clone()
    for first, last in spans:
        seen[(first <= positions) & (positions < last)] = last - 1
    return seen.int()


# A chunk's first position and size, and its spans: at its ends, over pages, longer than a window, side by side, of one position
SPANS = [
    (0, 50, [(0, 20), (20, 50)]),
    (40, 70, [(41, 60), (62, 63), (64, 96), (97, 110)]),
    (7, 2 * WINDOW + 30, [(9, 9 + 2 * WINDOW + 5)]),
    (200, 40, []),
]


def spanned(window: int) -> float:
    """The largest difference between attention over chunks with SPANS and dense attention; the same with each span seen causally,
    one position shorter, or one longer, must be a hundred times larger, and so must be windows that end elsewhere."""
    it = paged([start + size + 1 for start, size, _ in SPANS], 2, 16, None)  # the last key is no chunk's
    chunks, rows = [], 0
    for slot, (start, size, _) in enumerate(SPANS):
        chunks.append((slot, rows, start, size))
        rows += size
    q = torch.randn(rows, 4, 16, generator=torch.Generator().manual_seed(1)) / 4
    tiles = tiles_of(chunks, 16)
    seen = torch.cat([last_seen(spans, torch.arange(start, start + size)) for start, size, spans in SPANS])
    out = torch.empty_like(q)
    extend_attention(q, it.pool, it.table, tiles, window, out, seen)

    def error(by: int, longer: int | None) -> float:
        found = []
        for slot, row, start, size in chunks:
            spans = [] if longer is None else [(first, last + longer) for first, last in SPANS[slot][2]]
            found.append(dense(q[row : row + size], it.k[slot], it.v[slot], start, by, spans))
        return (out - torch.cat(found)).abs().max().item()

    for by, longer in ((window, None), (window, -1), (window, 1), (window + 1, 0), (window - 1, 0)):
        assert error(by, longer) > FAULT, (by, longer)
    return error(window, 0)


@pytest.mark.parametrize("window", [WINDOW, WINDOW - 3])
def test_positions_of_an_image_see_each_other(window: int) -> None:
    """Within the window, whole spans, also one longer than it; a causal span, or one off by one, is seen."""
    assert spanned(window) < TOLERANCE


def interpreted_images() -> None:
    """As for the reference, in tiles that spans reach over."""
    assert spanned(WINDOW - 3) < TOLERANCE


def test_a_tile_fills_the_rows_of_a_product() -> None:
    """Queries times heads of a KV head are 128 rows."""
    assert [tile_tokens(8, kv_heads) for kv_heads in (8, 4, 1)] == [128, 64, 16]


def test_bfloat16_is_rounded_once() -> None:
    """bf16 inputs give the fp32 result of the same values, rounded."""
    it = paged([100], 4, 32, None, torch.bfloat16)
    q = (torch.randn(40, 8, 32) / 32**0.5).bfloat16()
    want = dense(q, it.k[0], it.v[0], 60, None)
    got = paged_prefill(q, it.pool, it.table[0], 60, None)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), want, rtol=2**-8, atol=1e-5)


def test_wrong_shapes_are_refused() -> None:
    """More positions than the table has entries for fail."""
    it = paged([100], 4, 32, None)
    q = torch.zeros(1, 8, 32)
    with pytest.raises(AssertionError):
        paged_prefill(q, it.pool, it.table[0], 7 * PAGE, None)


def test_under_the_interpreter() -> None:
    """The interpreted cases of this file hold."""
    interpreter.run(__file__)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "window"), [(4, 2, 16, None), (4, 2, 16, WINDOW - 3), (3, 1, 32, WINDOW), (3, 1, 32, 1)]
)
def interpreted_extend(heads: int, kv_heads: int, d: int, window: int | None) -> None:
    """All chunks in one launch equal dense attention at every length; a window off by one does not; rows of no tile are left."""
    starts = [0, 5, PAGE - 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 7]
    sizes = [WINDOW + 1, 1, PAGE, 2, PAGE + 1, 40, 9]
    lengths = [start + size for start, size in zip(starts, sizes, strict=True)]
    it = paged(lengths, kv_heads, d, None)
    chunks, rows = [], 2
    for slot, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        chunks.append((slot, rows, start, size))
        rows += size
    q = torch.randn(rows, heads, d) / d**0.5
    want, off = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    for slot, row, start, size in chunks:
        for answer, by in ((want, window), (off, (window or 1 << 20) + 1)):
            answer[row : row + size] = dense(q[row : row + size], it.k[slot], it.v[slot], start, by)
    out = torch.full_like(q, 7.0)
    with record() as nodes:
        extend_attention(q, it.pool, it.table, tiles_of(chunks, 16), window, out)
    assert [node.kernel for node in nodes].count("_tiles") == len(nodes) - 1
    assert (out - want).abs().max() < TOLERANCE
    if window is not None:
        assert (out - off).abs().max() > FAULT


FP16 = 1e-3  # of the softmax's weights and of q, which are fp16 where pages are e4m3; K is not scaled down here


@pytest.mark.parametrize("window", [None, WINDOW - 3])
def interpreted_e4m3_pages(window: int | None) -> None:
    """Chunks over pages of e4m3, whose numbers are exact in products; K and V exchanged are seen, and so is what pages round."""
    chunks, lengths = [(0, 0, 30, 70), (1, 70, 0, 33), (2, 103, 197, 3)], [100, 33, 200]
    q = torch.randn(106, 4, 32, generator=torch.Generator().manual_seed(1)) / 32**0.5
    held, plain = (paged(lengths, 2, 32, None, stored=stored) for stored in (E4M3, None))
    strays = []
    for pool, against in ((held.pool, held), (held.pool.flip(1), held), (held.pool, plain)):
        out = torch.empty_like(q)
        extend_attention(q, pool, held.table, tiles_of(chunks, 16), window, out)
        rows = [(out[row : row + size], q[row : row + size], slot, start) for slot, row, start, size in chunks]
        found = [(got - dense(asked, against.k[slot], against.v[slot], start, window)) for got, asked, slot, start in rows]
        strays.append(torch.cat(found).abs().max())
    assert strays[0] < FP16, strays
    assert min(strays[1:]) > 100 * FP16, strays


def interpreted_columns_of_v() -> None:
    """A CTA that has a half of V's columns writes that half."""
    prefill._VALUES = 16
    interpreted_extend(3, 1, 32, WINDOW)
    prefill._VALUES = 256


@pytest.mark.parametrize("window", [None, WINDOW])
def interpreted_padding_reads_no_page_ids(window: int | None) -> None:
    """Rows far below position 0 give zeros, and nothing in front of their slot's row of the table is read: it would be a fault."""
    q, out = torch.randn(16, 4, 16), torch.full((16, 4, 16), 7.0)
    table = guarded(torch.zeros((1, 8), dtype=torch.int32), front=True)
    extend_attention(q, paged([9], 2, 16, None).pool, table, tiles_of([(0, 0, -900, 16)], 16), window, out)
    assert (out == 0).all()


@pytest.mark.parametrize("size", [2, 5, 8])
def interpreted_short_chunks(size: int) -> None:
    """A few rows a sequence behind long prefixes."""
    lengths = [150, 33, 8]
    it = paged(lengths, 1, 16, None)
    chunks = [(slot, slot * size, length - size, size) for slot, length in enumerate(lengths)]
    q = torch.randn(3 * size, 4, 16) / 4
    out = torch.zeros_like(q)
    extend_attention(q, it.pool, it.table, tiles_of(chunks, size), WINDOW, out)
    for slot, row, start, _ in chunks:
        rows = slice(row, row + size)
        assert (out[rows] - dense(q[rows], it.k[slot], it.v[slot], start, WINDOW)).abs().max() < TOLERANCE


def interpreted_chunks_in_tiles() -> None:
    """As for the reference: a tile too few is seen."""
    test_extend(WINDOW)
