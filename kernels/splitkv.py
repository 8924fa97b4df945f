"""The Triton kernel of `kernels.decode`: split-KV attention over pages, with head norms, rope and append.

    grid   (rows, KV heads x parts of V's columns, splits); a CTA takes runs split, split + splits, ... of `KEYS` keys
    CTA    q normed and roped -> online softmax over its runs -> its part and log-sum-exp to scratch -> a ticket
    last   the CTA with the last ticket of a (row, KV head, columns) adds the parts and resets the ticket
    owner  the CTA of the row's own position appends the new key and value

With V_AS_K, unrotated dims of K are V times k_norm: q has the weight and is multiplied with V; only K's rotated dims are read,
after the owner's append. e4m3 pages round K and V separately, so K is read whole.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from kernels.launch import next_power_of_2, trigger, wait
from kernels.numerics import LOG2E, cast, dot, first_use, halves, operand
from kernels.qkv import append_kv, load_halves, norm_and_rope, norm_scale, rope_angles, scales_of

ROWS = constexpr(16)  # rows of a product: the heads of a KV head, and padding


def read_pairs(pairs: int, itemsize: int) -> int:
    """Rotated pairs of K to read where V is its raw product; 0: all. A product needs 16 dims and a power of 2; one-byte K is not
    V times a weight."""
    return pairs if itemsize > 1 and 16 <= pairs == next_power_of_2(pairs) else 0


@triton.jit(do_not_specialize=["width", "positions"])  # a mixed step's rows begin anywhere
def decode_kernel(
    qkv, pool, page_ids, positions, cos_sin, q_norm, k_norm, scales, out, parts, lse, tickets, width, eps,
    HEADS: constexpr, KV_HEADS: constexpr, D: constexpr, PAIRS: constexpr, KV_PROJECTIONS: constexpr, WINDOW: constexpr,
    PAGE: constexpr, SPLITS: constexpr, KEYS: constexpr, VALUES: constexpr, EARLY: constexpr, V_AS_K: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """Loads before the first page need only program ids, so they are in flight together."""
    GROUP: constexpr = HEADS // KV_HEADS
    DV: constexpr = D // VALUES
    KEPT: constexpr = KV_HEADS * PAGE * D  # elements of a page's K, and of its V
    row = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) // VALUES
    part = tl.program_id(1) % VALUES
    HALF: constexpr = D // 2
    READ: constexpr = PAIRS if V_AS_K else HALF  # dims of each half of K that are read
    group = tl.arange(0, ROWS)
    columns = part * DV + tl.arange(0, DV)
    # Heads are read as [rows, D/2] twice, dims i and i + D/2 that rope turns together, and so are weights and angles: one layout,
    # nothing to exchange between threads. Of the tile of K and V, row 0 is K's and row 1 is V's.
    rows = group[:, None]
    half = rows * 0 + tl.arange(0, HALF)[None, :]
    read = rows * 0 + tl.arange(0, READ)[None, :]
    own = rows == 0
    is_q = rows < GROUP
    q_weight = load_halves(q_norm + read, is_q, 1.0, HALF)
    k_weight = load_halves(k_norm + half, own, 1.0, HALF)
    ids = page_ids + row * width
    heads_k = pool + head * PAGE * D
    heads_v = pool + KEPT + head * PAGE * D
    STORED: constexpr = pool.dtype.element_ty
    QUERY: constexpr = tl.float16 if tl.float8e4nv == STORED else STORED  # as `operand` makes of keys
    JOINED: constexpr = 2 if tl.float8e4nv == STORED else 1  # columns of V that are read as one number
    values_at = joined_values(heads_v)
    joined = part * (DV // JOINED) + tl.arange(0, DV // JOINED)
    k_scale, v_scale = scales_of(scales, head, KV_HEADS)
    cos_sin += row * 2 * PAIRS
    wait(PDL)
    trigger(PDL)  # not before: products that start early would take the memory that this one waits for

    position = tl.load(positions + row)
    page = page_of(ids, split * KEYS, width, KEYS, PAGE)
    token = qkv + row * (HEADS + KV_PROJECTIONS * KV_HEADS) * D
    q_at = token + (head * GROUP + rows) * D
    q_raw = load_halves(q_at + read, is_q, 0.0, HALF)
    cos_q, sin_q = rope_angles(cos_sin, read, is_q, PAIRS)
    if V_AS_K:  # q's other dims, times K's weight: there K is V times it
        dims = tl.arange(0, D)[None, :]
        whole_q = load_halves(q_at + half, is_q, 0.0, HALF)  # for the norm alone: a sum over `other_q` would spill registers
        other_q = tl.load(q_at + dims, is_q, 0.0).to(tl.float32)
        other_weight = tl.load(q_norm + dims).to(tl.float32) * tl.load(k_norm + dims, dims % HALF >= PAIRS, 0.0).to(tl.float32)
    if KV_PROJECTIONS > 0 and not V_AS_K:
        cos, sin = rope_angles(cos_sin, half, own, PAIRS)
        kv_raw = load_halves(token + (HEADS + head + rows * (KV_PROJECTIONS - 1) * KV_HEADS) * D + half, rows < 2, 0.0, HALF)
        v_new = tl.load(token + (HEADS + (KV_PROJECTIONS - 1) * KV_HEADS + head) * D + columns).to(tl.float32)

    first = 0  # position of the first key of the first page
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(position - WINDOW + 1, 0)
        first = oldest // PAGE * PAGE
    end = position + (KV_PROJECTIONS == 0 or V_AS_K)  # the row's own key is read from the pool if it was written there earlier
    runs = (position - first) // KEYS + 1
    out_at = out + row * HEADS * D + head * GROUP * D
    if position < 0:
        if split == 0:
            zero = tl.zeros([ROWS, DV], out.dtype.element_ty)
            tl.store(out_at + rows * D + columns[None, :], zero, is_q)
        return
    if split >= runs:
        return

    low = tl.arange(0, READ)
    if EARLY:
        k_low = load_run(heads_k, page, split, first, oldest, end, low, D, 2 * KEPT, KEYS, PAGE)
        k_high = load_run(heads_k, page, split, first, oldest, end, low + HALF, D, 2 * KEPT, KEYS, PAGE)
        v = load_run(values_at, page, split, first, oldest, end, joined, D // JOINED, 2 * KEPT // JOINED, KEYS, PAGE)

    if V_AS_K:
        q_scale = norm_scale(*whole_q, eps, D)
        q_other = cast(other_q * q_scale * other_weight, QUERY)
    else:
        q_scale = norm_scale(*q_raw, eps, D) * k_scale
        q_other = None
    q_low, q_high = norm_and_rope(*q_raw, *q_weight, cos_q, sin_q, q_scale)
    q_low = cast(q_low, QUERY)
    q_high = cast(q_high, QUERY)
    row_max = tl.full([ROWS], -1e30, tl.float32)
    row_sums = tl.zeros([ROWS, KEYS], tl.float32)  # of each column of the turns' keys: added up once, at the end
    acc = tl.zeros([ROWS, DV], tl.float32)
    if KV_PROJECTIONS > 0:  # noqa: SIM102 - a constexpr around a branch
        if split == (runs - 1) % SPLITS:  # this CTA owns the page of the new token: append it, and begin with it
            at = tl.load(ids + (position - first) // PAGE).to(tl.int64) * (2 * KEPT) + position % PAGE * D
            if V_AS_K:
                append_kv(token + (HEADS + head) * D, 0, cos_sin, k_norm, heads_k + at, True, KEPT, eps, 1.0, 1.0, D, PAIRS)
                tl.debug_barrier()  # every thread's part is written before it is read below
            else:
                scale = norm_scale(*kv_raw, eps, D)
                low_new, high_new = norm_and_rope(*kv_raw, *k_weight, cos, sin, scale / k_scale)
                key_low = cast(tl.sum(tl.where(own, low_new, 0.0), 0), STORED)
                key_high = cast(tl.sum(tl.where(own, high_new, 0.0), 0), STORED)
                value = cast(v_new * tl.sum(tl.where(rows == 1, scale, 0.0)) / v_scale, STORED)
                if part == 0:
                    tl.store(heads_k + at + low, key_low)
                    tl.store(heads_k + at + HALF + low, key_high)
                tl.store(heads_v + at + columns, value)
                products = q_low.to(tl.float32) * key_low.to(tl.float32)[None, :]
                row_max = tl.sum(products + q_high.to(tl.float32) * key_high.to(tl.float32)[None, :], 1) * LOG2E
                row_sums += tl.where(tl.arange(0, KEYS) == 0, 1.0, 0.0)[None, :]
                acc += value.to(tl.float32)[None, :]

    begin = split
    if JOINED == 2:  # even and odd columns apart
        acc = acc.reshape(ROWS, DV // 2, 2).split()
    if EARLY:
        page = page_of(ids, (split + SPLITS) * KEYS, width, KEYS, PAGE)
        seen = _seen(split, first, oldest, end, KEYS)
        loaded = first_use(k_low), first_use(k_high), first_use(v)
        row_max, row_sums, acc = _attend(q_low, q_high, q_other, *loaded, seen, row_max, row_sums, acc)
        begin += SPLITS
    for run in tl.range(begin, runs, SPLITS):
        k_low = load_run(heads_k, page, run, first, oldest, end, low, D, 2 * KEPT, KEYS, PAGE)
        k_high = load_run(heads_k, page, run, first, oldest, end, low + HALF, D, 2 * KEPT, KEYS, PAGE)
        v = load_run(values_at, page, run, first, oldest, end, joined, D // JOINED, 2 * KEPT // JOINED, KEYS, PAGE)
        page = page_of(ids, (run + SPLITS) * KEYS, width, KEYS, PAGE)  # one turn ahead
        seen = _seen(run, first, oldest, end, KEYS)
        row_max, row_sums, acc = _attend(q_low, q_high, q_other, k_low, k_high, v, seen, row_max, row_sums, acc)

    if JOINED == 2:
        acc = tl.interleave(acc[0], acc[1])
    row_sum = tl.sum(row_sums, 1)
    norm = tl.where(row_sum > 0, row_sum, 1.0)
    acc = acc / norm[:, None] * v_scale
    done = tl.minimum(runs, SPLITS)
    if done == 1:
        tl.store(out_at + rows * D + columns[None, :], cast(acc, out.dtype.element_ty), is_q)
        return
    if SPLITS > 1:
        lse_at = lse + (row * SPLITS * VALUES + part) * HEADS + head * GROUP
        parts_at = parts + row * SPLITS * HEADS * D + head * GROUP * D
        tl.store(lse_at + split * VALUES * HEADS + group, tl.where(row_sum > 0, row_max + tl.log2(norm), -1e30), group < GROUP)
        tl.store(parts_at + split * HEADS * D + rows * D + columns[None, :], acc, is_q)
        few = tl.arange(0, triton.next_power_of_2(GROUP))
        at = few[:, None] * D + columns[None, :]
        ticket = tickets + (row * KV_HEADS + head) * VALUES + part
        add_splits(ticket, done, lse_at + few, parts_at + at, out_at + at, few < GROUP, VALUES * HEADS, HEADS * D, SPLITS)


@triton.jit
def page_of(ids, key, width, KEYS: constexpr, PAGE: constexpr):
    """The page of KEYS keys from `key` on, or of each if they span several; 0 after the table's end."""
    entry = key // PAGE
    if KEYS > PAGE:
        entry += tl.arange(0, KEYS) // PAGE
    return tl.load(ids + entry, entry < width, other=0)


