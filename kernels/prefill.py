"""Paged attention of prefill chunks.

The formula is that of `kernels.paged_attention`. last_seen_i is i, or in an image's span its last token's position, in the same
chunk. Unseen pages may be NaN.
"""


import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, shared_memory, trigger, wait
from kernels.numerics import cast, dot, operand, softmax_step
from kernels.paged_attention import attention
from kernels.qkv import by_head, scales_of
from kernels.slots import first_page
from kernels.splitkv import page_of

_TILE_ROWS = 128
_VALUES = 256  # columns of V that a CTA sums: registers hold the sums of 128 rows, which read K and V from the L2 cache once
_SCORES = 1 << 26  # scores held at once (256 MiB): long chunks run in blocks of queries


def tile_tokens(heads: int, kv_heads: int) -> int:
    return max(1, _TILE_ROWS // (heads // kv_heads))


def extend_attention(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    tiles: Tensor,
    window: int | None,
    out: Tensor,
    last_seen: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """q [T, heads, d], normed and roped, in `kernels.qkv.query_dtype` -> out [T, heads, d]; rows without a tile stay.

    pool   as in `decode_attention`, with the chunks' own keys; scales too, and q has K's
    table  int32 [slots, width]
    tiles  int32 [n, 4]: slot, first row, first position, count <= `tile_tokens(...)`, 0: skipped. Below position 0 out is 0
    window keys a position sees, its own included
    last_seen int32 [T], in the same chunk; below a row's own position, or None: its own
    """
    if not enabled(q):
        for slot, row, position, count in tiles.tolist():
            rows = slice(row, row + count)
            if position < 0:
                out[rows] = 0
            elif count:
                seen = None if last_seen is None else last_seen[rows]
                out[rows] = paged_prefill(q[rows], pool, table[slot], position, window, seen)
                if scales is not None:
                    out[rows] *= by_head(scales[1], out.shape[1])
        return
    check_contiguous(q, pool, table, tiles, out)
    kv_heads, page, d = pool.shape[2:]
    heads = q.shape[1]
    values = min(d, _VALUES)
    group = heads // kv_heads
    tile_rows, tile_keys = _tile_sizes(d, values, q.element_size(), pool.element_size(), shared_memory(q))
    tokens = max(1, tile_rows // group)
    parts = d // values * cdiv(tile_tokens(heads, kv_heads), tokens)
    launch(
        _extend, (parts, len(tiles), kv_heads),  # CTAs that read the same keys follow one another
        q, pool, table, tiles, out, table.shape[1], last_seen, scales,
        HEADS=heads, KV_HEADS=kv_heads, D=d, VALUES=values, WINDOW=window or 0, PAGE=page, TOKENS=tokens,
        ROWS=max(tile_rows, next_power_of_2(group)), KEYS=tile_keys, warps=8 if tile_rows >= 64 else 4, stages=2,
    )  # fmt: skip


def paged_prefill(
    q: Tensor, pool: Tensor, pages: Tensor, start: int, window: int | None, last_seen: Tensor | None = None
) -> Tensor:
    """q [n, heads, d] from position `start` on -> [n, heads, d]. pages int32 [width]: a page table row; unseen entries are not
    read.
    """
    n, heads, _ = q.shape
    assert start + n <= pages.shape[0] * pool.shape[3], (start, n, pages.shape)
    page = pool.shape[3]
    positions = torch.arange(start, start + n, device=q.device)[None]
    seen = positions if last_seen is None else last_seen[None].maximum(positions)
    out = torch.empty_like(q)
    block = max(1, _SCORES // (heads * (start + n)))
    for begin in range(0, n, block):
        part = slice(begin, begin + block)
        first = first_page(positions[:, begin], page, window)
        read = pages[None, int(first) : int(seen[:, part].max()) // page + 1]
        out[part] = attention(q[None, part], pool, read, first, positions[:, part], window, seen[:, part])[0]
    return out


def _tile_sizes(d: int, values: int, itemsize: int, stored: int, shared: int) -> tuple[int, int]:
    """Rows of a CTA and keys of a turn that fit shared memory. stored: bytes of a number in pages."""
    rows, keys = (16, 16) if itemsize == 4 else (_TILE_ROWS, 64 if d <= 256 else 16 * stored)
    turn = 4 * (d + values)  # bytes of a key and its value: this turn's and the next turn's, in flight
    while keys > 16 and keys * turn > shared * 3 // 4:
        keys //= 2
    while rows > 16 and 2 * d * rows + keys * turn > shared:
        rows //= 2
    return rows, keys


@triton.jit(do_not_specialize=["width"])
def _extend(
    q, pool, table, tiles, out, width, last_seen, scales,
    HEADS: constexpr, KV_HEADS: constexpr, D: constexpr, VALUES: constexpr, WINDOW: constexpr, PAGE: constexpr, TOKENS: constexpr,
    ROWS: constexpr, KEYS: constexpr, PDL: constexpr,
):  # fmt: skip
    """TOKENS queries of a tile, times the heads of one KV head. Keys in three runs: the window's edge, which only some queries
    see; keys that all see; the diagonal.
    """
    trigger(PDL)
    GROUP: constexpr = HEADS // KV_HEADS
    tile = tl.program_id(1)
    head = tl.program_id(2)
    dims = tl.arange(0, D)
    columns = tl.program_id(0) % (D // VALUES) * VALUES + tl.arange(0, VALUES)
    token = tl.arange(0, ROWS) // GROUP
    wait(PDL)
    done = tl.program_id(0) // (D // VALUES) * TOKENS
    slot = tl.load(tiles + 4 * tile)
    row = tl.load(tiles + 4 * tile + 1) + done
    start = tl.load(tiles + 4 * tile + 2) + done
    count = tl.minimum(tl.load(tiles + 4 * tile + 3) - done, TOKENS)
    if count <= 0:
        return
    offset = ((row + token).to(tl.int64) * HEADS + head * GROUP + tl.arange(0, ROWS) % GROUP)[:, None] * D
    live = (token < count)[:, None]
    queries = tl.load(q + (offset + dims[None, :]), live, other=0.0)  # pointers, once added to, stay in registers
    positions = start + token
    end = start + count
    oldest = 0
    inside = 0  # from here on no query's window ends
    if WINDOW > 0:
        oldest = tl.maximum(start - WINDOW + 1, 0)
        inside = tl.maximum(end - WINDOW, 0)
    newest = positions
    if last_seen is not None:
        newest = tl.maximum(positions, tl.load(last_seen + row + token, token < count, other=-1))
        end = tl.max(tl.where(token < count, newest, 0), 0) + 1
    first = oldest // KEYS * KEYS
    left = tl.maximum(tl.minimum((inside + KEYS - 1) // KEYS * KEYS, (end + KEYS - 1) // KEYS * KEYS), first)
    right = tl.maximum((start + 1) // KEYS * KEYS, left)  # from here on some query is older than a key

    ids = table + slot.to(tl.int64) * width
    side = pool + head * PAGE * D
    row_max = tl.full([ROWS], -1e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    state = (row_max, row_sum, acc)
    seen = (columns, positions, newest, oldest, end)
    state = _walk(queries, side, ids, width, first, left, *seen, *state, KV_HEADS, D, WINDOW, PAGE, KEYS, True)
    state = _walk(queries, side, ids, width, left, right, *seen, *state, KV_HEADS, D, WINDOW, PAGE, KEYS, False)
    state = _walk(queries, side, ids, width, right, end, *seen, *state, KV_HEADS, D, WINDOW, PAGE, KEYS, True)
    row_max, row_sum, acc = state
    out_at = out + (offset + columns[None, :])
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None] * scales_of(scales, head, KV_HEADS)[1]
    tl.store(out_at, cast(acc, out.dtype.element_ty), live)


@triton.jit
def _walk(
    q, side, ids, width, first, last, columns, positions, newest, oldest, end, row_max, row_sum, acc,
    KV_HEADS: constexpr, D: constexpr, WINDOW: constexpr, PAGE: constexpr, KEYS: constexpr, MASKED: constexpr,
):  # fmt: skip
    dims = tl.arange(0, D)
    pages = page_of(ids, first, width, KEYS, PAGE)
    for key in tl.range(first, last, KEYS):
        keys = key + tl.arange(0, KEYS)
        if KEYS <= PAGE:
            start = side + pages.to(tl.int64) * (2 * KV_HEADS * PAGE * D) + key % PAGE * D  # one address a turn, and fixed offsets
            offset = start + tl.arange(0, KEYS)[:, None] * D
        else:
            offset = side + (pages.to(tl.int64) * (2 * KV_HEADS * PAGE * D) + keys % PAGE * D)[:, None]
        value = offset + KV_HEADS * PAGE * D + columns[None, :]
        offset += dims[None, :]
        held = ((keys >= oldest) & (keys < end))[:, None] | (MASKED == 0)  # a mask that holds everywhere is compiled away
        k = tl.load(offset, held, other=0.0)
        v = tl.load(value, held, other=0.0)
        pages = page_of(ids, key + KEYS, width, KEYS, PAGE)  # one turn ahead
        scores = dot(q, tl.trans(operand(k)))
        if MASKED:
            seen = (keys[None, :] <= newest[:, None]) & (keys < end)[None, :]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        row_max, weights, rescale, row_sum = softmax_step(scores, row_max, row_sum)
        v = operand(v)
        acc = acc * rescale[:, None] + dot(cast(weights, v.dtype), v)
    return row_max, row_sum, acc
