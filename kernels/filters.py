"""top_k, top_p and min_p without sorting: the token of a filtered row from its unfiltered one.

Let n_i = s_i + g_i as in `kernels.sample`. The filters keep a prefix of the ids in the order (s descending, id ascending); the
token is the argmax of n over it. Let c be the argmax of n over a set that contains the prefix, at first all ids. If c is kept, it
is the token; otherwise the ids before c are the next set. The number and mass of the ids before c decide.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.candidates import BLOCK_IDS, CTA_BLOCKS, float_order, kth_order, scaled_logits
from kernels.choose import filtered, scaled, store_tokens
from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.sample import GREEDY, gumbel_noise, noise_key
from kernels.sampling_batch import GREEDY_BELOW, SamplingBatch

_TILE = constexpr(128)  # blocks read at once; at least _TILE are listed, fewer for min_p alone


class ScaledRows(NamedTuple):
    values: Tensor  # fp32 [rows, vocabulary]
    peaks: Tensor  # fp32 [rows, blocks]: the largest value of BLOCK_IDS ids
    masses: Tensor  # fp32 [rows, blocks]: the sum of exp(value - peak)
    rank: int
    ranks: int


def scaled_rows(logits: Tensor, batch: SamplingBatch, rank: int, vocabulary: int) -> ScaledRows:
    """logits fp32 [ranks, rows, n]: every rank's slice of this rank's rows, from `choose.local_best`; columns from `vocabulary`
    on pad.
    """
    (ranks, rows, n), parameters = logits.shape, batch.parameters
    check_contiguous(logits)
    blocks = cdiv(vocabulary, BLOCK_IDS.value)
    values = logits.new_empty((rows, vocabulary), dtype=torch.float32)
    peaks, masses = logits.new_empty((2, rows, blocks), dtype=torch.float32).unbind()
    made = ScaledRows(values, peaks, masses, rank, ranks)
    if enabled(logits):
        launch(
            _scale, (rows, cdiv(blocks, CTA_BLOCKS.value)),
            logits, batch.slots, parameters.integers, parameters.floats, batch.capped, values, peaks, masses, len(batch.slots),
            rank, rows, batch.softcap or 1.0, N=n, V=vocabulary, RANKS=ranks, CAP=batch.softcap is not None,
            warps=8,
        )  # fmt: skip
    else:
        own, of_batch = _filtering(batch, made)
        values[own] = scaled(logits[:, own].transpose(0, 1).flatten(1)[:, :vocabulary], batch, of_batch)
    return made


def filtered_tokens(rows: ScaledRows, batch: SamplingBatch, chosen: Tensor) -> Tensor:
    """chosen int32 [R, 2], unfiltered, of all rows -> int32 [rows]: this rank's tokens."""
    values, peaks, masses, rank, ranks = rows
    (count, vocabulary), blocks, parameters = values.shape, peaks.shape[1], batch.parameters
    tokens = chosen.new_empty(count, dtype=torch.int32)
    if not enabled(chosen):
        mine = chosen[rank::ranks]
        tokens[: len(mine)] = mine[:, 0]
        own, of_batch = _filtering(batch, rows)
        sound = chosen[of_batch, 1] == 0
        own = own[sound]
        of_batch = of_batch[sound]
        ids = torch.arange(vocabulary, device=chosen.device).expand(len(own), -1)
        tokens[own] = filtered(values[own], ids, batch, of_batch)
        return tokens
    listed = chosen.new_empty((count, blocks), dtype=torch.int32)
    launch(
        _filter, (count,),
        values, peaks, masses, batch.slots, batch.positions, parameters.integers, parameters.floats, chosen, listed,
        tokens, len(batch.slots), rank, V=vocabulary, NB=blocks, WIDTH=next_power_of_2(blocks), RANKS=ranks, warps=8,
    )  # fmt: skip
    return tokens


def write_tokens(drawn: Tensor, batch: SamplingBatch, chosen: Tensor) -> None:
    """Write tokens int32 [>= R] to chosen and after each row's input."""
    check_contiguous(drawn)
    if enabled(drawn):
        launch(
            _write_tokens, (len(chosen),),
            drawn, batch.slots, batch.positions, batch.tokens, batch.tokens.shape[1], chosen, warps=1,
        )  # fmt: skip
    else:
        chosen[:, 0] = drawn[: len(chosen)]
        store_tokens(batch, chosen[:, 0])


