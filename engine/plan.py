"""StepPlan (core -> ranks) and StepResult (rank 0 -> core), and their bytes.

Little-endian; header and fixed-width sections are one run of int32 that a rank copies to its device.

    StepPlan    header [16] | rows [n,3] | chunks [n,6] | appends [n,4] | releases [n,4] | zeros [n,2] | spans [n,2]
                | admissions, msgpack | encodes, msgpack
    StepResult  header | table [n,4 + W + D] | logprobs of tokens by row, and of prompts, msgpack

    plan header, int32: 0, flags, step (two words), rows of each section, bytes of admissions; drafts; bytes of encodes; 0 ...
    rows      slot, width, flags       decode rows: the next token and width - 1 drafts
    chunks    slot, start, end, first_logit, first span, spans       positions [start, end) of a prompt; logits from first_logit on,
              the last one's give the token at `end`
    appends   group, slot, entry, page          an entry of the slot's table row becomes `page`
    releases  group, slot, first, count         entries [first, first + count) become the null page
    zeros     group, page                       zeroed before the step writes to it
    spans     begin, end                        positions of a chunk that attend bidirectionally
    table     slot, number & NUMBER_MASK, tokens given, flags, W tokens, D new drafts, if the plan is masked

A plan is a diff: releases, admissions (which clear table rows), appends and zeros, then one forward.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from engine.adapters import NO_ADAPTER
from engine.protocol import (
    MAX_ALTERNATIVES,
    MAX_SPAN,
    Logprobs,
    PlacedItem,
    PromptLogprobs,
    SamplingParams,
    pack_tokens,
    token_bytes,
)

T = TypeVar("T")
Section = list[tuple[int, ...]]  # of a plan: rows of SECTIONS[name] numbers

# Kernels get those of these numbers that they need as constexprs.
HEADER = 16  # int32 of a plan's header
STEP = 2  # index in the header of the step's low word
COUNTS = 4  # index in the header of the first section's row count; the other sections' and the bytes of admissions follow
SECTIONS = {"rows": 3, "chunks": 6, "appends": 4, "releases": 4, "zeros": 2, "spans": 2}  # in order: int32 of a row
RESULT_HEAD = 4  # int32 of a result's row in front of its tokens
DEPTH = 2  # plans out at a time: one running, one queued
MAX_ADMITTED = 1 << 17  # numbers (`admission_size`) of one plan's admissions, one of them apart: 0.5 MiB of a ring record
MAX_PARAMS = 1 << 13  # numbers of four bytes that an admission takes without its tokens and pages: 5 bytes an id, 14 a bias
MAX_SCORED = 1 << 13  # prompt tokens of one plan whose logprobs its result has: up to 1.3 MiB of a ring record

_PLAN = struct.Struct(f"<4xIQ{len(SECTIONS) + 3}I{4 * (HEADER - COUNTS - len(SECTIONS) - 3)}x")
_encode = msgspec.msgpack.Encoder().encode
_decode_admissions = msgspec.msgpack.Decoder(list[tuple[int, int, bytes, int, SamplingParams, int, int]]).decode
_NONE = _encode(())
_RESULT = struct.Struct("<IQIII")
_LOGPROBS_BYTES = 13 + 15 * MAX_ALTERNATIVES  # that Logprobs take at most
_LOGPROBS_ROW_BYTES = 10  # of a row's logprobs, at most, without its tokens'
_ENCODES_BYTES = 1 << 20  # of a plan's encodes: 4097 of 150 bytes, with 11 more for each of 12 600 spans
PROMPT_ROW_BYTES = 28  # of a PromptRow, at most, without its words

FLAG_STOP = 1
FLAG_MASKED = 2
ROW_MASKED = 1  # of a decode row
ROW_NAN = 1
ROW_EMPTY = 2
NUMBER_MASK = 0x7FFFFFFF  # of an admission's number, what a result row carries


def in_result_order(chunks: Iterable[T], rows: Iterable[T]) -> list[T]:
    return [*chunks, *rows]


class Admission(NamedTuple):
    """A sequence takes `slot`. One whose rows in flight are dropped takes its own slot again, with its pages.

    `number` tells a result from one of the slot's last sequence. A rank reads `tokens` as an int32 array. `adapter`: its slot
    (`AdapterSlots`).
    """

    slot: int
    number: int  # grows with every admission
    tokens: Sequence[int]  # all so far, generated ones too
    prompt: int  # tokens of the prompt, from which `params.min_tokens` counts
    params: SamplingParams
    cached: int = 0  # positions whose K and V are in its pages
    adapter: int = NO_ADAPTER


class Encode(NamedTuple):
    slot: int
    item: PlacedItem


_decode_encodes = msgspec.msgpack.Decoder(tuple[Encode, ...]).decode


class StepPlan(msgspec.Struct):
    step: int
    stop: bool = False
    masked: bool = False  # StepMasks limit some rows
    drafts: int = 0  # to make after each sequence's token
    rows: Section = []
    chunks: Section = []
    appends: Section = []
    releases: Section = []
    zeros: Section = []
    spans: Section = []
    admissions: list[Admission] = []
    encodes: list[Encode] = []

    @property
    def result_slots(self) -> list[int]:
        sampling = [slot for slot, _, end, first_logit, *_ in self.chunks if first_logit < end]
        return in_result_order(sampling, [slot for slot, *_ in self.rows])

    @property
    def prompt_tokens(self) -> int:
        return sum(end - start for _, start, end, *_ in self.chunks)


class PlanView(NamedTuple):
    """Sections are int32 [n, numbers of a row] over the record's bytes."""

    step: int
    masked: bool
    drafts: int
    fixed: np.ndarray  # int32, header and fixed-width sections, copied to the device
    rows: np.ndarray
    chunks: np.ndarray
    appends: np.ndarray
    releases: np.ndarray
    zeros: np.ndarray
    spans: np.ndarray
    admissions: tuple[Admission, ...]
    encodes: tuple[Encode, ...]

    @property
    def width(self) -> int:
        return int(self.rows[:, 1].max(initial=1))

    @property
    def result_slots(self) -> np.ndarray:
        return np.concatenate(in_result_order([self.chunks[self.chunks[:, 3] < self.chunks[:, 2], 0]], [self.rows[:, 0]]))


