"""Byte layout of what crosses between core and ranks: StepPlan (core -> ranks), StepResult (rank 0 -> core).

All little-endian, every section 4-byte aligned: header and fixed-width sections are one run of int32 that a rank copies to its
device as it is.

    StepPlan    header [16] | decodes [n] | chunks [n,4] | appends [n,4] | releases [n,4] | zeros [n,2] | admissions, variable
    StepResult  header | rows [n,4 + width] | logprobs, variable, only when the header says so | logprobs of prompts, variable

    plan header, int32: version, flags, step (two words), then the counts of decodes, chunks, appends, releases, zeros, admissions;
                        the rest is zero

A plan is a diff: a decode row is its slot and nothing else (the device holds its length), a page is named once when it is
appended. A plan means: releases, then admissions (which clear a slot's table rows), then appends and zeros; then the chunks and
decodes run as one forward. Ranks clear rows before releases, which comes to the same: both write the null page.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import numpy as np

from engine import logit_adjustments
from engine.protocol import MAX_ALTERNATIVES, MAX_STOP_IDS, Logprobs, PromptLogprobs, SamplingParams, token_bytes

PLAN_VERSION = 4
DEPTH = 2  # plans out at a time: one running, one queued
RESULT_WIDTH = 1
MAX_ADMITTED = 1 << 17  # numbers (`admission_size`) of one plan's admissions, one of them apart: 0.5 MiB of a ring record
MAX_SCORED = 1 << 13  # prompt tokens of one plan whose logprobs its result has: up to 1.3 MiB of a ring record
HEADER_INTS = 16
COUNTS = 4  # the header's first count: decodes, chunks, appends, releases, zeros, admissions

_WIDTHS = (1, 4, 4, 4, 2)  # int32 of a decode, chunk, append, release, zero
_PLAN = struct.Struct("<IIQ6I24x")
_ADMISSION = struct.Struct("<iiqqfff10i")
_RESULT = struct.Struct("<QIIII")
_LOGPROB_COUNT = struct.Struct("<i")
_PROMPT = struct.Struct("<iiiii")  # slot, number, first position, alternatives, tokens

FLAG_STOP = 1
FLAG_MASKED = 2
RESULT_HAS_LOGPROBS = 1
ROW_NAN = 1
ROW_EMPTY = 2
NUMBER_MASK = 0x7FFFFFFF  # of an admission's number, what a result row carries


@dataclass(frozen=True)
class PrefillChunk:
    """Positions [start, end) of `slot`. Rows from `first_logit` on want logits; first_logit == end: none do.

    The last position's logits give the sequence's next token, written at position `end` of the slot's token row.
    """

    slot: int
    start: int
    end: int
    first_logit: int

    @property
    def samples(self) -> bool:
        return self.first_logit < self.end


@dataclass(frozen=True)
class Admission:
    """A sequence takes `slot`: all its tokens so far (after a preemption also generated ones) and how it samples. One whose rows in
    flight are dropped takes its own slot again, with the pages that it has.

    `number` grows with every admission, so that a result can be told from one of the slot's last sequence. `prompt` is the
    length of the prompt proper; `params.min_tokens` counts from there. `cached`: positions whose K and V its pages hold already.
    `scored`: with `params.prompt_logprobs`, positions below it have given theirs already, at an admission before this one.
    `tokens` may be any sequence of integers; a rank reads it as an int32 array.
    """

    slot: int
    number: int
    tokens: Sequence[int]
    prompt: int
    params: SamplingParams
    adapter: int = 0
    cached: int = 0
    scored: int = 0


@dataclass(frozen=True)
class PageAppend:
    """Entry `index` of `slot`'s table row in `group` becomes `page`."""

    group: int
    slot: int
    index: int
    page: int


@dataclass(frozen=True)
class PageRelease:
    """Entries [first, first + count) of `slot`'s table row in `group` become the null page."""

    group: int
    slot: int
    first: int
    count: int


