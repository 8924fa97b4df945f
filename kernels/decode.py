"""Attention of decode rows: one new token a sequence, at a position that only the device knows.

    decode_attention    one layer's whole step: head norms, rope, append of K and V to their page, attention over the pages
    paged_decode        attention alone, for queries that are normed and roped and whose K and V are already in their pages

    o = sum_j softmax_j( q . k_j ) v_j     over the keys j that position p sees:  j <= p, and j > p - window if there is one

Scale 1.0, no cap; scores, softmax and sums fp32, as in `kernels.prefill`. Keys that a row does not see may be anything, NaN
included: their scores and their values are replaced, not multiplied by zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, shared_memory, trigger, usable, wait
from kernels.norm import rms_norm
from kernels.numerics import LOG2E, cast, dot, hold
from kernels.prefill import gather
from kernels.qkv import norm_rope, norm_turn, split_heads, store, turn
from kernels.tiles import LARGE_SHARED

_GATHERED = {"cpu": 1 << 20, "cuda": 1 << 27}  # elements of K gathered at once: what a cache holds; what spares launches


@dataclass(frozen=True)
class DecodeTile:
    """How a launch is cut. A CTA takes every `splits`-th run of `keys` keys of a row's KV head, and d / `values` columns of V.

    early: the first run's loads are issued before q is normed, which pays where a CTA has but one or two runs
    """

    keys: int
    values: int
    warps: int
    stages: int
    early: bool

    def shared_bytes(self, d: int, itemsize: int = 2) -> int:
        """What the pipeline holds of K and V, q, and what layouts are exchanged in."""
        return (self.stages - 1) * self.keys * (d + d // self.values) * itemsize + 2 * 16 * d * itemsize


class DecodeScratch:
    """Device memory that `decode_attention` sums in; zeroed once, left zeroed. Launches that follow each other may share it.

    max_rows rows of a launch at most;  max_parts rows x splits of a launch at most, see `most_parts`
    parts    fp32 [max_parts, heads, head_dim], a split's own output;  lse fp32 [max_parts, values, heads], its base-2 log-sum-exp
    tickets  int32 [max_rows, kv_heads, values], how many splits are done
    """

    def __init__(self, max_rows: int, heads: int, kv_heads: int, head_dim: int, max_parts: int, device: torch.device) -> None:
        self.max_rows, self.max_parts = max_rows, max_parts
        self.tickets = torch.zeros(max_rows * kv_heads * _MOST_VALUES, dtype=torch.int32, device=device)
        size = max_parts if usable(self.tickets) else 0
        self.parts = torch.empty((size, heads, head_dim), dtype=torch.float32, device=device)
        self.lse = torch.empty((size, _MOST_VALUES, heads), dtype=torch.float32, device=device)


_MOST_VALUES = 8
_ROWS = tl.constexpr(16)  # rows of a product: the heads of a KV head, and padding


def decode_splits(rows: int, kv_heads: int, pages: int, processors: int) -> int:
    """Splits along the keys for a bucket of `rows` rows whose longest reads `pages` pages, on so many streaming multiprocessors.

    Two CTAs a multiprocessor, at most 32 and none without a page; fewer where the longest split reads as many pages even so.
    """
    wanted = max(1, min(2 * processors // (rows * kv_heads), pages, 32))
    return -(-pages // -(-pages // wanted))


def most_parts(buckets: Sequence[int], kv_heads: int, pages: int, processors: int) -> int:
    """`max_parts` of a scratch for all these buckets."""
    return max(rows * decode_splits(rows, kv_heads, pages, processors) for rows in buckets)


def decode_tile(d: int, page: int, splits: int, pages: int, shared: int = LARGE_SHARED) -> DecodeTile:
    """The cut for a head dim, a page size, a launch's splits and the most pages that a row reads.

    Many splits mean few rows: few CTAs, whose latency counts. `shared`: bytes of shared memory that a CTA may have.
    """
    keys = min(page, 32)
    early = splits > 1 and 2 * splits * keys >= pages * page
    if d <= 256:
        tile = DecodeTile(keys, 1, 4, 3, early)
    elif splits >= 8:
        tile = DecodeTile(keys, 4, 8, 3, early)
    else:
        tile = DecodeTile(keys, 1, 4 if splits <= 4 else 8, 3, early)
    while tile.shared_bytes(d) > shared and tile.keys > 16:
        tile = replace(tile, stages=2) if tile.stages > 2 else replace(tile, keys=tile.keys // 2)
    return tile


def decode_attention(
    qkv: Tensor,
    pool: Tensor,
    page_ids: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor,
    k_norm: Tensor | None,
    eps: float,
    window: int | None,
    scratch: DecodeScratch,
    out: Tensor,
    splits: int,
    tile: DecodeTile | None = None,
) -> None:
    """Attention of one layer for `rows` decode rows, written to `out`; appends each row's K and V to the page of its position.

    qkv       [rows, (heads + sides * kv_heads) * d], the raw product: q heads, k heads, v heads. sides 2; 1: v is k's raw product;
              0: the layer reads another layer's K and V, which that layer has appended, and writes none
    pool      one layer's [pages, 2, kv_heads, page, d], K at [:, 0], V at [:, 1]
    page_ids  int32 [rows, width]: entry j is the page of positions (first + j) * page ..; first is 0, and with a window
              max(0, position - window + 1) // page. Entries behind the position's own page are never used
    positions int32 [rows]; -1: a padding row, whose output is zero and which appends nothing
    cos_sin   fp32 [rows, 2 * pairs], cos first: of pairs (i, i + d/2), i < pairs
    q_norm    [d], k_norm [d] or, with 0 sides, None; v is normed without weight
    out       [rows, heads * d] in qkv's dtype
    splits    CTAs along the keys of a (row, KV head), a constant of the bucket: see `decode_splits`
    tile      in place of `decode_tile`'s
    """
    rows, d = qkv.shape[0], pool.shape[4]
    assert out.shape[0] == page_ids.shape[0] == positions.shape[0] == cos_sin.shape[0] == rows, (qkv.shape, out.shape)
    assert out.shape[1] % (pool.shape[2] * d) == 0, (out.shape, pool.shape)
    assert rows <= scratch.max_rows, (rows, scratch.max_rows)
    assert rows * splits <= scratch.max_parts, (rows, splits, scratch.max_parts)
    inputs = (qkv, pool, page_ids, positions, cos_sin, q_norm, k_norm)
    if not usable(qkv):
        return paged_decode_step(*inputs, eps, window, out)
    page = pool.shape[3]
    pages = _pages(page_ids.shape[1] * page, page, window)
    return _launch(inputs, eps, window, scratch, out, splits, tile or decode_tile(d, page, splits, pages, shared_memory(qkv)))


def paged_decode(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    bounds: Sequence[int],
    window: int | None,
) -> Tensor:
    """q [B, heads, d] -> [B, heads, d].

    pool one layer's [pages, 2, kv_heads, page, d]; table int32 [slots, width]; slots and positions int64 [B] on the device;
    bounds: for each row a host number that is at least its position + 1. It sizes the work: rows are gathered up to the largest
    bound (with a window: the window's pages only) and masked by position.
    """
    assert q.shape[0] == slots.shape[0] == positions.shape[0] == len(bounds), (q.shape, slots.shape, len(bounds))
    assert q.shape[2] == pool.shape[4], (q.shape, pool.shape)
    assert max(bounds, default=0) <= table.shape[1] * pool.shape[3], (max(bounds), table.shape, pool.shape)
    out = torch.empty_like(q)
    first = _first_page(positions, pool.shape[3], window)
    for rows, pages in _blocks(bounds, pool, window):
        entries = first[rows, None] + torch.arange(pages, device=q.device)
        found = table[slots[rows, None], entries.clamp(max=table.shape[1] - 1)]
        out[rows] = _decode_reference(q[rows], pool, found, first[rows], positions[rows], window)
    return out


def paged_decode_step(
    qkv: Tensor,
    pool: Tensor,
    page_ids: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor,
    k_norm: Tensor | None,
    eps: float,
    window: int | None,
    out: Tensor,
) -> None:
    """`decode_attention` in plain torch."""
    live = (positions >= 0).nonzero().squeeze(1)
    if live.shape[0] < positions.shape[0]:
        qkv, page_ids, positions, cos_sin = (x[live] for x in (qkv, page_ids, positions, cos_sin))
    page, d = pool.shape[3:]
    q, k, v = split_heads(qkv, out.shape[1] // d, pool)
    cos, sin = cos_sin.chunk(2, dim=1)
    first = _first_page(positions, page, window)
    if k is not None and v is not None:
        assert k_norm is not None, "a layer that appends K needs its norm"
        own = page_ids.gather(1, (positions // page - first)[:, None].long()).squeeze(1)
        store(pool, own, positions % page, norm_rope(k, k_norm, cos, sin, eps), rms_norm(v, None, eps))
    q = norm_rope(q, q_norm, cos, sin, eps)
    attended = torch.empty_like(q)
    bounds = (positions + 1).tolist()
    for rows, pages in _blocks(bounds, pool, window):
        found = page_ids[rows, :pages]
        attended[rows] = _decode_reference(q[rows], pool, found, first[rows], positions[rows], window)
    if live.shape[0] < out.shape[0]:
        out.zero_()
    out[live] = attended.flatten(1)


def _first_page(positions: Tensor, page: int, window: int | None) -> Tensor:
    """The first page that each position reads."""
    return torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0) // page


def _blocks(bounds: Sequence[int], pool: Tensor, window: int | None) -> Iterator[tuple[slice, int]]:
    """Runs of rows, and how many pages each row of a run reads: enough for its longest bound, in all what is gathered at once."""
    page, held = pool.shape[3], _GATHERED[pool.device.type] // pool[0, 0].numel()
    first = 0
    while first < len(bounds):
        last, pages = first, 0
        while last < len(bounds):
            wider = max(pages, _pages(bounds[last], page, window))
            if last > first and wider * (last + 1 - first) > held:
                break
            last, pages = last + 1, wider
        yield slice(first, last), pages
        first = last


def _pages(bound: int, page: int, window: int | None) -> int:
    whole = -(-bound // page)
    return whole if window is None else min(whole, (window - 2) // page + 2)


def _decode_reference(q: Tensor, pool: Tensor, found: Tensor, first: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """found int [rows, pages]: the pages `first` .. of each row; entries past the row's own page are not read: the null page
    stands in, and is masked."""
    rows, heads, d = q.shape
    kv_heads, page = pool.shape[2], pool.shape[3]
    pages = found.shape[1]
    here = positions[:, None]
    entries = first[:, None] + torch.arange(pages, device=q.device)
    found = torch.where(entries * page <= here, found, 0)
    keys = entries[..., None] * page + torch.arange(page, device=q.device)  # [rows, pages, page]
    seen = keys <= here[..., None]
    if window is not None:
        seen &= keys > here[..., None] - window
    k, v = (side.unflatten(0, (rows, pages)) for side in gather(pool, found.flatten()))
    v.masked_fill_(~seen[:, :, None, :, None], 0.0)
    grouped = q.float().view(rows, 1, kv_heads, -1, d)
    scores = (grouped @ k.transpose(-1, -2)).masked_fill(~seen[:, :, None, None], -torch.inf)
    weights = scores.transpose(1, 3).flatten(-2).softmax(-1).unflatten(-1, (pages, page)).transpose(1, 3)
    return (weights @ v).sum(1).reshape(rows, heads, d).to(q.dtype)


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None],
    eps: float,
    window: int | None,
    scratch: DecodeScratch,
    out: Tensor,
    splits: int,
    tile: DecodeTile,
) -> None:
    qkv, pool, page_ids, positions, cos_sin, q_norm, k_norm = inputs
    kv_heads, page, d = pool.shape[2:]
    heads = out.shape[1] // d
    sides = (qkv.shape[1] // d - heads) // kv_heads
    assert d >= 16, d
    assert d & (d - 1) == 0, f"head dim {d} is no power of two"
    assert heads // kv_heads <= _ROWS.value, (heads, kv_heads)
    assert (sides > 0) == (k_norm is not None), (qkv.shape, k_norm)
    for x in (*inputs, out):
        assert x is None or x.is_contiguous(), (x.shape, x.stride())
    grid = (qkv.shape[0], kv_heads * tile.values, splits)
    launch(
        _decode,
        grid,
        qkv,
        pool,
        page_ids,
        positions,
        cos_sin,
        q_norm,
        q_norm if k_norm is None else k_norm,
        out,
        scratch.parts,
        scratch.lse,
        scratch.tickets,
        page_ids.shape[1],
        eps,
        warps=tile.warps,
        stages=tile.stages,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=d,
        PAIRS=cos_sin.shape[1] // 2,
        SIDES=sides,
        WINDOW=window or 0,
        PAGE=page,
        SPLITS=splits,
        KEYS=tile.keys,
        VALUES=tile.values,
        EARLY=tile.early,
    )


@triton.jit(do_not_specialize=["width"])
def _decode(
    qkv: tl.tensor,
    pool: tl.tensor,
    page_ids: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    lse: tl.tensor,
    tickets: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    SIDES: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A CTA: one row, one KV head, one part of V's columns, one split of the keys. The last split to end adds them all.

    What the loads before the first page need are program ids alone, so that they are in flight together.
    """
    trigger(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    DV: tl.constexpr = D // VALUES
    KEPT: tl.constexpr = KV_HEADS * PAGE * D  # elements of a page's K, and of its V
    row, split = tl.program_id(0), tl.program_id(2)
    head, part = tl.program_id(1) // VALUES, tl.program_id(1) % VALUES
    group, dims, columns = tl.arange(0, _ROWS), tl.arange(0, D), part * DV + tl.arange(0, DV)
    # A tile of heads is read in two dimensions, its weights and angles too: one layout, nothing to exchange between threads.
    rows, wide = group[:, None], group[:, None] * 0 + dims[None, :]
    mates = (wide + D // 2) % D
    own, is_q = rows == 0, rows < GROUP  # of the tile of K and V: row 0 is K's, row 1 is V's
    q_scale, q_scale_mate = _weights(q_norm, wide, mates, is_q)
    k_scale, k_scale_mate = _weights(k_norm, wide, mates, own)
    wait(PDL)

    position = tl.load(positions + row)
    ids = page_ids + row * width
    page = _page_of(ids, split, width, KEYS, PAGE)
    token = qkv + row * (HEADS + SIDES * KV_HEADS) * D
    q_at = token + (head * GROUP + rows) * D
    q, q_mate = tl.load(q_at + wide, is_q, other=0.0).to(tl.float32), tl.load(q_at + mates, is_q, other=0.0).to(tl.float32)
    cos, sin = turn(cos_sin + row * 2 * PAIRS, wide, is_q, D, PAIRS)
    if SIDES > 0:
        kv_at = token + (HEADS + head + rows * (SIDES - 1) * KV_HEADS) * D
        kv = tl.load(kv_at + wide, rows < 2, other=0.0).to(tl.float32)
        kv_mate = tl.load(kv_at + mates, own, other=0.0).to(tl.float32)
        v_new = tl.load(token + (HEADS + (SIDES - 1) * KV_HEADS + head) * D + columns).to(tl.float32)

    first = 0  # position of the first key of the first page
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(position - WINDOW + 1, 0)
        first = oldest // PAGE * PAGE
    end = position + (SIDES == 0)  # the row's own key is in the pool only where another layer has put it there
    runs = (position - first) // KEYS + 1
    out_at = out + row * HEADS * D + head * GROUP * D
    if position < 0:
        if split == 0:
            zero = tl.zeros([_ROWS, DV], out.dtype.element_ty)
            tl.store(out_at + rows * D + columns[None, :], zero, is_q)
        return
    if split >= runs:
        return

    heads_k, heads_v = pool + head * PAGE * D, pool + KEPT + head * PAGE * D
    if EARLY:
        k = _load_run(heads_k, page, split, first, oldest, end, dims, D, 2 * KEPT, KEYS, PAGE)
        v = _load_run(heads_v, page, split, first, oldest, end, columns, D, 2 * KEPT, KEYS, PAGE)

    q = norm_turn(q, q_mate, tl.rsqrt(tl.sum(q * q, 1) / D + eps)[:, None], q_scale, q_scale_mate, cos, sin)
    q = cast(q, pool.dtype.element_ty)
    top = tl.full([_ROWS], -1e30, tl.float32)
    total = tl.zeros([_ROWS], tl.float32)
    sums = tl.zeros([_ROWS, DV], tl.float32)
    if SIDES > 0:  # noqa: SIM102 - a constexpr around a branch
        if split == (runs - 1) % SPLITS:  # this CTA owns the page of the new token: append it, and begin with it
            scale = tl.rsqrt(tl.sum(kv * kv, 1) / D + eps)
            key = norm_turn(kv, kv_mate, scale[:, None], k_scale, k_scale_mate, cos, sin)
            key = cast(tl.sum(tl.where(own, key, 0.0), 0), pool.dtype.element_ty)
            value = cast(v_new * tl.sum(tl.where(group == 1, scale, 0.0), 0), pool.dtype.element_ty)
            at = tl.load(ids + (position - first) // PAGE).to(tl.int64) * (2 * KEPT) + position % PAGE * D
            if part == 0:
                tl.store(heads_k + at + dims, key)
            tl.store(heads_v + at + columns, value)
            top = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], 1) * LOG2E
            total += 1.0
            sums += value.to(tl.float32)[None, :]

    begin = split
    if EARLY:
        page = _page_of(ids, split + SPLITS, width, KEYS, PAGE)
        seen = _seen(split, first, oldest, end, KEYS)
        top, total, sums = _attend(q, hold(k), hold(v), seen, top, total, sums)
        begin += SPLITS
    for run in tl.range(begin, runs, SPLITS):
        k = _load_run(heads_k, page, run, first, oldest, end, dims, D, 2 * KEPT, KEYS, PAGE)
        v = _load_run(heads_v, page, run, first, oldest, end, columns, D, 2 * KEPT, KEYS, PAGE)
        page = _page_of(ids, run + SPLITS, width, KEYS, PAGE)  # one turn ahead
        top, total, sums = _attend(q, k, v, _seen(run, first, oldest, end, KEYS), top, total, sums)

    norm = tl.where(total > 0, total, 1.0)
    sums = sums / norm[:, None]
    done = tl.minimum(runs, SPLITS)
    if done == 1:
        tl.store(out_at + rows * D + columns[None, :], cast(sums, out.dtype.element_ty), is_q)
        return
    if SPLITS > 1:
        lse_at = lse + (row * SPLITS * VALUES + part) * HEADS + head * GROUP
        parts_at = parts + row * SPLITS * HEADS * D + head * GROUP * D
        tl.store(lse_at + split * VALUES * HEADS + group, tl.where(total > 0, top + tl.log2(norm), -1e30), group < GROUP)
        tl.store(parts_at + split * HEADS * D + rows * D + columns[None, :], sums, is_q)
        tl.debug_barrier()  # every thread's part is written before the ticket is taken
        ticket = tickets + (row * KV_HEADS + head) * VALUES + part
        if tl.atomic_add(ticket, 1, sem="acq_rel") == done - 1:
            tl.store(ticket, 0)
            whole = _combine(lse_at, parts_at, columns, done, VALUES * HEADS, HEADS * D, D, GROUP, SPLITS, DV)
            few = tl.arange(0, triton.next_power_of_2(GROUP))[:, None]
            tl.store(out_at + few * D + columns[None, :], cast(whole, out.dtype.element_ty), few < GROUP)


@triton.jit
def _weights(norm: tl.tensor, dims: tl.tensor, mates: tl.tensor, live: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A norm's weights and their mates', where a row is `live`; ones elsewhere."""
    return tl.load(norm + dims, live, other=1.0).to(tl.float32), tl.load(norm + mates, live, other=1.0).to(tl.float32)


@triton.jit
def _page_of(ids: tl.tensor, run: tl.tensor, width: tl.tensor, KEYS: tl.constexpr, PAGE: tl.constexpr) -> tl.tensor:
    """The page of run `run` of KEYS keys, or of each of its keys where a run has several pages; 0 behind the table's end."""
    entry = run * KEYS // PAGE
    if KEYS > PAGE:
        entry += tl.arange(0, KEYS) // PAGE
    return tl.load(ids + entry, entry < width, other=0)


@triton.jit
def _seen(run: tl.tensor, first: tl.tensor, oldest: tl.tensor, end: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    keys = first + run * KEYS + tl.arange(0, KEYS)
    return (keys >= oldest) & (keys < end)


@triton.jit
def _load_run(
    side: tl.tensor,
    page: tl.tensor,
    run: tl.tensor,
    first: tl.tensor,
    oldest: tl.tensor,
    end: tl.tensor,
    columns: tl.tensor,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
) -> tl.tensor:
    """[KEYS, columns] of one side's pages; keys that are not seen are zeros, and are not read."""
    at = page.to(tl.int64) * STRIDE + (run * KEYS + tl.arange(0, KEYS)) % PAGE * D
    return tl.load(side + at[:, None] + columns[None, :], _seen(run, first, oldest, end, KEYS)[:, None], other=0.0)


@triton.jit
def _attend(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, seen: tl.tensor, top: tl.tensor, total: tl.tensor, sums: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One turn of the online softmax, in base 2: the running maximum, sum of weights, weighted sum of values."""
    scores = tl.where(seen[None, :], dot(q, tl.trans(k)) * LOG2E, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    keep = tl.exp2(top - higher)
    return higher, total * keep + tl.sum(weights, 1), sums * keep[:, None] + dot(cast(weights, v.dtype), v)


@triton.jit
def _combine(
    lse: tl.tensor,
    parts: tl.tensor,
    columns: tl.tensor,
    done: tl.tensor,
    LSE_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    DV: tl.constexpr,
) -> tl.tensor:
    """[heads of the group, DV]: the splits' parts, each by its share of the weights. Unrolled: all loads are in flight together."""
    group = tl.arange(0, triton.next_power_of_2(GROUP))
    live = group < GROUP
    top = tl.full([triton.next_power_of_2(GROUP)], -1e30, tl.float32)
    for split in tl.static_range(SPLITS):
        top = tl.maximum(top, tl.load(lse + split * LSE_STRIDE + group, live & (split < done), other=-1e30, cache_modifier=".cg"))
    total = tl.zeros([triton.next_power_of_2(GROUP)], tl.float32)
    sums = tl.zeros([triton.next_power_of_2(GROUP), DV], tl.float32)
    for split in tl.static_range(SPLITS):
        here = live & (split < done)
        share = tl.exp2(tl.load(lse + split * LSE_STRIDE + group, here, other=-1e30, cache_modifier=".cg") - top)
        at = parts + split * STRIDE + group[:, None] * D + columns[None, :]
        share = tl.where(here, share, 0.0)
        total += share
        sums += share[:, None] * tl.load(at, here[:, None], other=0.0, cache_modifier=".cg")
    return sums / tl.where(total > 0, total, 1.0)[:, None]