class ResultRow(NamedTuple):
    """Without tokens nothing was sampled: `nan`, the logits had NaN; `empty`, every id was forbidden."""

    slot: int
    number: int
    tokens: tuple[int, ...]
    nan: bool = False
    logprobs: Sequence[Logprobs] = ()
    empty: bool = False


class PromptRow(NamedTuple):
    slot: int
    number: int
    logprobs: PromptLogprobs


_decode_reports = msgspec.msgpack.Decoder(tuple[dict[int, list[Logprobs]], list[PromptRow]]).decode


def has_numbers(logprobs: PromptLogprobs) -> bool:
    """Whether no logprob is NaN; -inf is a number."""
    words = np.frombuffer(logprobs.words, "<f4").reshape(logprobs.count, -1)
    return not np.isnan(words[:, 0]).any()


class StepResult(NamedTuple):
    step: int
    table: np.ndarray  # int32 [n, 4 + W + D], in the order of result rows
    logprobs: Mapping[int, Sequence[Logprobs]]  # of rows that report them, one a token
    prompts: Sequence[PromptRow]  # of chunks that report prompt logprobs, in order
    ended: int  # plans with encodes since boot whose encodes have ended
    took_us: int  # microseconds of rank 0's device, and idle before (`Launched`); 0: unknown

    def split(self, decode_rows: int) -> tuple[range, range]:
        first = len(self.table) - decode_rows
        return range(first), range(first, len(self.table))

    def row(self, index: int) -> ResultRow:
        slot, number, count, flags, *tokens = self.table[index].tolist()
        nan = bool(flags & ROW_NAN)
        empty = bool(flags & ROW_EMPTY)
        return ResultRow(slot, number, tuple(tokens[:count]), nan, self.logprobs.get(index, ()), empty)


def single_rows(slots: Iterable[int]) -> Section:
    return [(slot, 1, 0) for slot in slots]


def encode_plan(plan: StepPlan) -> bytes:
    flags = FLAG_STOP * plan.stop | FLAG_MASKED * plan.masked
    sections = [getattr(plan, name) for name in SECTIONS]
    admitted = [new._replace(tokens=pack_tokens(new.tokens), params=_sent(new.params)) for new in plan.admissions]
    admissions = _encode(admitted) if admitted else b""
    encodes = _encode(plan.encodes) if plan.encodes else b""
    header = _PLAN.pack(flags, plan.step, *map(len, sections), len(admissions), plan.drafts, len(encodes))
    return b"".join([header, *map(_packed, sections), admissions, encodes])


