"""Greedy and plain sampling over a vocabulary cut across ranks, without gathering logits.

    local_best    for each row and part of this rank's slice the largest, over allowed ids, of l_i if greedy, else of
                  cap(l_i) / temperature + g_i, Gumbel noise g of (seed, position, id)
    choose_best   the best of the parts, then of all ranks over their inboxes

Ties: the lowest id. `kernels.candidates` and `kernels.filters` then choose filtered rows' tokens.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.fused_allreduce_norm import Inbox, polled
from kernels.launch import cdiv, enabled, launch, next_power_of_2, trigger, wait
from kernels.sample import GREEDY, SMALL, cap, gumbel, gumbel_noise, keep, mask, noise_key, over_temperature
from kernels.sampling_batch import GREEDY_BELOW, SMALL_TOP_K, SamplingBatch

ROW_HAS_NAN, ROW_ERROR = 1, 2  # a row's flags; an error: a rank's part of a sum or a choice did not come within the bound
ROW_NO_TOKEN = 4  # every id is forbidden
_FIELDS = 4  # of a part's best: value, id (exact in fp32 below 2^24), whether there was a NaN, nothing
_EMPTY = constexpr(-(1 << 31))  # -0.0
_BLOCK = constexpr(1024)
_PART = 4096  # ids of a part at least
_PROGRAMS = 16  # a processor's: one waits for its part, block after block, and several side by side fill the wait


class ArgmaxInbox(Inbox):
    """errors: as in `AllReduceInbox`. One buffer is enough: every rank joins the next step's sums only after reading this choice.
    """

    def __init__(self, memories: Sequence[Tensor], rank: int, rows: int, errors: Tensor) -> None:
        super().__init__(memories, rank, rows, torch.int32)
        self.errors = errors

    @staticmethod
    def bytes(size: int, rows: int) -> int:
        return size * rows * _FIELDS * 4


def parts_of(vocabulary: int, rows: int, processors: int) -> int:
    parts = max(1, min(_PROGRAMS * processors // rows, vocabulary // _PART, 64))
    return 1 << (parts.bit_length() - 1)


def local_best(logits: Tensor, batch: SamplingBatch, first: int, parts: int) -> Tensor:
    """logits fp32 [R, n] of ids from `first` on, before the cap unless `batch.capped` -> fp32 [R, parts, 4]. Forbidden logits
    become -inf.
    """
    (rows, n), parameters, suppress = logits.shape, batch.parameters, batch.suppress
    if not enabled(logits):  # in one part
        slots = batch.slots.long()
        ahead = batch.positions.long() + 1
        nan = logits.isnan().any(-1)
        seeds, _, may_stop = parameters.integers[slots].unbind(1)
        stop = parameters.stop[slots].long().masked_fill((ahead >= may_stop)[:, None], -1)
        logits.copy_(mask(logits, torch.cat([stop, suppress.long().expand(rows, -1)], 1), first))
        values = logits.clone()
        drawn = ((parameters.floats[slots, 0] >= GREEDY_BELOW) & ~with_small_top_k(batch)).nonzero().flatten()
        if len(drawn):
            ids = torch.arange(first, first + n, device=logits.device)
            values[drawn] = scaled(logits[drawn], batch, drawn) + gumbel(seeds[drawn], ahead[drawn], ids)
        top, index = values.masked_fill(values.isnan(), -torch.inf).max(-1)
        return torch.stack([top, (first + index).float(), nan.float(), torch.zeros_like(top)], 1)[:, None]
    best = logits.new_empty((rows, parts, _FIELDS), dtype=torch.float32)
    launch(
        _local_best, (rows, parts),
        logits, batch.slots, batch.positions, *parameters, suppress, suppress.shape[0],
        batch.capped, best, first, batch.softcap or 1.0,
        N=n, PART=cdiv(n, parts), CAP=batch.softcap is not None, STOP=parameters.stop.shape[1],
        SUPPRESS=next_power_of_2(max(1, suppress.shape[0])),
    )  # fmt: skip
    return best


def choose_best(
    best: Tensor, batch: SamplingBatch, results: Tensor, inbox: ArgmaxInbox | None, stages: tuple[bool, bool] = (True, True)
) -> None:
    """best fp32 [R, parts, 4] -> results int32 [R, 2]: token and flags; token 0 with a NaN or if every id is forbidden. Also
    writes the token after the row's input.

    inbox None: `best` has all ranks' parts.
    """
    if not enabled(best):
        assert inbox is None, "only kernels write into other ranks' memory"
        values, ids, nan, _ = best.unbind(-1)
        top = values.amax(-1)
        bad = nan.any(-1)
        none = ~bad & top.isneginf()
        results[:, 0] = ids.masked_fill(values != top[:, None], torch.inf).amin(-1).masked_fill(bad | none, 0).int()
        results[:, 1] = torch.where(bad, ROW_HAS_NAN, 0) + torch.where(none, ROW_NO_TOKEN, 0)
        store_tokens(batch, results[:, 0])
        return
    (rows, parts, _), size = best.shape, 1 if inbox is None else inbox.size
    shared = (None, None, None, 0, 0) if inbox is None else (
        inbox.pointers, inbox.inbox, inbox.errors, inbox.rank, inbox.rows * _FIELDS
    )  # fmt: skip
    launch(
        _choose, (rows,), best, batch.slots, batch.positions, batch.tokens, batch.tokens.shape[1], results, *shared,
        PARTS=parts, LANES=next_power_of_2(parts), SIZE=size, WIDTH=next_power_of_2(size), SEND=stages[0], RECEIVE=stages[1],
        warps=1,
    )  # fmt: skip


# ---- references


def scaled(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """Logits fp32 [n, m] of the batch's rows int64 [n] -> capped and divided by temperature."""
    soft = cap(logits, batch.softcap)
    if batch.capped is not None:
        soft = torch.where(batch.capped[rows, None] != 0, logits, soft)
    temperature = batch.parameters.floats[batch.slots[rows].long(), :1]
    return torch.where(logits == -torch.inf, logits, soft / temperature)


