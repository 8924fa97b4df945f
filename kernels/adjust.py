"""Adjusts logits before sampling, in place, on each rank's slice of the vocabulary.

    cap           l   <- c tanh(l / c)             for greedy rows too
    bias          l_i <- l_i + b_i
    repetition    l_i <- l_i / r or, below 0, l_i r                     if i is in the prompt or was generated
    presence, frequency  l_i <- l_i - p [n_i > 0] - f n_i               n_i: how often i was generated
    allowed ids, mask    l_i <- -inf                                    where the bit of i is 0
    bad words     l_i <- -inf                      where i would complete one

A NaN stays and fails the row. Rows of draft tokens count all earlier inputs as accepted. Sources: OpenAI's API reference;
arXiv:1909.05858 (repetition).
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, next_power_of_2, trigger, wait
from kernels.sample import cap, soft_capped
from kernels.sampling_batch import BAD_WORDS, BIASED, LIMITED, PENALIZED, SamplingBatch, SlotAdjustments

IN_PROMPT, MOST_COUNTED = 0x8000, 0x7FFF  # of an entry of counts
_BLOCK = constexpr(1024)
_PROMPT = constexpr(IN_PROMPT)
_MOST = constexpr(MOST_COUNTED)
_BIASED = constexpr(BIASED)
_PENALIZED = constexpr(PENALIZED)
_LIMITED = constexpr(LIMITED)
_BAD_WORDS = constexpr(BAD_WORDS)


def adjust(logits: Tensor, batch: SamplingBatch, first: int, parts: int = 1) -> SamplingBatch:
    """Cap and adjust logits fp32 [R, n] of ids from `first` on; returns the batch with `capped`. A slot's i-th row uses its i-th
    mask."""
    tables, plan, (rows, n) = batch.adjustments, batch.plan, logits.shape
    assert tables is not None, "nothing says how"
    assert plan is not None, "no step"
    if not enabled(logits):
        return replace(batch, capped=_reference(logits, batch, tables, plan, first))
    capped = logits.new_empty(rows, dtype=torch.int32)
    launch(
        _adjust, (rows, parts),
        logits, batch.slots, batch.positions, batch.tokens, batch.tokens.shape[1], plan, *tables, capped, first,
        batch.softcap or 1.0, batch.width,
        N=n, PART=cdiv(n, parts), CAP=batch.softcap is not None, BIASES=tables.bias.shape[1],
        WORD_IDS=tables.bad_words.shape[1], WORDS=tables.word_ends.shape[1], MASK_WORDS=tables.masks.shape[1], WIDE=batch.width > 1,
        STEP=batch.step,
    )  # fmt: skip
    return replace(batch, capped=capped)


def count_accepted(
    tables: SlotAdjustments, slots: Tensor, positions: Tensor, inputs: Tensor, accepted: Tensor, first: int
) -> None:
    """Count each slot's accepted inputs once, after `adjust`, among ids from `first` on.

    slots, positions  int32 [n]: distinct slots, positions of their first inputs; -1: padding
    inputs            int32 [n, W]: a row's token and drafts;  accepted int32 [n]
    """
    (rows, width), n = inputs.shape, tables.counts.shape[1]
    check_contiguous(slots, positions, inputs, accepted)
    if enabled(inputs):
        launch(
            _count_accepted, (rows,),
            slots, positions, inputs, accepted, tables.flags, tables.counts, tables.starts, first,
            N=n, WIDTH=width, LANES=next_power_of_2(width), warps=1,
        )  # fmt: skip
        return
    for slot, position, ids, count in zip(slots.tolist(), positions.tolist(), inputs.tolist(), accepted.tolist(), strict=True):
        if position >= 0 and int(tables.flags[slot]) & PENALIZED:
            new = ids[max(0, int(tables.starts[slot, 1]) - position) : count]
            tables.counts[slot] = _counted(tables.counts[slot], new, first)


# ---- references


def _reference(logits: Tensor, batch: SamplingBatch, tables: SlotAdjustments, plan: Tensor, first: int) -> Tensor:
    slots = batch.slots.long()
    flags = tables.flags[slots]
    masked = tables.mask_rows[slots, 0] == plan[batch.step]
    masks = tables.mask_rows[slots, 1] + torch.arange(len(slots), device=slots.device) % batch.width
    adjusted = ((flags != 0) | masked) & (batch.positions >= 0)
    for row in adjusted.nonzero().flatten().tolist():
        slot, position, flag = (int(of_rows[row]) for of_rows in (slots, batch.positions, flags))
        x = torch.where(logits[row] == -torch.inf, logits[row], cap(logits[row], batch.softcap))
        if flag & BIASED:
            ids = tables.bias_ids[slot].long() - first
            here = (tables.bias_ids[slot] >= 0) & (ids >= 0) & (ids < len(x))
            x = x.index_add(0, ids[here], tables.bias[slot, here])
        if flag & PENALIZED:
            inputs = range(max(position - row % batch.width, int(tables.starts[slot, 1])), position + 1)
            counts = _counted(tables.counts[slot], batch.tokens[slot, list(inputs)].tolist(), first)
            if batch.width == 1:
                tables.counts[slot] = counts
            (repetition, presence, frequency), times = tables.penalties[slot].unbind(), (counts.int() & MOST_COUNTED).float()
            x = torch.where(counts != 0, torch.where(x > 0, x / repetition, x * repetition), x)
            x = x - frequency * times - torch.where(times > 0, presence, 0.0)
        if flag & LIMITED:
            x = x.masked_fill(~_bits(tables.allowed[slot], first, len(x)), -torch.inf)
        if masked[row]:
            x = x.masked_fill(~_bits(tables.masks[masks[row]], first, len(x)), -torch.inf)
        if flag & BAD_WORDS:
            generated = batch.tokens[slot, int(tables.starts[slot, 0]) : position + 1].tolist()
            banned = [i - first for i in _completing(tables, slot, generated) if 0 <= i - first < len(x)]
            x = x.index_fill(0, x.new_tensor(banned, dtype=torch.int64), -torch.inf)
        logits[row] = torch.where(logits[row].isnan(), logits[row], x)
    return adjusted.int()


def _counted(counts: Tensor, ids: list[int], first: int) -> Tensor:
    here = counts.new_tensor([i - first for i in ids if 0 <= i - first < len(counts)], dtype=torch.int64)
    generated = (counts.int() & MOST_COUNTED).index_add(0, here, torch.ones_like(here, dtype=torch.int32))
    return (generated.clamp(max=MOST_COUNTED) - IN_PROMPT * (counts < 0)).short()


def _completing(tables: SlotAdjustments, slot: int, generated: list[int]) -> list[int]:
    ends = tables.word_ends[slot].unique().tolist()
    ids = tables.bad_words[slot].tolist()
    words = [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [word[-1] for word in words if generated[max(0, len(generated) - len(word) + 1) :] == word[:-1]]


def _bits(words: Tensor, first: int, n: int) -> Tensor:
    """bool [n]: bits of ids from `first` on; the first word holds `first`'s."""
    bits = words[:, None].bitwise_right_shift(torch.arange(32, device=words.device)).bitwise_and(1).bool().flatten()
    return bits[first % 32 : first % 32 + n]