def _packed(section: Section) -> bytes:
    numbers = [*chain.from_iterable(section)]
    return struct.pack(f"<{len(numbers)}i", *numbers)


def largest_plan(seqs: int, max_len: int, budget: int, page: int, groups: int, *, width: int) -> int:
    """Upper bound of bytes; each prompt token may be a media item with a span."""
    budget = max(budget, MAX_SPAN)
    admission = max_len + MAX_PARAMS + 4 * groups * (max_len // page + 1)
    held = most_appends(seqs, budget, page, groups, width)
    rows = seqs * (3 + 6) + 6 * budget + 4 * held + 4 * groups * seqs + 2 * (held + groups * (max_len // page + 1))
    return 4 * (HEADER + rows + max(admission, MAX_ADMITTED)) + _ENCODES_BYTES


def most_appends(seqs: int, budget: int, page: int, groups: int, width: int) -> int:
    """Upper bound for rows and chunks; an admission's are counted with it."""
    return groups * (budget // page + seqs * -(-width // page))


def largest_result(seqs: int, width: int) -> int:
    """Upper bound of bytes, all tokens with logprobs."""
    tokens = width * (8 + _LOGPROBS_BYTES)
    rows = seqs * (4 * RESULT_HEAD + tokens + _LOGPROBS_ROW_BYTES + PROMPT_ROW_BYTES)
    return _RESULT.size + rows + MAX_SCORED * token_bytes(MAX_ALTERNATIVES)


def admission_size(tokens: int, params: SamplingParams, pages: int) -> int:
    """Upper bound of an admission's four-byte numbers, with appends of its cached pages."""
    return 16 + tokens + len(_encode(_sent(params))) // 4 + 4 * pages


def read_header(data: bytes) -> tuple[bool, bool]:
    """`stop` and `masked` of a plan."""
    flags, *_ = _PLAN.unpack_from(data)
    return bool(flags & FLAG_STOP), bool(flags & FLAG_MASKED)


def read_plan(data: bytes) -> PlanView:
    """Reads in place. ValueError: wrong length."""
    flags, step, *counts, size, drafts, encodes_size = _PLAN.unpack_from(data)
    sections = {}
    end = HEADER
    for (name, width), count in zip(SECTIONS.items(), counts, strict=True):
        sections[name] = np.frombuffer(data, np.int32, count * width, 4 * end).reshape(count, width)
        end += count * width
    encodes_start = 4 * end + size
    if encodes_start + encodes_size != len(data):
        raise ValueError(f"plan {step} is {len(data)} bytes long, its sections end at {encodes_start + encodes_size}")
    admitted = _decode_admissions(memoryview(data)[4 * end : encodes_start] or _NONE)
    encodes = _decode_encodes(memoryview(data)[encodes_start:] or _NONE)
    admissions = tuple(
        Admission(slot, number, _ids(tokens), prompt, params, cached, adapter)
        for slot, number, tokens, prompt, params, cached, adapter in admitted
    )
    masked = bool(flags & FLAG_MASKED)
    return PlanView(step, masked, drafts, np.frombuffer(data, np.int32, end), **sections, admissions=admissions, encodes=encodes)


def _ids(data: bytes) -> Sequence[int]:
    return cast("Sequence[int]", np.frombuffer(data, np.int32))


def _sent(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, max_tokens=0, grammar=None, thought=None)


def encode_rows(
    step: int,
    table: np.ndarray,
    logprobs: Mapping[int, Sequence[Logprobs]],
    prompts: Sequence[PromptRow] = (),
    ended: int = 0,
) -> bytes:
    reports = _encode((logprobs, prompts))
    header = _RESULT.pack(0, step, len(table), table.shape[1] - RESULT_HEAD, ended)
    return b"".join([header, table.tobytes(), reports])


def with_time(result: bytes, took_us: int) -> bytes:
    return struct.pack("<I", took_us) + result[4:]


def decode_result(data: bytes) -> StepResult:
    """Reads in place. Raises for a wrong length."""
    took_us, step, n_rows, width, ended = _RESULT.unpack_from(data)
    columns = RESULT_HEAD + width
    table = np.frombuffer(data, np.int32, n_rows * columns, _RESULT.size).reshape(n_rows, columns)
    logprobs, prompts = _decode_reports(memoryview(data)[_RESULT.size + table.nbytes :])
    return StepResult(step, table, logprobs, prompts, ended, took_us)
