"""Attention of decode rows with several queries: a sequence's new token and its draft tokens.

The formula is that of `kernels.paged_attention`. A row is one sequence, whose queries share gathered pages and a CTA's products,
with a mask each. K and V are in the pages already (`kernels.qkv.qkv_post`). Grid, scratch and `PAIRS` are those of
`kernels.splitkv`; a second launch adds many parts. Positions and page ids are read, and the first run prefetched, before the wait
for `qkv_post`, which triggers after its own.
"""

from dataclasses import dataclass, replace
from functools import cache

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.decode import DecodeScratch
from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, processors, shared_memory, trigger, wait
from kernels.numerics import cast, dot, operand, prefetch, softmax_step
from kernels.paged_attention import attend_rows
from kernels.qkv import scales_of
from kernels.splitkv import add_splits, add_values, addresses, joined_values, load_run, page_of

MOST_QUERIES = 9
_MOST_ROWS = 128  # of a product: queries x heads of a KV head
_MOST_ADDED = constexpr(8)  # splits whose parts of 16 rows the last CTA adds


@dataclass(frozen=True)
class VerifyTile:
    rows: int  # of a product: queries x heads
    keys: int
    values: int
    warps: int
    stages: int
    pairs: int = 0  # q is folded (`kernels.qkv.qkv_post`)

    def shared_bytes(self, d: int, itemsize: int = 2) -> int:
        """Large products read one stage late, and hold one-byte numbers also in two."""
        late = self.rows >= 64
        held = itemsize * (self.stages - 1 + late) + 2 * (late and itemsize == 1)
        return 2 * self.rows * (d + 2 * self.pairs) + held * self.keys * ((2 * self.pairs or d) + d // self.values) + 4096


def verify_cut_of(pool: Tensor, rows: int, queries: int, pages: int, pairs: int = 0) -> tuple[int, VerifyTile]:
    kv_heads, page, d = pool.shape[2:]
    gpu = processors(pool.device), pool.element_size(), shared_memory(pool)
    return verify_cut(rows, kv_heads, queries, d, page, pages, *gpu, pairs)


@cache
def verify_cut(
    rows: int, kv_heads: int, queries: int, d: int, page: int, pages: int, processors: int, itemsize: int, shared: int,
    pairs: int = 0,
) -> tuple[int, VerifyTile]:  # fmt: skip
    """Splits and tile for a bucket of `rows` rows of at most `pages` pages; queries: those of a row x heads of a KV head.
    Fitted to an H200 (tests/bench/verify_cuts.py)."""
    # At most 64 sums a thread; V's columns are split where eight splits remain; one CTA a processor, or two of 16 rows.
    lanes = max(16, next_power_of_2(queries))
    assert lanes <= _MOST_ROWS, queries
    ctas = rows * kv_heads
    columns = max(1, lanes * d // 8192)
    on_each = 1
    if itemsize == 4:
        tile = VerifyTile(lanes, 16, 1, 4, 2, pairs)
    elif pairs and d > 256 and (lanes <= 32 or (lanes == 64 and 16 * ctas > processors and shared > 1 << 17)):
        on_each = 2 if lanes == 16 else 1
        warps, stages = (8, 2) if lanes == 64 else (4, 3)
        tile = VerifyTile(lanes, min(page, 32), 1, warps, stages, pairs)
    else:
        # Half as many parts of V in large batches of 32 rows of 512 or 64 of 256, and of the largest products, by eight warps.
        wide = lanes == _MOST_ROWS or (lanes * d == 16384 and 16 * ctas > processors)
        values = columns // 2 if wide else columns
        if lanes == 32 and d <= 256 and 2 * ctas <= processors:
            values = 2
        while not wide and lanes * d > 4096 and 16 * ctas * values <= processors and values < 4:
            values *= 2
        deep = not wide and processors < ctas * values <= 2 * processors  # two on each: room for one stage more
        tile = VerifyTile(lanes, min(page, 32), max(1, values), 8 if wide and lanes > 32 else 4, 4 if deep else 3)
        runs = pages * page // tile.keys // max(1, processors // (ctas * tile.values))
        if d <= 256 and lanes <= 32 and ctas * tile.values <= processors and runs >= 4:  # one on each: fewer, longer turns
            tile = replace(tile, keys=2 * tile.keys, warps=8 if lanes == 16 else 4)
    while tile.shared_bytes(d, max(2, itemsize)) > shared and tile.stages > 1:
        tile = replace(tile, keys=tile.keys // 2) if tile.stages == 2 and tile.keys > 16 else replace(tile, stages=tile.stages - 1)
    if itemsize == 1 and tile.rows < 64:
        tile = replace(tile, stages=2 * tile.stages - 1)
    assert tile.shared_bytes(d, itemsize) <= shared, f"{queries} queries of {d} do not fit in {shared} bytes: lower mtp.drafts"
    splits = min(pages if tile.rows * d > 4096 else cdiv(pages, 3), max(1, on_each * processors // (ctas * tile.values)))
    return cdiv(pages, cdiv(pages, splits)), tile


def verify_attention(
    q: Tensor,
    pool: Tensor,
    page_ids: Tensor,
    positions: Tensor,
    window: int | None,
    scratch: DecodeScratch,
    out: Tensor,
    splits: int,
    tile: VerifyTile,
    scales: Tensor | None = None,
) -> None:
    """Writes `out`, for `rows` rows of `q_len` queries each.

    q         [rows * q_len, heads, d], normed and roped, in `kernels.qkv.query_dtype`
    pool      as in `decode_attention`, with all queries' keys and values; scales too, and q has K's
    page_ids  int32 [rows, width], from `kernels.slots.gather_pages`
    positions int32 [rows * q_len]: rising within a row, then -1: padding, whose output is zero
    splits    CTAs along the keys;  tile: from `verify_cut`, perhaps for more rows
    """
    rows, (count, heads, d), (kv_heads, page) = len(page_ids), q.shape, pool.shape[2:4]
    q_len = count // rows
    assert count == rows * q_len == len(positions), (q.shape, page_ids.shape, positions.shape)
    assert 1 <= q_len <= MOST_QUERIES, q_len
    if not enabled(q):
        attend_rows(q, pool, page_ids, positions, window, out, scales)
        return
    assert rows <= scratch.max_rows, (rows, scratch.max_rows)
    assert count * splits <= scratch.max_parts, (count, splits, scratch.max_parts)
    check_contiguous(q, pool, page_ids, positions, out)
    last_adds = tile.rows * d <= 4096 and tile.values == 1 and 1 < splits <= _MOST_ADDED.value
    launch(
        verify_kernel, (rows, kv_heads * tile.values, splits),
        q, pool, page_ids, positions, scales, out, scratch.parts, scratch.lse, scratch.tickets, page_ids.shape[1], splits,
        HEADS=heads, KV_HEADS=kv_heads, D=d, PAIRS=tile.pairs, Q_LEN=q_len, WINDOW=window or 0, PAGE=page, ROWS=tile.rows,
        KEYS=tile.keys, VALUES=tile.values, LAST_ADDS=last_adds, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    if splits > 1 and not last_adds:
        launch(
            combine_kernel, (count, heads), positions, out, scratch.parts, scratch.lse, splits,
            D=d, Q_LEN=q_len, WINDOW=window or 0, PAGE=page, KEYS=tile.keys,
        )  # fmt: skip


@triton.jit(do_not_specialize=["width", "positions", "splits"])  # a mixed step's rows begin anywhere
def verify_kernel(
    q, pool, page_ids, positions, scales, out, parts, lse, tickets, width, splits,
    HEADS: constexpr, KV_HEADS: constexpr, D: constexpr, PAIRS: constexpr, Q_LEN: constexpr, WINDOW: constexpr, PAGE: constexpr,
    ROWS: constexpr, KEYS: constexpr, VALUES: constexpr, LAST_ADDS: constexpr, PDL: constexpr,
):  # fmt: skip
    GROUP: constexpr = HEADS // KV_HEADS
    LINES: constexpr = Q_LEN * HEADS  # of a row's output
    DV: constexpr = D // VALUES
    KEPT: constexpr = KV_HEADS * PAGE * D  # elements of a page's K, and of its V
    row = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) // VALUES
    part = tl.program_id(1) % VALUES
    lane = tl.arange(0, ROWS)
    query = lane // GROUP
    live = lane < GROUP * Q_LEN
    columns = part * DV + tl.arange(0, DV)
    heads_k = pool + head * PAGE * D
    heads_v = pool + KEPT + head * PAGE * D
    JOINED: constexpr = 2 if tl.float8e4nv == pool.dtype.element_ty else 1  # columns of V that are read as one number
    values_at = joined_values(heads_v)
    joined = part * (DV // JOINED) + tl.arange(0, DV // JOINED)
    ids = page_ids + row * width

    position = tl.load(positions + row * Q_LEN + query, live, -1)
    first, oldest, last = _keys_of(positions + row * Q_LEN, Q_LEN, WINDOW, PAGE)
    page = page_of(ids, split * KEYS, width, KEYS, PAGE)
    runs = (last - first) // KEYS + 1  # 1 for a row of padding, which sees no key of it
    if split < runs and PAIRS == 0:  # with PAIRS registers would spill
        own = part * DV + 64 * tl.arange(0, (DV + 63) // 64)
        prefetch(addresses(heads_k, page, split, own, D, 2 * KEPT, KEYS, PAGE))
        prefetch(addresses(heads_v, page, split, own, D, 2 * KEPT, KEYS, PAGE))
    wait(PDL)
    trigger(PDL)  # not before: products that start early would take the memory that this one waits for
    if split >= runs:
        return
    line = row * LINES + query * HEADS + head * GROUP + lane % GROUP
    q_at = q + line[:, None] * D
    read = tl.arange(0, 2 * PAIRS if PAIRS > 0 else D)
    if PAIRS > 0:  # the rotated dims; K's other dims are V's
        read += tl.where(read < PAIRS, 0, D // 2 - PAIRS)
        dims = tl.arange(0, D)
        of_values = tl.load(q_at + dims[None, :], live[:, None] & (dims % (D // 2) >= PAIRS)[None, :], 0.0)
    queries = tl.load(q_at + read[None, :], live[:, None], 0.0)
    row_max = tl.full([ROWS], -1e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV], tl.float32)
    if JOINED == 2:  # even and odd columns apart
        acc = acc.reshape(ROWS, DV // 2, 2).split()
    for run in tl.range(split, runs, splits):
        k = load_run(heads_k, page, run, first, oldest, last + 1, read, D, 2 * KEPT, KEYS, PAGE)
        v = load_run(values_at, page, run, first, oldest, last + 1, joined, D // JOINED, 2 * KEPT // JOINED, KEYS, PAGE)
        page = page_of(ids, (run + splits) * KEYS, width, KEYS, PAGE)  # one turn ahead
        keys = first + run * KEYS + tl.arange(0, KEYS)
        seen = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        scores = dot(queries, tl.trans(operand(k)))
        if PAIRS > 0:
            scores += dot(of_values, tl.trans(v))
        scores = tl.where(seen, scores, -float("inf"))
        row_max, weights, rescale, row_sum = softmax_step(scores, row_max, row_sum)
        acc = add_values(acc, rescale[:, None], weights, v)

    if JOINED == 2:
        acc = tl.interleave(acc[0], acc[1])
    norm = tl.where(row_sum > 0, row_sum, 1.0)
    acc = acc / norm[:, None] * scales_of(scales, head, KV_HEADS)[1]
    out_at = out + line[:, None] * D + columns[None, :]
    if splits == 1:
        tl.store(out_at, cast(acc, out.dtype.element_ty), live[:, None])
    else:
        at = row * (splits - 1) * LINES + line
        lse_at = lse + at
        parts_at = parts + at[:, None] * D + columns[None, :]
        tl.store(parts_at + split * LINES * D, acc, live[:, None])
        if part == 0:
            tl.store(lse_at + split * LINES, tl.where(row_sum > 0, row_max + tl.log2(norm), -1e30), live)
        if LAST_ADDS:
            ticket = tickets + row * KV_HEADS + head
            done = tl.minimum(runs, splits)
            add_splits(ticket, done, lse_at, parts_at, out_at, live, LINES, LINES * D, _MOST_ADDED)


@triton.jit
def _keys_of(positions, Q_LEN: constexpr, WINDOW: constexpr, PAGE: constexpr):
    """First key of the first page, oldest key seen, last key."""
    query = tl.arange(0, triton.next_power_of_2(Q_LEN))
    last = tl.max(tl.load(positions + query, query < Q_LEN, -1), 0)
    first = 0
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(tl.load(positions) - WINDOW + 1, 0)
        first = oldest // PAGE * PAGE
    return first, oldest, last


@triton.jit(do_not_specialize=["positions", "splits"])
def combine_kernel(
    positions, out, parts, lse, splits,
    D: constexpr, Q_LEN: constexpr, WINDOW: constexpr, PAGE: constexpr, KEYS: constexpr, PDL: constexpr,
):  # fmt: skip
    TURN: constexpr = 8
    row = tl.program_id(0) // Q_LEN
    query = tl.program_id(0) % Q_LEN
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    wait(PDL)
    trigger(PDL)
    first, _, last = _keys_of(positions + row * Q_LEN, Q_LEN, WINDOW, PAGE)
    done = tl.minimum((last - first) // KEYS + 1, splits)
    own = (row * splits * Q_LEN + query) * heads + head
    top = -1e30
    total = 0.0
    sums = tl.zeros([D], tl.float32)
    for begin in range(0, done, TURN):
        split = begin + tl.arange(0, TURN)
        at = own + split * Q_LEN * heads
        weights = tl.load(lse + at, split < done, -float("inf"))
        values = tl.load(parts + at[:, None] * D + tl.arange(0, D)[None, :], split[:, None] < done, 0.0)
        higher = tl.maximum(top, tl.max(weights, 0))
        weights = tl.exp2(weights - higher)
        keep = tl.exp2(top - higher)
        total = total * keep + tl.sum(weights, 0)
        sums = sums * keep + tl.sum(weights[:, None] * values, 0)
        top = higher
    at = (tl.program_id(0) * heads + head) * D + tl.arange(0, D)
    tl.store(out + at, cast(sums / total, out.dtype.element_ty))
