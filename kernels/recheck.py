"""The best logits of an fp8 head again, from the plain table.

    p_b = max l_i of a block of ids        t = the COUNT-th largest p
    l_i <- x . table_i                     where l_i >= t: at least the COUNT largest
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language import constexpr

from kernels.candidates import float_order, in_top_k
from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait

COUNT = 64  # with 0, 4 and 16, 5, 1 and 0 % of 7800 greedy choices of trained nano models differed
_BLOCKS = 1024  # of a row, with blocks of 16 to 256 ids
_CTA_IDS = 4096
_LANES = constexpr(8)  # table rows read at once
_LEAST = constexpr(-(1 << 31))


def recheck(logits: Tensor, x: Tensor, table: Tensor) -> None:
    """In place: logits fp32 [R, n]; x [R, k], table [n, k]."""
    check_contiguous(logits, x, table)
    (rows, n), k = logits.shape, x.shape[1]
    assert table.shape == (n, k), (table.shape, n, k)
    block = block_of(n)
    blocks = cdiv(n, block)
    count = min(COUNT, blocks)
    if not enabled(logits):
        _reference(logits, x, table, block, count)
        return
    peaks = logits.new_empty((rows, blocks), dtype=torch.float32)
    together = _CTA_IDS // block
    launch(_block_peaks, (rows, cdiv(blocks, together)), logits, peaks, NB=blocks, N=n, BLOCK=block, TOGETHER=together)
    each = min(4, max(1, next_power_of_2(rows) // 16))  # a GPU runs about a thousand CTAs at once; each finds the best blocks
    ctas = cdiv(count, each)
    launch(
        _recheck, (rows, ctas), logits, peaks, x, table, peaks.new_empty((rows, ctas, each * block), dtype=torch.int32),
        NB=blocks, WIDTH=next_power_of_2(blocks), MOST=count, EACH=each, N=n, BLOCK=block, K=k, BK=min(1024, next_power_of_2(k)),
    )  # fmt: skip


def block_of(n: int) -> int:
    return min(256, max(16, next_power_of_2(n // _BLOCKS)))


def _reference(logits: Tensor, x: Tensor, table: Tensor, block: int, count: int) -> None:
    padded = functional.pad(logits, (0, -logits.shape[1] % block), value=-torch.inf)
    least = padded.unflatten(1, (-1, block)).amax(-1).topk(count).values[:, -1:]
    row, column = (logits >= least).nonzero().unbind(1)
    logits[row, column] = (x[row].float() * table[column].float()).sum(1)


@triton.jit
def _block_peaks(logits, peaks, NB: constexpr, N: constexpr, BLOCK: constexpr, TOGETHER: constexpr, PDL: constexpr):
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    entry = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    wait(PDL)
    x = tl.load(logits + row * N + entry, entry < N, float("-inf"))
    tl.store(peaks + row * NB + block, tl.max(x, 1), block < NB)


@triton.jit
def _recheck(
    logits, peaks, x, table, listed,
    NB: constexpr, WIDTH: constexpr, MOST: constexpr, EACH: constexpr, N: constexpr, BLOCK: constexpr, K: constexpr, BK: constexpr,
    PDL: constexpr,
):  # fmt: skip
    trigger(PDL)  # a CTA takes EACH of a row's best blocks
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    wait(PDL)
    orders = float_order(tl.load(peaks + row * NB + place, place < NB, float("-inf")))
    orders = tl.where(place < NB, orders, _LEAST)
    best = in_top_k(orders, MOST)
    least = tl.min(tl.where(best, orders, 2147483647), 0)
    number = tl.where(best, tl.cumsum(best.to(tl.int32), 0), 0)
    of_block = tl.arange(0, EACH * BLOCK)
    entry = tl.full([EACH * BLOCK], N, tl.int32)
    for i in tl.static_range(EACH):
        wanted = tl.program_id(1) * EACH + i + 1
        first_id = tl.sum(tl.where(number == wanted, place, 0), 0) * BLOCK
        here = (of_block // BLOCK == i) & (wanted <= MOST)
        entry = tl.where(here, first_id + of_block % BLOCK, entry)
    line = logits + row * N
    over = (float_order(tl.load(line + entry, entry < N, float("-inf"))) >= least) & (entry < N)
    listed += (row * tl.num_programs(1) + tl.program_id(1)) * EACH * BLOCK
    tl.store(listed + tl.cumsum(over.to(tl.int32), 0) - 1, entry, over)
    tl.debug_barrier()
    count = tl.sum(over.to(tl.int32), 0)
    column = tl.arange(0, BK)[None, :]
    for first in range(0, count, _LANES):
        lane = first + tl.arange(0, _LANES)
        ids = tl.load(listed + lane, lane < count, 0)
        at = table + ids.to(tl.int64)[:, None] * K
        sums = tl.zeros([_LANES, BK // 8], tl.float32)
        for start in range(0, K, BK):
            inside = (start + column < K) | (K % BK == 0)
            values = tl.load(x + row * K + start + column, inside, 0.0).to(tl.float32)
            products = tl.load(at + start + column, (lane < count)[:, None] & inside, 0.0).to(tl.float32) * values
            sums += tl.sum(tl.reshape(products, [_LANES, BK // 8, 8]), 2)
        tl.store(line + ids, tl.sum(sums, 1), lane < count)