# ---- kernels


@triton.jit
def _kept(words, ids, first, live):
    word = tl.load(words + (ids // 32 - first // 32), live, 0)
    return ((word >> (ids % 32)) & 1) != 0


@triton.jit
def _capped_finite(x, cap):
    return tl.where(x == float("-inf"), x, soft_capped(x, cap))


@triton.jit
def _ban(line, entry, here):
    x = tl.load(line + entry, here, 0.0)
    tl.store(line + entry, tl.where(x != x, x, float("-inf")), here)


@triton.jit
def _with_inputs(bits, ids, history, position, index, counted):
    generated = bits & _MOST
    for back in range(index + 1):
        came = tl.load(history + position - back, position - back >= counted, -1)
        generated += (ids == came).to(tl.int32)
    return tl.minimum(generated, _MOST) | (bits & _PROMPT)


@triton.jit(do_not_specialize=["tokens_width", "first", "width"])
def _adjust(
    logits, slots, positions, tokens, tokens_width, plan, flags, bias_ids, bias, penalties, counts, starts, allowed, bad_words,
    word_ends, masks, mask_rows, capped, first, cap, width,
    N: constexpr, PART: constexpr, CAP: constexpr, BIASES: constexpr, WORD_IDS: constexpr, WORDS: constexpr, MASK_WORDS: constexpr,
    WIDE: constexpr, STEP: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * PART
    end = tl.minimum(start + PART, N)
    wait(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    flag = tl.load(flags + slot)
    mask_rows += slot * 2
    starts += slot * 2
    masked = tl.load(mask_rows) == tl.load(plan + STEP)
    mask = masks + tl.load(mask_rows + 1).to(tl.int64) * MASK_WORDS
    index = 0
    if WIDE:  # the row's, of its slot's
        index = (row % width).to(tl.int32)
        mask += index * MASK_WORDS
    adjusted = ((flag != 0) | masked) & (position >= 0)
    if part == 0:
        tl.store(capped + row, adjusted.to(tl.int32))
    if adjusted:
        line = logits + row * N
        own_counts = counts + slot * N
        history = tokens + slot * tokens_width
        biased = (flag & _BIASED) != 0
        penalized = (flag & _PENALIZED) != 0
        limited = (flag & _LIMITED) != 0
        if biased:
            if CAP:
                for offset in range(start, end, _BLOCK):
                    entry = offset + tl.arange(0, _BLOCK)
                    tl.store(line + entry, _capped_finite(tl.load(line + entry, entry < end, 0.0), cap), entry < end)
                tl.debug_barrier()
            for offset in range(0, BIASES, _BLOCK):
                lane = offset + tl.arange(0, _BLOCK)
                ids = tl.load(bias_ids + slot * BIASES + lane, lane < BIASES, -1)
                entry = ids - first
                here = (ids >= 0) & (entry >= start) & (entry < end)
                added = tl.load(bias + slot * BIASES + lane, here, 0.0)
                tl.store(line + entry, tl.load(line + entry, here, 0.0) + added, here)
            tl.debug_barrier()
        repetition = 1.0
        presence = 0.0
        frequency = 0.0
        if penalized:
            penalties += slot * 3
            repetition = tl.load(penalties)
            presence = tl.load(penalties + 1)
            frequency = tl.load(penalties + 2)
            if not WIDE:
                entry = tl.load(history + position) - first
                here = (position >= tl.load(starts + 1)) & (entry >= start) & (entry < end)
                bits = tl.load(own_counts + entry, here, 0).to(tl.int32)
                tl.debug_barrier()
                tl.store(own_counts + entry, (tl.minimum((bits & _MOST) + 1, _MOST) | (bits & _PROMPT)).to(tl.int16), here)
                tl.debug_barrier()
        for offset in range(start, end, _BLOCK):
            entry = offset + tl.arange(0, _BLOCK)
            live = entry < end
            x = tl.load(line + entry, live, 0.0)
            bad = x != x
            if CAP & (biased == 0):
                x = _capped_finite(x, cap)
            if penalized:
                bits = tl.load(own_counts + entry, live, 0).to(tl.int32)
                if WIDE:
                    counted = tl.load(starts + 1)
                    bits = _with_inputs(bits, first + entry, history, position, index, counted)
                generated = (bits & _MOST).to(tl.float32)
                x = tl.where(bits != 0, tl.where(x > 0.0, x / repetition, x * repetition), x)
                x = x - frequency * generated - tl.where(generated > 0.0, presence, 0.0)
            if limited:
                x = tl.where(_kept(allowed + slot * MASK_WORDS, first + entry, first, live) | bad, x, float("-inf"))
            if masked:
                x = tl.where(_kept(mask, first + entry, first, live) | bad, x, float("-inf"))
            tl.store(line + entry, x, live)
        tl.debug_barrier()
        if (flag & _BAD_WORDS) != 0:
            generated = position + 1 - tl.load(starts)
            word = tl.arange(0, WORDS)
            at = word_ends + slot * WORDS + word
            word_end = tl.load(at)
            word_start = tl.load(at - 1, word > 0, 0)
            others = word_end - word_start - 1  # -1: no word
            complete = (others >= 0) & (others <= generated)
            last_ids = bad_words + slot * WORD_IDS + word_end - 1
            for back in range(1, tl.max(others, 0) + 1):
                expected = tl.load(last_ids - back, complete & (back <= others), -1)
                came = tl.load(history + position + 1 - back, back <= generated, -1)
                complete = complete & ((back > others) | (expected == came))
            entry = tl.load(last_ids, complete, -1) - first
            _ban(line, entry, complete & (entry >= start) & (entry < end))


@triton.jit(do_not_specialize=["first"])
def _count_accepted(
    slots, positions, inputs, accepted, flags, counts, starts, first,
    N: constexpr, WIDTH: constexpr, LANES: constexpr, PDL: constexpr,
):  # fmt: skip
    """One slot; lanes of the same id write the same count."""
    trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    wait(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row)
    if (position >= 0) & ((tl.load(flags + slot) & _PENALIZED) != 0):
        live = (lane < tl.load(accepted + row)) & (position + lane >= tl.load(starts + slot * 2 + 1))
        entry = tl.load(inputs + row * WIDTH + lane, live, -1) - first
        live = live & (entry >= 0) & (entry < N)
        entry = tl.where(live, entry, -1)
        times = tl.sum((entry[:, None] == entry[None, :]).to(tl.int32), 1)
        counts += slot * N
        bits = tl.load(counts + entry, live, 0).to(tl.int32)
        tl.debug_barrier()
        tl.store(counts + entry, (tl.minimum((bits & _MOST) + times, _MOST) | (bits & _PROMPT)).to(tl.int16), live)