@dataclass(frozen=True)
class PageZero:
    """`page` of `group` is overwritten with zeros before this step writes to it: what it held was not finite."""

    group: int
    page: int


@dataclass(frozen=True)
class StepPlan:
    """One step for every rank. Result rows come in the order: chunks that sample, then decodes.

    Of releases and appends there may be thousands: the core has them as one int32 array, a row's four numbers after the other's.
    `masked`: in some rows not every token may come; the step's StepMasks say which.
    """

    step: int
    stop: bool = False
    releases: "list[PageRelease] | array[int]" = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    appends: "list[PageAppend] | array[int]" = field(default_factory=list)
    zeros: list[PageZero] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    masked: bool = False

    @property
    def result_slots(self) -> list[int]:
        """Slot of each result row."""
        return [chunk.slot for chunk in self.chunks if chunk.samples] + self.decodes

    @property
    def tokens(self) -> int:
        """Rows of the forward."""
        return sum(chunk.end - chunk.start for chunk in self.chunks) + len(self.decodes)


@dataclass(frozen=True, eq=False)
class PlanView:
    """A plan as a rank reads it: arrays over the record's bytes, no object a row.

    fixed      int32, header and fixed-width sections as they lie in the record: what is copied to the device
    decodes    int32 [n] slots;   chunks int32 [n, 4] (slot, start, end, first_logit)
    appends    int32 [n, 4] (group, slot, index, page);   releases int32 [n, 4] (group, slot, first, count)
    zeros      int32 [n, 2] (group, page)
    """

    step: int
    stop: bool
    masked: bool
    fixed: np.ndarray
    decodes: np.ndarray
    chunks: np.ndarray
    appends: np.ndarray
    releases: np.ndarray
    zeros: np.ndarray
    admissions: tuple[Admission, ...]

    @property
    def sampling_chunks(self) -> np.ndarray:
        """The chunks whose last position gives a token."""
        return self.chunks[self.chunks[:, 3] < self.chunks[:, 2]]

    @property
    def result_slots(self) -> np.ndarray:
        """Slot of each result row, int32."""
        return np.concatenate([self.sampling_chunks[:, 0], self.decodes])


class PlanHeader(NamedTuple):
    """What the loop around a rank's runner needs to know of a plan."""

    step: int
    stop: bool
    masked: bool


class ResultRow(NamedTuple):
    """What one result row gave. Without tokens nothing was sampled: `nan`, the logits held NaN; `empty`, every id was forbidden."""

    slot: int
    number: int
    tokens: tuple[int, ...]
    nan: bool = False
    logprobs: Logprobs | None = None
    empty: bool = False


class PromptRow(NamedTuple):
    """What a prefill chunk of an admission that asks for `prompt_logprobs` gave: `number` as in a result row."""

    slot: int
    number: int
    logprobs: PromptLogprobs


def has_numbers(logprobs: PromptLogprobs) -> bool:
    """Whether each token's logprob is a number, -inf among them: where a logit was NaN it is not."""
    words = np.frombuffer(logprobs.words, "<f4").reshape(logprobs.count, -1)
    return not np.isnan(words[:, 0]).any()