@triton.jit
def _seen(run, first, oldest, end, KEYS: constexpr):
    keys = first + run * KEYS + tl.arange(0, KEYS)
    return (keys >= oldest) & (keys < end)


@triton.jit
def load_run(side, page, run, first, oldest, end, columns, D: constexpr, STRIDE: constexpr, KEYS: constexpr, PAGE: constexpr):
    """[KEYS, columns]; unseen keys are zeros, and not read."""
    at = addresses(side, page, run, columns, D, STRIDE, KEYS, PAGE)
    return tl.load(at, _seen(run, first, oldest, end, KEYS)[:, None], other=0.0)


@triton.jit
def addresses(side, page, run, columns, D: constexpr, STRIDE: constexpr, KEYS: constexpr, PAGE: constexpr):
    if KEYS <= PAGE:
        start = side + page.to(tl.int64) * STRIDE + run * KEYS % PAGE * D  # one address a run, and offsets that stay the same
        return start + (tl.arange(0, KEYS)[:, None] * D + columns[None, :])
    return side + (page.to(tl.int64) * STRIDE + tl.arange(0, KEYS) % PAGE * D)[:, None] + columns[None, :]


@triton.jit
def _attend(q_low, q_high, q_other, k_low, k_high, v, seen, row_max, row_sums, acc):
    """A turn of the online softmax, with a sum of weights for each column of the keys. q_other: for V in place of K's other dims.
    v of int16 is two e4m3 columns, acc the sums of even and odd ones.
    """
    k_low = operand(k_low)
    k_high = operand(k_high)
    scores = dot(q_low, tl.trans(k_low)) * LOG2E + dot(q_high, tl.trans(k_high)) * LOG2E
    if q_other is not None:
        scores += dot(q_other, tl.trans(v)) * LOG2E
    scores = tl.where(seen[None, :], scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)[:, None]
    row_sums = row_sums * rescale + weights
    return new_max, row_sums, add_values(acc, rescale, weights, v)


