"""top_k, top_p and min_p without sorting: the token of a filtered row from the one that it would take unfiltered.

    s_i      = cap(l_i) / temperature, -inf where forbidden; n_i = s_i + g_i                       as in `kernels.sample`
    kept     what the three filters keep: upward closed in the order (s descending, id ascending)
    token    argmax of n over kept

Let c be the argmax of n over a set that holds all of kept; first over everything. If c is kept, it is the token. If not, all of
kept stands above c in that order, and what stands above c is the next set. Whether c is kept needs three sums over what stands
above it: how many, their mass, and whether there are any. With top_k and top_p both, the mass of the best k is searched for, bit
by bit of their lowest value. Sets shrink to the few best quickly: of usual rows the first or second c is the token.

Only blocks that can matter are read: `scaled_rows` notes of every _BLOCK ids the largest s and the mass, and a row's list holds
the blocks whose largest s is among the best. It holds all blocks if a row needs more.

A rank does this for its share of the rows: row i * ranks + rank of the step is its i-th. `adopt` takes in all ranks' tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.choose import _capped, _gumbel, _key
from kernels.grid import cdiv, next_power_of_2
from kernels.launch import launch, trigger, usable, wait
from kernels.sampling_batch import GREEDY_BELOW, SamplingBatch

_BLOCK = 64  # ids whose largest value is noted
_CTA_BLOCKS = 64
_LISTED = 128  # blocks read at once; at least so many are listed


@dataclass(frozen=True)
class Share:
    """Whose rows these are: the i-th is row i * ranks + rank of the step's."""

    rank: int
    ranks: int


@dataclass(frozen=True)
class ScaledRows:
    """values fp32 [rows, vocabulary]; peaks and masses fp32 [rows, blocks]: of each _BLOCK ids the largest value, and the sum of
    exp(value - peak)."""

    values: Tensor
    peaks: Tensor
    masses: Tensor


def scaled_rows(logits: Tensor, batch: SamplingBatch, share: Share, vocabulary: int) -> ScaledRows:
    """logits fp32 [ranks, rows, n], uncapped but where `batch.capped`: every rank's slice of this rank's rows.

    Rows that do not filter are left out. `batch`: all rows of the step. Columns from `vocabulary` on are nobody's.
    """
    ranks, rows, n = logits.shape
    parameters, suppress = batch.parameters, batch.suppress
    assert ranks == share.ranks, (logits.shape, share)
    assert logits.is_contiguous(), logits.stride()
    assert vocabulary <= ranks * n, (vocabulary, logits.shape)
    assert usable(logits, __name__), "kernels.sample is the reference"
    blocks = cdiv(vocabulary, _BLOCK)
    values = torch.empty((rows, vocabulary), dtype=torch.float32, device=logits.device)
    peaks, masses = torch.empty((2, rows, blocks), dtype=torch.float32, device=logits.device).unbind()
    launch(
        _scale, (rows, cdiv(blocks, _CTA_BLOCKS)),
        logits, batch.slots, batch.positions, parameters.integers, parameters.floats, parameters.stop, suppress, suppress.shape[0],
        batch.capped, values, peaks, masses, batch.slots.shape[0], share.rank, rows, batch.softcap or 1.0,
        N=n, V=vocabulary, RANKS=ranks, CAP=batch.softcap is not None, STOP=parameters.stop.shape[1],
        SUPPRESS=next_power_of_2(max(1, suppress.shape[0])), GREEDY=GREEDY_BELOW, BLOCK=_BLOCK, BLOCKS=_CTA_BLOCKS, warps=8,
    )  # fmt: skip
    return ScaledRows(values, peaks, masses)


def filtered_tokens(scaled: ScaledRows, batch: SamplingBatch, chosen: Tensor, share: Share) -> Tensor:
    """chosen int32 [R, 2], what `kernels.choose` gave, of all rows -> int32 [rows]: the tokens of this rank's rows, which are those
    of `chosen` where nothing filters."""
    (rows, vocabulary), blocks = scaled.values.shape, scaled.peaks.shape[1]
    tokens = torch.empty(rows, dtype=torch.int32, device=chosen.device)
    listed = torch.empty((rows, blocks), dtype=torch.int32, device=chosen.device)
    launch(
        _filter, (rows,),
        scaled.values, scaled.peaks, scaled.masses, batch.slots, batch.positions, batch.parameters.integers,
        batch.parameters.floats, chosen, listed, tokens, batch.slots.shape[0], share.rank,
        V=vocabulary, NB=blocks, WIDTH=next_power_of_2(blocks), RANKS=share.ranks, GREEDY=GREEDY_BELOW, BLOCK=_BLOCK,
        TILE=_LISTED, warps=8,
    )  # fmt: skip
    return tokens


def adopt(drawn: Tensor, batch: SamplingBatch, chosen: Tensor) -> None:
    """drawn fp32 [>= R], the rows' tokens in order: written to chosen int32 [R, 2] and behind each row's input."""
    rows = (batch.slots, batch.positions, batch.tokens, batch.tokens.shape[1])
    launch(_adopt, (chosen.shape[0],), drawn, drawn.stride(0), *rows, chosen, warps=1)