@dataclass(frozen=True, eq=False)
class StepResult:
    """Rank 0 -> core, one a plan that had rows or not, in plan order.

    table     int32 [n, 4 + width], in the order of the plan's result rows: slot, number & NUMBER_MASK, tokens given, flags, tokens
    logprobs  of the rows that report them
    prompts   of the chunks that report logprobs of prompt tokens, in the plan's order
    """

    step: int
    table: np.ndarray
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    prompts: Sequence[PromptRow] = ()

    @classmethod
    def of(cls, step: int, rows: Sequence[ResultRow], prompts: Sequence[PromptRow] = ()) -> "StepResult":
        """From objects: for fakes."""
        width = max((len(row.tokens) for row in rows), default=RESULT_WIDTH)
        table = np.zeros((len(rows), 4 + max(width, RESULT_WIDTH)), np.int32)
        for at, row in enumerate(rows):
            head = (row.slot, row.number & NUMBER_MASK, len(row.tokens), ROW_NAN * row.nan | ROW_EMPTY * row.empty)
            table[at, : 4 + len(row.tokens)] = head + row.tokens
        return cls(step, table, {at: row.logprobs for at, row in enumerate(rows) if row.logprobs is not None}, prompts)

    def row(self, at: int) -> ResultRow:
        """One row as an object."""
        slot, number, count, flags, *tokens = self.table[at].tolist()
        nan, empty = bool(flags & ROW_NAN), bool(flags & ROW_EMPTY)
        return ResultRow(slot, number, tuple(tokens[:count]), nan, self.logprobs.get(at), empty)

    @property
    def rows(self) -> list[ResultRow]:
        """All rows as objects."""
        return [self.row(at) for at in range(len(self.table))]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepResult) and (
            (self.step, self.rows, list(self.prompts)) == (other.step, other.rows, list(other.prompts))
        )

    __hash__ = None  # type: ignore[assignment]  # it holds an array