@triton.jit
def joined_values(side):
    if tl.float8e4nv == side.dtype.element_ty:
        side = side.to(tl.pointer_type(tl.int16), bitcast=True)
    return side


@triton.jit
def add_values(acc, rescale, weights, v):
    if v.dtype == tl.int16:
        even, odd = halves(v)
        weights = cast(weights, tl.float16)
        acc = acc[0] * rescale + dot(weights, even), acc[1] * rescale + dot(weights, odd)
    else:
        acc = acc * rescale + dot(cast(weights, v.dtype), v)
    return acc


@triton.jit
def add_splits(ticket, done, lse, parts, out, live, LSE_STRIDE: constexpr, STRIDE: constexpr, SPLITS: constexpr):
    """The last of `done` CTAs adds the splits' parts, weighted, and resets the ticket.

    `lse` [rows] and `parts` [rows, columns] point to the first split's.
    """
    tl.debug_barrier()  # every thread's part is written before the ticket is taken
    if tl.atomic_add(ticket, 1, sem="acq_rel") == done - 1:
        tl.store(ticket, 0)
        top = tl.full(live.shape, -1e30, tl.float32)
        for split in tl.static_range(SPLITS):
            top = tl.maximum(top, tl.load(lse + split * LSE_STRIDE, live & (split < done), other=-1e30, cache_modifier=".cg"))
        total = tl.zeros(live.shape, tl.float32)
        sums = tl.zeros(parts.shape, tl.float32)
        for split in tl.static_range(SPLITS):
            here = live & (split < done)
            share = tl.exp2(tl.load(lse + split * LSE_STRIDE, here, other=-1e30, cache_modifier=".cg") - top)
            share = tl.where(here, share, 0.0)
            total += share
            sums += share[:, None] * tl.load(parts + split * STRIDE, here[:, None], other=0.0, cache_modifier=".cg")
        whole = sums / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out, cast(whole, out.dtype.element_ty), live[:, None])
