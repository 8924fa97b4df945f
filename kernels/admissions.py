"""Writes new sequences into the slots' tables, in one upload and one launch.

    packed   a record (RECORD_FIELDS) for each sequence, then each one's stop ids and tokens

A slot's page table rows become 0, and its unused stop ids -1. Later tokens stay.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from kernels.launch import cdiv, check_contiguous, enabled, launch, trigger, wait
from kernels.sampling_batch import SlotParameters

# The record of a sequence: a name and a numpy format a field, without padding. It is declared here and nowhere else.
RECORD_FIELDS = (
    ("slot", "<i4"),
    ("begin", "<i4"),  # where its stop ids begin in `packed`; its tokens follow them
    ("stop_ids", "<i4"),  # how many
    ("tokens", "<i4"),  # how many
    ("length", "<i4"),
    ("seed", "<i8"),  # from here on as in SlotParameters.integers
    ("top_k", "<i8"),
    ("min_length", "<i8"),
    ("temperature", "<f4"),  # from here on as in SlotParameters.floats
    ("top_p", "<f4"),
    ("min_p", "<f4"),
)
_WORDS = [int(form[-1]) // 4 for _, form in RECORD_FIELDS]
_NAMES = [name for name, _ in RECORD_FIELDS]
RECORD = sum(_WORDS)  # int32 of a record
_INTEGERS = sum(_WORDS[: _NAMES.index("seed")])
_FLOATS = sum(_WORDS[: _NAMES.index("temperature")])
_BLOCK = 1024


def admit(
    packed: Tensor, count: int, most: int, tokens: Tensor, lengths: Tensor, tables: Sequence[Tensor], parameters: SlotParameters
) -> None:
    """packed int32 with `count` records of up to `most` tokens each; tokens int32 [slots, n]; lengths int32 [slots]; one or two
    tables int32 [slots, width]."""
    check_contiguous(packed, tokens, lengths, *tables, *parameters)
    first = tables[0]
    last = tables[-1]
    stops = parameters.stop.shape[1]
    if enabled(packed):
        blocks = cdiv(max(most, stops, first.shape[1], last.shape[1]), _BLOCK)
        launch(
            _admit, (count, blocks),
            packed, tokens, tokens.shape[1], lengths, first, first.shape[1], last, last.shape[1],
            parameters.integers.view(torch.int32), parameters.floats.view(torch.int32), parameters.stop,
            RECORD=RECORD, INTEGERS=_INTEGERS, FLOATS=_FLOATS, STOPS=stops, BLOCK=_BLOCK,
        )  # fmt: skip
        return
    for record in packed[: count * RECORD].view(count, RECORD):
        slot, begin, stop_ids, size, length = record[:5].tolist()
        for table in tables:
            table[slot] = 0
        parameters.stop[slot] = -1
        parameters.stop[slot, :stop_ids] = packed[begin : begin + stop_ids]
        tokens[slot, :size] = packed[begin + stop_ids : begin + stop_ids + size]
        lengths[slot] = length
        parameters.integers[slot] = record[_INTEGERS:_FLOATS].clone().view(torch.int64)
        parameters.floats[slot] = record[_FLOATS:].view(torch.float32)


@triton.jit(do_not_specialize=["tokens_width", "first_width", "last_width"])
def _admit(
    packed, tokens, tokens_width, lengths, first_table, first_width, last_table, last_width, integers, floats, stop,
    RECORD: constexpr, INTEGERS: constexpr, FLOATS: constexpr, STOPS: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    trigger(PDL)
    record = packed + tl.program_id(0) * RECORD
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    slot = tl.load(record).to(tl.int64)
    begin = tl.load(record + 1)
    stop_ids = tl.load(record + 2)
    size = tl.load(record + 3)
    tl.store(first_table + slot * first_width + lane, 0, lane < first_width)
    tl.store(last_table + slot * last_width + lane, 0, lane < last_width)
    tl.store(stop + slot * STOPS + lane, tl.load(packed + begin + lane, lane < stop_ids, -1), lane < STOPS)
    tl.store(tokens + slot * tokens_width + lane, tl.load(packed + begin + stop_ids + lane, lane < size, 0), lane < size)
    if tl.program_id(1) == 0:
        tl.store(lengths + slot, tl.load(record + 4))
        word = tl.arange(0, 8)
        tl.store(integers + slot * 6 + word, tl.load(record + INTEGERS + word, word < 6, 0), word < 6)
        tl.store(floats + slot * 3 + word, tl.load(record + FLOATS + word, word < 3, 0), word < 3)
