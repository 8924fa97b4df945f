"""The token of a row with a small top_k, perhaps with top_p and min_p, from a few ids of each rank.

    candidates   the best SMALL_TOP_K ids of this rank's slice by s_i = cap(l_i) / temperature; ties: the lower id
    choose       the k best candidates, cut by top_p and min_p; of these the argmax of s_i + g_i

The k best ids lie in the k blocks with the largest values; only these are read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language import constexpr

from kernels.choose import filtered, scaled, store_tokens, with_small_top_k
from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.sample import GREEDY, SMALL, gumbel_noise, noise_key, over_temperature
from kernels.sampling_batch import SMALL_TOP_K, SamplingBatch

BLOCK_IDS = constexpr(64)  # of a block, whose largest value is noted
CTA_BLOCKS = constexpr(64)


def block_peaks(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """logits fp32 [R, n] from `choose.local_best` -> fp32 [R, blocks]: the largest s of every BLOCK_IDS ids, if a row has a small
    top_k."""
    (rows, n), parameters = logits.shape, batch.parameters
    check_contiguous(logits)
    blocks = cdiv(n, BLOCK_IDS.value)
    peaks = logits.new_empty((rows, blocks), dtype=torch.float32)
    if not enabled(logits):
        small = with_small_top_k(batch).nonzero().flatten()
        values = functional.pad(scaled(logits[small], batch, small), (0, -n % BLOCK_IDS.value), value=-torch.inf)
        peaks[small] = values.unflatten(1, (-1, BLOCK_IDS.value)).amax(-1)
        return peaks
    launch(
        _peaks, (rows, cdiv(blocks, CTA_BLOCKS.value)),
        logits, batch.slots, parameters.integers, parameters.floats, batch.capped, batch.softcap or 1.0, peaks, NB=blocks, N=n,
        CAP=batch.softcap is not None, warps=8,
    )  # fmt: skip
    return peaks


def candidates(logits: Tensor, peaks: Tensor, batch: SamplingBatch, first: int) -> Tensor:
    """logits fp32 [R, n] of ids from `first` on, and `block_peaks` -> fp32 [R, SMALL_TOP_K, 2]: s and id, ids ascending; -inf
    pads.
    """
    (rows, n), (_, blocks), parameters = logits.shape, peaks.shape, batch.parameters
    best = logits.new_empty((rows, SMALL_TOP_K, 2), dtype=torch.float32)
    count = min(SMALL_TOP_K, n)
    if not enabled(logits):
        best[:] = torch.tensor([-torch.inf, 0.0])
        small = with_small_top_k(batch).nonzero().flatten()
        values = scaled(logits[small], batch, small)
        ids = values.argsort(descending=True, stable=True)[:, :count].sort().values
        best[small, :count] = torch.stack([values.gather(1, ids), (first + ids).float()], -1)
        return best
    listed = logits.new_empty((rows, SMALL_TOP_K), dtype=torch.int32)
    launch(
        _candidates, (rows,),
        logits, batch.slots, parameters.integers, parameters.floats, batch.capped, batch.softcap or 1.0, peaks, listed, best, first,
        NB=blocks, WIDTH=next_power_of_2(blocks), N=n, CAP=batch.softcap is not None, FEW=min(SMALL_TOP_K, blocks),
        COUNT=count, warps=16,
    )  # fmt: skip
    return best


def choose_candidates(best: Tensor, batch: SamplingBatch, chosen: Tensor) -> None:
    """best fp32 [R, n, 2]: all ranks' `candidates`. Writes unflagged tokens to chosen int32 [R, 2] and after the rows' inputs."""
    check_contiguous(best)
    rows, count, _ = best.shape
    if not enabled(best):
        small = (with_small_top_k(batch) & (chosen[:, 1] == 0)).nonzero().flatten()
        values, ids = best[small].unbind(-1)
        chosen[small, 0] = filtered(values, ids.long(), batch, small)
        store_tokens(batch, chosen[:, 0])
        return
    launch(
        _choose_candidates, (rows,),
        best, batch.slots, batch.positions, batch.parameters.integers, batch.parameters.floats, batch.tokens,
        batch.tokens.shape[1], chosen, COUNT=count, WIDTH=next_power_of_2(count),
    )  # fmt: skip


# ---- kernels


@triton.jit
def _has_small_top_k(integers, floats, slot):
    top_k = tl.load(integers + slot * 3 + 1)
    return (top_k > 0) & (top_k <= SMALL) & (tl.load(floats + slot * 3) >= GREEDY)


@triton.jit
def scaled_logits(offset, live, capped, row, temperature, cap, CAP: constexpr):
    x = tl.load(offset, live, float("-inf"))
    scaled = over_temperature(x, capped, row, temperature, cap, CAP)
    return tl.where(x == float("-inf"), x, scaled)


@triton.jit
def float_order(x):
    """fp32 -> int32 in the same order, above -2^31; its own inverse on the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def kth_order(orders, count):
    key = tl.full([], -2147483648, tl.int32)
    for bit in range(32):
        trial = key ^ (tl.full([], 1, tl.int32) << (31 - bit))
        key = tl.where(tl.sum((orders >= trial).to(tl.int32), 0) >= count, trial, key)
    return key