def with_small_top_k(batch: SamplingBatch) -> Tensor:
    slots = batch.slots.long()
    top_k = batch.parameters.integers[slots, 1]
    return (top_k > 0) & (top_k <= SMALL_TOP_K) & (batch.parameters.floats[slots, 0] >= GREEDY_BELOW)


def filtered(values: Tensor, ids: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    """int32 [n]: tokens of rows int64 [n], from scaled logits fp32 [n, m] of ids int64 [n, m]; equal logits by ascending id."""
    slots = batch.slots[rows].long()
    seeds, top_k, _ = batch.parameters.integers[slots].unbind(1)
    _, top_p, min_p = batch.parameters.floats[slots].unbind(1)
    values, order = values.sort(descending=True, stable=True)
    ids = ids.gather(1, order)
    kept = values.masked_fill(~keep(values, top_k, top_p, min_p), -torch.inf)
    best = (kept + gumbel(seeds, batch.positions[rows].long() + 1, ids)).argmax(-1, keepdim=True)
    return ids.gather(1, best).squeeze(1).int()


def store_tokens(batch: SamplingBatch, chosen: Tensor) -> None:
    rows = (batch.positions >= 0).nonzero().flatten()
    batch.tokens[batch.slots[rows].long(), batch.positions[rows].long() + 1] = chosen[rows]


# ---- kernels


@triton.jit
def _has_nan(offset, live):
    x = tl.load(offset, live, 0.0)
    return tl.max((x != x).to(tl.int32), 0)


@triton.jit(do_not_specialize=["suppressed", "first"])
def _local_best(
    logits, slots, positions, integers, floats, stop, suppress, suppressed, capped, best, first, cap,
    N: constexpr, PART: constexpr, CAP: constexpr, STOP: constexpr, SUPPRESS: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * PART
    end = tl.minimum(start + PART, N)
    wait(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64) + 1
    integers += slot * 3
    seed = tl.load(integers)
    top_k = tl.load(integers + 1)
    may_stop = tl.load(integers + 2)
    temperature = tl.load(floats + slot * 3)
    drawn = (temperature >= GREEDY) & ((top_k <= 0) | (top_k > SMALL))
    line = logits + row * N
    lane = tl.arange(0, SUPPRESS)
    ids = tl.load(suppress + lane, lane < suppressed, -1) - first
    here = (lane < suppressed) & (ids >= start) & (ids < end)
    bad = _has_nan(line + ids, here)
    tl.store(line + ids, float("-inf"), here)
    if position < may_stop:
        for offset in range(0, STOP, _BLOCK):
            entry = offset + tl.arange(0, _BLOCK)
            stops = tl.load(stop + slot * STOP + entry, entry < STOP, -1)
            inside = (stops >= 0) & (stops - first >= start) & (stops - first < end)
            bad = tl.maximum(bad, _has_nan(line + stops - first, inside))
            tl.store(line + stops - first, float("-inf"), inside)
    tl.debug_barrier()
    key = noise_key(seed, position)
    nans = tl.full([_BLOCK], bad, tl.int1)
    tops = tl.full([_BLOCK], float("-inf"), tl.float32)  # of each column of the blocks: compared with one another at the end
    top_ids = tl.full([_BLOCK], start, tl.int32)
    for offset in range(start, end, _BLOCK):
        entry = offset + tl.arange(0, _BLOCK)
        x = tl.load(line + entry, entry < end, float("-inf"))
        nans |= x != x
        if drawn:
            noisy = over_temperature(x, capped, row, temperature, cap, CAP) + gumbel_noise(key, first + entry)
            x = tl.where(x == float("-inf"), x, noisy)
        top_ids = tl.where(x > tops, entry, top_ids)
        tops = tl.maximum(tops, x)  # not NaN, where one of both is
    top, token, has_nan = _first_best(tops, (first + top_ids).to(tl.float32), nans.to(tl.float32))
    out = best + (row * tl.num_programs(1) + part) * 4
    tl.store(out, top)
    tl.store(out + 1, token)
    tl.store(out + 2, has_nan)
    tl.store(out + 3, 0.0)


@triton.jit
def _first_best(values, ids, bad):
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, ids, float("inf")), 0), tl.max(bad, 0)