def encode_plan(plan: StepPlan) -> bytes:
    """Bytes of `plan`; `decode_plan` is its inverse."""
    flags = (FLAG_STOP if plan.stop else 0) | (FLAG_MASKED if plan.masked else 0)
    tables = [_flat(section) for section in (plan.chunks, plan.appends, plan.releases, plan.zeros)]
    counts = [len(table) // width for table, width in zip(tables, _WIDTHS[1:], strict=True)]
    header = _PLAN.pack(PLAN_VERSION, flags, plan.step, len(plan.decodes), *counts, len(plan.admissions))
    return b"".join([header, array("i", plan.decodes), *tables, *map(_encode_admission, plan.admissions)])


def _flat(rows: "Sequence[PrefillChunk | PageAppend | PageRelease | PageZero] | array[int]") -> "array[int]":
    """A section's numbers, one row's after the other's."""
    return rows if isinstance(rows, array) else array("i", [getattr(row, name) for row in rows for name in row.__match_args__])


def largest_plan(
    seqs: int, max_len: int, budget: int, page: int, groups: int, *, width: int = 1, admitted: int = MAX_ADMITTED
) -> int:
    """Bytes that no plan of the core exceeds: `seqs` sequences, rows of up to `width` positions, and `budget` prompt tokens."""
    admission = admission_size(max_len, MAX_STOP_IDS, logit_adjustments.MAX_SIZE, groups * (max_len // page + 1))
    held = most_appends(seqs, budget, page, groups, width)
    rows = seqs * (1 + 4) + 4 * held + 4 * groups * seqs + 2 * (held + groups * (max_len // page + 1))
    return 4 * (HEADER_INTS + rows + max(admission, admitted))


def most_appends(seqs: int, budget: int, page: int, groups: int, width: int = 1) -> int:
    """Pages that no plan exceeds in its rows and chunks, of which each sequence has one; those that an admission brings are counted
    with it."""
    return groups * (budget // page + seqs * -(-width // page))


def largest_result(seqs: int) -> int:
    """Bytes that no step's result exceeds: a row for each of `seqs` sequences, and MAX_SCORED prompt tokens, all with logprobs."""
    rows = seqs * (4 * (4 + RESULT_WIDTH) + _LOGPROB_COUNT.size + token_bytes(MAX_ALTERNATIVES) + _PROMPT.size)
    return _RESULT.size + rows + MAX_SCORED * token_bytes(MAX_ALTERNATIVES)


def admission_size(tokens: int, stop_ids: int, adjustments: int, pages: int) -> int:
    """Numbers of four bytes that an admission, and the appends of pages that it shares with a cached prefix, take in a plan.

    adjustments: `engine.logit_adjustments.encoded_size`.
    """
    return _ADMISSION.size // 4 + tokens + stop_ids + adjustments + 4 * pages


def read_header(data: bytes) -> PlanHeader:
    """The head of the plan in `data`; ValueError when it is of another version."""
    version, flags, step, *_ = _PLAN.unpack_from(data)
    if version != PLAN_VERSION:
        raise ValueError(f"plan version {version}, expected {PLAN_VERSION}")
    return PlanHeader(step, bool(flags & FLAG_STOP), bool(flags & FLAG_MASKED))


def read_plan(data: bytes) -> PlanView:
    """The plan in `data`, unparsed; raises ValueError when it is not one (wrong version or length)."""
    step, stop, masked = read_header(data)
    _, _, _, *counts, n_admissions = _PLAN.unpack_from(data)
    ends = list(accumulate((count * width for count, width in zip(counts, _WIDTHS, strict=True)), initial=HEADER_INTS))
    fixed = np.frombuffer(data, np.int32, ends[-1])
    decodes, *tables = (fixed[first:last] for first, last in pairwise(ends))
    chunks, appends, releases, zeros = (table.reshape(-1, width) for table, width in zip(tables, _WIDTHS[1:], strict=True))
    offset = 4 * ends[-1]
    admissions = []
    for _ in range(n_admissions):
        admission, offset = _decode_admission(data, offset)
        admissions.append(admission)
    if offset != len(data):
        raise ValueError(f"plan {step} is {len(data)} bytes long, its sections end at {offset}")
    return PlanView(step, stop, masked, fixed, decodes, chunks, appends, releases, zeros, tuple(admissions))


def decode_plan(data: bytes) -> StepPlan:
    """The plan in `data` as objects, for whoever is no rank; raises ValueError as `read_plan` does."""
    view = read_plan(data)
    return StepPlan(
        step=view.step,
        stop=view.stop,
        masked=view.masked,
        decodes=view.decodes.tolist(),
        chunks=[PrefillChunk(*row) for row in view.chunks.tolist()],
        appends=[PageAppend(*row) for row in view.appends.tolist()],
        releases=[PageRelease(*row) for row in view.releases.tolist()],
        zeros=[PageZero(*row) for row in view.zeros.tolist()],
        admissions=[replace(admission, tokens=np.asarray(admission.tokens).tolist()) for admission in view.admissions],
    )


def _ints(values: list[int] | tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _encode_admission(admission: Admission) -> bytes:
    params = admission.params
    head = _ADMISSION.pack(
        admission.slot,
        admission.prompt,
        admission.number,
        params.seed,
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        params.min_tokens,
        -1 if params.logprobs is None else params.logprobs,
        admission.adapter,
        admission.cached,
        -1 if params.prompt_logprobs is None else params.prompt_logprobs,
        admission.scored,
        len(params.stop_ids),
        len(admission.tokens),
        params.adjustments is not None,
    )
    adjustments = b"" if params.adjustments is None else logit_adjustments.encode(params.adjustments)
    return head + _ints(params.stop_ids) + np.asarray(admission.tokens, np.int32).tobytes() + adjustments


def _decode_admission(data: bytes, offset: int) -> tuple[Admission, int]:
    slot, prompt, number, seed, temperature, top_p, min_p, *rest = _ADMISSION.unpack_from(data, offset)
    top_k, min_tokens, logprobs, adapter, cached, prompt_logprobs, scored, n_stop, n_tokens, adjusted = rest
    offset += _ADMISSION.size
    stop_ids = struct.unpack_from(f"<{n_stop}i", data, offset)
    offset += 4 * n_stop
    tokens = np.frombuffer(data, np.int32, n_tokens, offset)
    adjustments, offset = logit_adjustments.decode(data, offset + 4 * n_tokens) if adjusted else (None, offset + 4 * n_tokens)
    params = SamplingParams(
        max_tokens=0,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        min_tokens=min_tokens,
        stop_ids=stop_ids,
        logprobs=None if logprobs < 0 else logprobs,
        prompt_logprobs=None if prompt_logprobs < 0 else prompt_logprobs,
        adjustments=adjustments,
    )
    return Admission(slot, number, cast("Sequence[int]", tokens), prompt, params, adapter, cached, scored), offset


def encode_result(result: StepResult) -> bytes:
    """Bytes of `result`; `decode_result` is its inverse."""
    return encode_rows(result.step, result.table, result.logprobs, result.prompts)


def encode_rows(step: int, table: np.ndarray, logprobs: Mapping[int, Logprobs], prompts: Sequence[PromptRow] = ()) -> bytes:
    """Bytes of a result whose rows are int32 [n, 4 + width]: slot, number & NUMBER_MASK, tokens given, flags, tokens."""
    assert table.dtype == np.int32, table.dtype
    assert table.shape[1] == 4 + RESULT_WIDTH, table.shape
    header = _RESULT.pack(step, len(table), RESULT_WIDTH, RESULT_HAS_LOGPROBS if logprobs else 0, len(prompts))
    lists = [_encode_logprobs(logprobs.get(row)) for row in range(len(table))] if logprobs else []
    return b"".join([header, table.tobytes(), *lists, *map(_encode_prompt, prompts)])


def _encode_prompt(row: PromptRow) -> bytes:
    slot, number, reported = row
    return _PROMPT.pack(slot, number, reported.first, reported.alternatives, reported.count) + reported.words


def _encode_logprobs(logprobs: Logprobs | None) -> bytes:
    if logprobs is None:
        return _LOGPROB_COUNT.pack(-1)
    count = len(logprobs.top)
    ids = [token for token, _ in logprobs.top]
    values = [value for _, value in logprobs.top]
    return struct.pack(f"<i{count}i{count + 1}f", count, *ids, logprobs.chosen, *values)


def decode_result(data: bytes) -> StepResult:
    """The result in `data`, in place; raises ValueError when its length is wrong."""
    step, n_rows, width, flags, n_prompts = _RESULT.unpack_from(data)
    offset = _RESULT.size + 4 * n_rows * (4 + width)
    if offset > len(data):
        raise ValueError(f"result {step} is {len(data)} bytes long, its rows end at {offset}")
    table = np.frombuffer(data, np.int32, n_rows * (4 + width), _RESULT.size).reshape(n_rows, 4 + width)
    logprobs: dict[int, Logprobs] = {}
    for at in range(n_rows if flags & RESULT_HAS_LOGPROBS else 0):
        reported, offset = _decode_logprobs(data, offset)
        if reported is not None:
            logprobs[at] = reported
    prompts = []
    for _ in range(n_prompts):
        prompt, offset = _decode_prompt(data, offset)
        prompts.append(prompt)
    if offset != len(data):
        raise ValueError(f"result {step} is {len(data)} bytes long, its sections end at {offset}")
    return StepResult(step, table, logprobs, prompts)


def _decode_prompt(data: bytes, offset: int) -> tuple[PromptRow, int]:
    slot, number, first, alternatives, count = _PROMPT.unpack_from(data, offset)
    start = offset + _PROMPT.size
    end = start + count * token_bytes(alternatives)
    return PromptRow(slot, number, PromptLogprobs(first, alternatives, data[start:end])), end


def _decode_logprobs(data: bytes, offset: int) -> tuple[Logprobs | None, int]:
    (count,) = _LOGPROB_COUNT.unpack_from(data, offset)
    if count < 0:
        return None, offset + 4
    values = struct.unpack_from(f"<{count}i{count + 1}f", data, offset + 4)
    top = list(zip(values[:count], values[count + 1 :], strict=True))
    return Logprobs(values[count], top), offset + 4 * (2 + 2 * count)