@triton.jit
def in_top_k(orders, count):
    key = kth_order(orders, count)
    over = (orders > key).to(tl.int32)
    equal = (orders == key).to(tl.int32)
    return (over > 0) | ((equal > 0) & (tl.cumsum(equal, 0) <= count - tl.sum(over, 0)))


@triton.jit
def _peaks(logits, slots, integers, floats, capped, cap, peaks, NB: constexpr, N: constexpr, CAP: constexpr, PDL: constexpr):
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * CTA_BLOCKS + tl.arange(0, CTA_BLOCKS)
    wait(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    if _has_small_top_k(integers, floats, slot):
        entry = block[:, None] * BLOCK_IDS + tl.arange(0, BLOCK_IDS)[None, :]
        x = scaled_logits(logits + row * N + entry, entry < N, capped, row, tl.load(floats + slot * 3), cap, CAP)
        tl.store(peaks + row * NB + block, tl.max(x, 1), block < NB)


@triton.jit(do_not_specialize=["first"])
def _candidates(
    logits, slots, integers, floats, capped, cap, peaks, listed, best, first,
    NB: constexpr, WIDTH: constexpr, N: constexpr, CAP: constexpr, FEW: constexpr, COUNT: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    if _has_small_top_k(integers, floats, slot):
        block = tl.arange(0, WIDTH)
        orders = tl.where(block < NB, float_order(tl.load(peaks + row * NB + block, block < NB, float("-inf"))), -2147483648)
        member = in_top_k(orders, FEW)
        list_ = listed + row * SMALL
        tl.store(list_ + tl.cumsum(member.to(tl.int32), 0) - 1, block, member)
        tl.debug_barrier()
        lane = tl.arange(0, SMALL * BLOCK_IDS)
        live = lane // BLOCK_IDS < FEW
        entry = tl.load(list_ + lane // BLOCK_IDS, live, 0) * BLOCK_IDS + lane % BLOCK_IDS
        live = live & (entry < N)
        x = scaled_logits(logits + row * N + entry, live, capped, row, tl.load(floats + slot * 3), cap, CAP)
        kept = in_top_k(tl.where(live, float_order(x), -2147483648), COUNT)
        out = best + row * SMALL * 2
        index = tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(out + index * 2, x, kept)
        tl.store(out + index * 2 + 1, (first + entry).to(tl.float32), kept)
        place = tl.arange(0, SMALL)
        tl.store(out + place * 2, tl.full([SMALL], float("-inf"), tl.float32), place >= COUNT)
        tl.store(out + place * 2 + 1, tl.full([SMALL], 0.0, tl.float32), place >= COUNT)


@triton.jit(do_not_specialize=["tokens_width"])
def _choose_candidates(
    best, slots, positions, integers, floats, tokens, tokens_width, chosen,
    COUNT: constexpr, WIDTH: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    if _has_small_top_k(integers, floats, slot) & (tl.load(chosen + row * 2 + 1) == 0) & (position >= 0):
        lane = tl.arange(0, WIDTH)
        live = lane < COUNT
        entry = best + (row * COUNT + lane) * 2
        x = tl.load(entry, live, float("-inf"))
        ids = tl.load(entry + 1, live, 0.0).to(tl.int32)
        integers += slot * 3
        floats += slot * 3
        top_k = tl.load(integers + 1).to(tl.int32)
        top_p = tl.load(floats + 1)
        min_p = tl.load(floats + 2)
        peak = tl.max(x, 0)
        left = in_top_k(tl.where(live, float_order(x), -2147483648), top_k) & (x > float("-inf"))
        mass = tl.where(left, tl.exp(x - peak), 0.0)
        total = tl.sum(mass, 0)
        left = left & (x >= tl.where(min_p > 0.0, peak + tl.log(tl.maximum(min_p, 1e-38)), float("-inf")))
        noisy = x + gumbel_noise(noise_key(tl.load(integers), position + 1), ids)
        token = 0
        searching = 1
        while searching > 0:
            high = tl.max(tl.where(left, noisy, float("-inf")), 0)
            token = tl.min(tl.where(left & (noisy == high), ids, 2147483647), 0)
            value = tl.max(tl.where(left & (ids == token), x, float("-inf")), 0)
            left = left & ((x > value) | ((x == value) & (ids < token)))
            before = tl.sum(tl.where(left, mass, 0.0), 0)
            searching = tl.where((top_p >= 1.0) | (before < top_p * total), 0, tl.sum(left.to(tl.int32), 0))
        tl.store(chosen + row * 2, token)
        tl.store(tokens + slot * tokens_width + position + 1, token)