@triton.jit(do_not_specialize=["tokens_width", "rank", "rank_stride"])
def _choose(
    best, slots, positions, tokens, tokens_width, results, pointers, inbox, errors, rank, rank_stride,
    PARTS: constexpr, LANES: constexpr, SIZE: constexpr, WIDTH: constexpr, SEND: constexpr, RECEIVE: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = (lane < PARTS) | (LANES == PARTS)  # a mask that holds everywhere is compiled away
    wait(PDL)
    mine = best + (row * PARTS + lane) * 4
    top, token, bad = _first_best(
        tl.load(mine, inside, float("-inf")), tl.load(mine + 1, inside, 0.0), tl.load(mine + 2, inside, 0.0)
    )
    if SIZE > 1:
        if SEND:
            for peer in tl.static_range(SIZE):
                base = tl.load(pointers + peer).to(tl.pointer_type(tl.int32)) + rank * rank_stride + row * 4
                field = tl.arange(0, 4)
                values = tl.where(field == 0, top, tl.where(field == 1, token, tl.where(field == 2, bad, 0.0)))
                sent = values.to(tl.int32, bitcast=True)
                tl.store(base + field, tl.where(sent == _EMPTY, 0, sent))
        if RECEIVE:
            word = tl.arange(0, 4 * WIDTH)
            entry = inbox + (word // 4) * rank_stride + row * 4 + word % 4
            live = word < 4 * SIZE
            missing = 1
            polls = 0
            deadline = tl.full((), 0, tl.int64)
            while (missing > 0) & (deadline >= 0):
                bits = tl.load(entry, live, 0, volatile=True)
                missing = tl.max((bits == _EMPTY).to(tl.int32), 0)
                polls, deadline = polled(polls, deadline, errors)
            if missing > 0:
                tl.store(errors, 1)
            peer = tl.arange(0, WIDTH)
            theirs = inbox + peer * rank_stride + row * 4
            here = peer < SIZE
            values = tl.load(theirs, here, 0, volatile=True).to(tl.float32, bitcast=True)
            ids = tl.load(theirs + 1, here, 0, volatile=True).to(tl.float32, bitcast=True)
            flags = tl.load(theirs + 2, here, 0, volatile=True).to(tl.float32, bitcast=True)
            top, token, bad = _first_best(tl.where(here, values, float("-inf")), ids, tl.where(here, flags, 0.0))
            tl.debug_barrier()
            tl.store(entry, tl.full([4 * WIDTH], _EMPTY, tl.int32), live)
    if RECEIVE:
        failed = 0
        if SIZE > 1:
            failed = tl.load(errors, volatile=True)
        none = (bad <= 0) & (top == float("-inf"))
        chosen = tl.where((bad > 0) | none, 0.0, token).to(tl.int32)
        results += row * 2
        tl.store(results, chosen)
        tl.store(results + 1, (bad > 0).to(tl.int32) + 2 * failed + 4 * none.to(tl.int32))
        position = tl.load(positions + row)
        slot = tl.load(slots + row).to(tl.int64)
        tl.store(tokens + slot * tokens_width + position + 1, chosen, position >= 0)