# ---- reference


def _filtering(batch: SamplingBatch, share: ScaledRows) -> tuple[Tensor, Tensor]:
    rows = torch.arange(len(batch.slots), device=batch.slots.device)[share.rank :: share.ranks]
    slots = batch.slots[rows].long()
    temperature, top_p, min_p = batch.parameters.floats[slots].unbind(1)
    cuts = ((batch.parameters.integers[slots, 1] > 0) | (top_p < 1) | (min_p > 0)) & (temperature >= GREEDY_BELOW)
    return cuts.nonzero().flatten(), rows[cuts]


# ---- kernels


@triton.jit
def _is_filtered(integers, floats, slot):
    floats += slot * 3
    cuts = (tl.load(integers + slot * 3 + 1) > 0) | (tl.load(floats + 1) < 1.0) | (tl.load(floats + 2) > 0.0)
    return cuts & (tl.load(floats) >= GREEDY)


@triton.jit(do_not_specialize=["T", "rank", "share"])
def _scale(
    logits, slots, integers, floats, capped, values, peaks, masses, T, rank, share, cap,
    N: constexpr, V: constexpr, RANKS: constexpr, CAP: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    own = tl.program_id(0).to(tl.int64)
    row = own * RANKS + rank
    NB: constexpr = (V + BLOCK_IDS - 1) // BLOCK_IDS
    block = tl.program_id(1) * CTA_BLOCKS + tl.arange(0, CTA_BLOCKS)
    wait(PDL)
    if row < T:
        slot = tl.load(slots + row).to(tl.int64)
        if _is_filtered(integers, floats, slot):
            ids = block[:, None] * BLOCK_IDS + tl.arange(0, BLOCK_IDS)[None, :]
            offset = logits + (ids // N * share + own) * N + ids % N
            x = scaled_logits(offset, ids < V, capped, row, tl.load(floats + slot * 3), cap, CAP)
            tl.store(values + own * V + ids, x, ids < V)
            peak = tl.max(x, 1)
            mass = tl.sum(tl.exp(x - tl.maximum(peak, -3e38)[:, None]), 1)
            tl.store(peaks + own * NB + block, peak, block < NB)
            tl.store(masses + own * NB + block, mass, block < NB)


@triton.jit
def _load_blocks(line, listed, start, count, V: constexpr):
    entry = start + tl.arange(0, _TILE)
    block = tl.load(listed + entry, entry < count, 0)
    ids = block[:, None] * BLOCK_IDS + tl.arange(0, BLOCK_IDS)[None, :]
    return ids, tl.load(line + ids, (entry < count)[:, None] & (ids < V), float("-inf"))


@triton.jit
def _mass_from(line, listed, count, key, peak, V: constexpr):
    """Sum of exp(s - peak) over the listed s of order at least `key`, and their number."""
    mass = 0.0
    members = 0
    for offset in range(0, count, _TILE):
        _, x = _load_blocks(line, listed, offset, count, V)
        over = float_order(x) >= key
        mass += tl.sum(tl.sum(tl.where(over, tl.exp(x - peak), 0.0), 1), 0)
        members += tl.sum(tl.sum(over.to(tl.int32), 1), 0)
    return mass, members


@triton.jit
def _kth_key(line, listed, count, k, V: constexpr):
    key = tl.full([], -2147483648, tl.int32)
    for bit in range(32):
        trial = key ^ (tl.full([], 1, tl.int32) << (31 - bit))
        above = 0
        for offset in range(0, count, _TILE):
            _, x = _load_blocks(line, listed, offset, count, V)
            above += tl.sum(tl.sum((float_order(x) >= trial).to(tl.int32), 1), 0)
        key = tl.where(above >= k, trial, key)
    return key


@triton.jit(do_not_specialize=["T", "rank"])
def _filter(
    values, peaks, masses, slots, positions, integers, floats, chosen, listed, tokens, T, rank,
    V: constexpr, NB: constexpr, WIDTH: constexpr, RANKS: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    own = tl.program_id(0).to(tl.int64)
    row = own * RANKS + rank
    chosen += row * 2
    wait(PDL)
    token = 0
    if row < T:
        token = tl.load(chosen)
        slot = tl.load(slots + row).to(tl.int64)
        if _is_filtered(integers, floats, slot) & (tl.load(chosen + 1) == 0) & (tl.load(positions + row) >= 0):
            line = values + own * V
            list_ = listed + own * NB
            integers += slot * 3
            floats += slot * 3
            top_k = tl.minimum(tl.load(integers + 1), V)
            top_p = tl.load(floats + 1)
            min_p = tl.load(floats + 2)
            block = tl.arange(0, WIDTH)
            highest = tl.load(peaks + own * NB + block, block < NB, float("-inf"))
            peak = tl.max(highest, 0)
            total = tl.sum(tl.load(masses + own * NB + block, block < NB, 0.0) * tl.exp(highest - peak), 0)
            floor = tl.where(min_p > 0.0, peak + tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
            # the blocks that can hold kept ids
            needed = tl.minimum(tl.where(top_k > 0, top_k, _TILE), NB)
            orders = tl.where(block < NB, float_order(highest), -2147483648)
            key = kth_order(orders, needed)
            only_floor = (top_k == 0) & (min_p > 0.0)
            member = tl.where(only_floor, (highest >= floor) & (block < NB), orders >= key)
            count = tl.sum(member.to(tl.int32), 0)
            tl.store(list_ + tl.cumsum(member.to(tl.int32), 0) - 1, block, member)
            tl.debug_barrier()
            if (top_k == 0) & (min_p == 0.0):
                mass, _ = _mass_from(line, list_, count, key, peak, V)
                if mass < top_p * total * 1.00001:
                    count = NB
                    tl.store(list_ + block, block, block < NB)
                    tl.debug_barrier()
            kept_mass = total
            if (top_k > 0) & (top_p < 1.0):
                lowest = _kth_key(line, list_, count, top_k, V)
                kept_mass, members = _mass_from(line, list_, count, lowest, peak, V)
                least = float_order(lowest).to(tl.float32, bitcast=True)
                kept_mass -= (members - top_k) * tl.exp(least - peak)  # of its equals only the first are kept
            noise = noise_key(tl.load(integers), tl.load(positions + row).to(tl.int64) + 1)
            searching = 1
            while searching > 0:
                value = tl.load(line + token)
                before = 0.0
                above = 0
                for offset in range(0, count, _TILE):
                    ids, x = _load_blocks(line, list_, offset, count, V)
                    over = (x > value) | ((x == value) & (ids < token))
                    before += tl.sum(tl.sum(tl.where(over, tl.exp(x - peak), 0.0), 1), 0)
                    above += tl.sum(tl.sum(over.to(tl.int32), 1), 0)
                kept = (top_k == 0) | (above < top_k)
                kept = kept & ((top_p >= 1.0) | (before < top_p * kept_mass)) & (value >= floor)
                searching = tl.where(kept | (above == 0) | (value == float("-inf")), 0, 1)
                if searching > 0:
                    best = float("-inf")
                    successor = token
                    for offset in range(0, count, _TILE):
                        ids, x = _load_blocks(line, list_, offset, count, V)
                        over = (x > value) | ((x == value) & (ids < token))
                        noisy = tl.where(over, x + gumbel_noise(noise, ids), float("-inf"))
                        high = tl.max(tl.max(noisy, 1), 0)
                        first = tl.min(tl.min(tl.where(noisy == high, ids, V), 1), 0)
                        successor = tl.where(high > best, first, successor)
                        best = tl.maximum(best, high)
                    token = successor
    tl.store(tokens + own, token)


@triton.jit(do_not_specialize=["tokens_width"])
def _write_tokens(drawn, slots, positions, tokens, tokens_width, chosen, PDL: constexpr):
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    token = tl.load(drawn + row)
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(chosen + row * 2, token)
    tl.store(tokens + slot * tokens_width + position + 1, token, position >= 0)
