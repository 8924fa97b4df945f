"""The Triton kernel behind `kernels.decode`: split-KV attention over pages, with head norms, rope and append in the same launch.

    grid   (rows, KV heads x parts of V's columns, splits)          a CTA's keys: runs split, split + splits, ... of `KEYS` keys
    CTA    q normed and roped -> online softmax over its runs -> its part and log-sum-exp to scratch -> a ticket
    last   the CTA that draws the last ticket of a (row, KV head, columns) adds the parts and resets the ticket
    owner  the CTA whose runs end with the row's own position begins with the new key and value, from registers, and appends them
"""

import triton
import triton.language as tl

from kernels.launch import trigger, wait
from kernels.numerics import LOG2E, cast, dot, hold
from kernels.qkv import norm_turn, turn

ROWS = tl.constexpr(16)  # rows of a product: the heads of a KV head, and padding


@triton.jit(do_not_specialize=["width", "positions"])  # a mixed step's rows begin anywhere
def decode_kernel(
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
    GROUP: tl.constexpr = HEADS // KV_HEADS
    DV: tl.constexpr = D // VALUES
    KEPT: tl.constexpr = KV_HEADS * PAGE * D  # elements of a page's K, and of its V
    row, split = tl.program_id(0), tl.program_id(2)
    head, part = tl.program_id(1) // VALUES, tl.program_id(1) % VALUES
    group, dims, columns = tl.arange(0, ROWS), tl.arange(0, D), part * DV + tl.arange(0, DV)
    # A tile of heads is read in two dimensions, its weights and angles too: one layout, nothing to exchange between threads.
    rows, wide = group[:, None], group[:, None] * 0 + dims[None, :]
    mates = (wide + D // 2) % D
    own, is_q = rows == 0, rows < GROUP  # of the tile of K and V: row 0 is K's, row 1 is V's
    q_scale, q_scale_mate = _weights(q_norm, wide, mates, is_q)
    k_scale, k_scale_mate = _weights(k_norm, wide, mates, own)
    wait(PDL)
    trigger(PDL)  # not before: products that start early would take the memory that this one waits for

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
            zero = tl.zeros([ROWS, DV], out.dtype.element_ty)
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
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DV], tl.float32)
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