# ---- kernels


@triton.jit
def _filters(integers: tl.tensor, floats: tl.tensor, slot: tl.tensor, GREEDY: tl.constexpr) -> tl.tensor:
    """Whether a slot's rows are drawn from less than everything."""
    cuts = (tl.load(integers + slot * 3 + 1) > 0) | (tl.load(floats + slot * 3 + 1) < 1.0) | (tl.load(floats + slot * 3 + 2) > 0.0)
    return cuts & (tl.load(floats + slot * 3) >= GREEDY)


@triton.jit(do_not_specialize=["suppressed", "T", "rank", "share"])
def _scale(
    logits: tl.tensor, slots: tl.tensor, positions: tl.tensor, integers: tl.tensor, floats: tl.tensor, stop: tl.tensor,
    suppress: tl.tensor, suppressed: tl.tensor, capped: tl.tensor, values: tl.tensor, peaks: tl.tensor, masses: tl.tensor,
    T: tl.tensor, rank: tl.tensor, share: tl.tensor, cap: tl.tensor,
    N: tl.constexpr, V: tl.constexpr, RANKS: tl.constexpr, CAP: tl.constexpr, STOP: tl.constexpr,
    SUPPRESS: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    trigger(PDL)
    own = tl.program_id(0).to(tl.int64)
    row = own * RANKS + rank
    start = tl.program_id(1) * BLOCKS * BLOCK
    wait(PDL)
    if row < T:
        slot = tl.load(slots + row).to(tl.int64)
        if _filters(integers, floats, slot, GREEDY):
            temperature = tl.load(floats + slot * 3)
            block = tl.arange(0, BLOCKS)
            ids = start + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            x = tl.load(logits + (ids // N * share + own) * N + ids % N, ids < V, float("-inf"))
            scaled = _capped(x, cap) / temperature if CAP else x / temperature
            if capped is not None:
                scaled = tl.where(tl.load(capped + row) != 0, x / temperature, scaled)
            line = values + own * V
            tl.store(line + ids, tl.where(x == float("-inf"), x, scaled), ids < V)
            tl.debug_barrier()
            lane = tl.arange(0, SUPPRESS)
            banned = tl.load(suppress + lane, lane < suppressed, -1)
            tl.store(line + banned, float("-inf"), (banned >= start) & (banned < start + BLOCKS * BLOCK) & (banned < V))
            if tl.load(positions + row) + 1 < tl.load(integers + slot * 3 + 2):
                for at in range(0, STOP, BLOCKS * BLOCK):
                    entry = at + tl.arange(0, BLOCKS * BLOCK)
                    stops = tl.load(stop + slot * STOP + entry, entry < STOP, -1)
                    tl.store(line + stops, float("-inf"), (stops >= start) & (stops < start + BLOCKS * BLOCK) & (stops < V))
            tl.debug_barrier()
            left = tl.load(line + ids, ids < V, float("-inf"))
            peak = tl.max(left, 1)
            mass = tl.sum(tl.exp(left - tl.maximum(peak, -3e38)[:, None]), 1)
            NB: tl.constexpr = (V + BLOCK - 1) // BLOCK
            at_block = start // BLOCK + block
            tl.store(peaks + own * NB + at_block, peak, at_block < NB)
            tl.store(masses + own * NB + at_block, mass, at_block < NB)


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """fp32 -> int64 in [0, 2^32), in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _listed(
    line: tl.tensor, listed: tl.tensor, at: tl.tensor, count: tl.tensor, V: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(ids, values) [TILE, BLOCK] of the blocks that a list of `count` names from `at` on; -inf where there is none."""
    entry = at + tl.arange(0, TILE)
    block = tl.load(listed + entry, entry < count, 0)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return ids, tl.load(line + ids, (entry < count)[:, None] & (ids < V), float("-inf"))


@triton.jit
def _mass_from(
    line: tl.tensor, listed: tl.tensor, count: tl.tensor, key: tl.tensor, peak: tl.tensor,
    V: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sum of exp(s - peak) over the listed s whose order is at least `key`."""
    mass = 0.0
    for at in range(0, count, TILE):
        _, x = _listed(line, listed, at, count, V, BLOCK, TILE)
        mass += tl.sum(tl.sum(tl.where(_ordered(x) >= key, tl.exp(x - peak), 0.0), 1), 0)
    return mass


@triton.jit
def _kth_key(
    line: tl.tensor, listed: tl.tensor, count: tl.tensor, k: tl.tensor, V: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The order of the k-th largest listed value, found from its highest bit to its lowest."""
    key = tl.full([], 0, tl.int64)
    for bit in range(32):
        trial = key | (tl.full([], 2147483648, tl.int64) >> bit)
        above = 0
        for at in range(0, count, TILE):
            _, x = _listed(line, listed, at, count, V, BLOCK, TILE)
            above += tl.sum(tl.sum((_ordered(x) >= trial).to(tl.int32), 1), 0)
        key = tl.where(above >= k, trial, key)
    return key


@triton.jit(do_not_specialize=["T", "rank"])
def _filter(
    values: tl.tensor, peaks: tl.tensor, masses: tl.tensor, slots: tl.tensor, positions: tl.tensor, integers: tl.tensor,
    floats: tl.tensor, chosen: tl.tensor, listed: tl.tensor, tokens: tl.tensor, T: tl.tensor, rank: tl.tensor,
    V: tl.constexpr, NB: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row."""
    trigger(PDL)
    own = tl.program_id(0).to(tl.int64)
    row = own * RANKS + rank
    wait(PDL)
    token = 0
    if row < T:
        token = tl.load(chosen + row * 2)
        slot = tl.load(slots + row).to(tl.int64)
        if _filters(integers, floats, slot, GREEDY) & (tl.load(chosen + row * 2 + 1) == 0) & (tl.load(positions + row) >= 0):
            line, list_ = values + own * V, listed + own * NB
            top_k = tl.minimum(tl.load(integers + slot * 3 + 1), V)
            top_p, min_p = tl.load(floats + slot * 3 + 1), tl.load(floats + slot * 3 + 2)
            block = tl.arange(0, WIDTH)
            highest = tl.load(peaks + own * NB + block, block < NB, float("-inf"))
            peak = tl.max(highest, 0)
            total = tl.sum(tl.load(masses + own * NB + block, block < NB, 0.0) * tl.exp(highest - peak), 0)
            floor = tl.where(min_p > 0.0, peak + tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
            # the blocks that can hold what is kept
            wanted = tl.minimum(tl.where(top_k > 0, top_k, TILE), NB)
            orders = tl.where(block < NB, _ordered(highest), -1)
            key = tl.full([], 0, tl.int64)
            for bit in range(32):
                trial = key | (tl.full([], 2147483648, tl.int64) >> bit)
                key = tl.where(tl.sum((orders >= trial).to(tl.int32), 0) >= wanted, trial, key)
            only_floor = (top_k == 0) & (min_p > 0.0)
            member = tl.where(only_floor, (highest >= floor) & (block < NB), orders >= key)
            count = tl.sum(member.to(tl.int32), 0)
            tl.store(list_ + tl.cumsum(member.to(tl.int32), 0) - 1, block, member)
            tl.debug_barrier()
            if (top_k == 0) & (min_p == 0.0):  # noqa: SIM102 (the second condition costs a pass)
                if _mass_from(line, list_, count, key, peak, V, BLOCK, TILE) < top_p * total * 1.00001:
                    count = NB
                    tl.store(list_ + block, block, block < NB)
                    tl.debug_barrier()
            kept_mass = total
            if (top_k > 0) & (top_p < 1.0):
                lowest = _kth_key(line, list_, count, top_k, V, BLOCK, TILE)
                kept_mass = _mass_from(line, list_, count, lowest, peak, V, BLOCK, TILE)
            noise = _key(tl.load(integers + slot * 3), tl.load(positions + row).to(tl.int64) + 1)
            searching = 1
            while searching > 0:
                value = tl.load(line + token)
                before, larger, above = 0.0, 0, 0
                for at in range(0, count, TILE):
                    ids, x = _listed(line, list_, at, count, V, BLOCK, TILE)
                    over = (x > value) | ((x == value) & (ids < token))
                    before += tl.sum(tl.sum(tl.where(over, tl.exp(x - peak), 0.0), 1), 0)
                    larger += tl.sum(tl.sum((x > value).to(tl.int32), 1), 0)
                    above += tl.sum(tl.sum(over.to(tl.int32), 1), 0)
                kept = (top_k == 0) | (larger < top_k)
                kept = kept & ((top_p >= 1.0) | (before < top_p * kept_mass)) & (value >= floor)
                searching = tl.where(kept | (above == 0) | (value == float("-inf")), 0, 1)
                if searching > 0:
                    best, successor = float("-inf"), token
                    for at in range(0, count, TILE):
                        ids, x = _listed(line, list_, at, count, V, BLOCK, TILE)
                        over = (x > value) | ((x == value) & (ids < token))
                        noisy = tl.where(over, x + _gumbel(noise, ids), float("-inf"))
                        high = tl.max(tl.max(noisy, 1), 0)
                        first = tl.min(tl.min(tl.where(noisy == high, ids, V), 1), 0)
                        successor = tl.where(high > best, first, successor)
                        best = tl.maximum(best, high)
                    token = successor
    tl.store(tokens + own, token)


@triton.jit(do_not_specialize=["stride", "tokens_width"])
def _adopt(
    drawn: tl.tensor, stride: tl.tensor, slots: tl.tensor, positions: tl.tensor, tokens: tl.tensor, tokens_width: tl.tensor,
    chosen: tl.tensor, PDL: tl.constexpr,
) -> None:  # fmt: skip
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    wait(PDL)
    token = tl.load(drawn + row * stride).to(tl.int32)
    position, slot = tl.load(positions + row), tl.load(slots + row).to(tl.int64)
    tl.store(chosen + row * 2, token)
    tl.store(tokens + slot * tokens_width + position + 1, token, position >= 0)
