"""Plans and results as objects: a section's row by the names of its numbers, a plan read back from its bytes, a result of rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.plan import (
    NUMBER_MASK,
    RESULT_HEAD,
    ROW_EMPTY,
    ROW_NAN,
    SECTIONS,
    PromptRow,
    ResultRow,
    StepPlan,
    StepResult,
    encode_plan,
    encode_rows,
    read_header,
    read_plan,
)


class DecodeRow(NamedTuple):
    slot: int
    width: int = 1
    flags: int = 0


class PrefillChunk(NamedTuple):
    slot: int
    start: int
    end: int
    first_logit: int
    first_span: int = 0
    spans: int = 0

    @property
    def samples(self) -> bool:
        """The last position gives a token."""
        return self.first_logit < self.end


class PageAppend(NamedTuple):
    group: int
    slot: int
    index: int
    page: int


class PageRelease(NamedTuple):
    group: int
    slot: int
    first: int
    count: int


class PageZero(NamedTuple):
    group: int
    page: int


class Span(NamedTuple):
    begin: int
    end: int


KINDS = {
    "rows": DecodeRow, "chunks": PrefillChunk, "appends": PageAppend, "releases": PageRelease, "zeros": PageZero, "spans": Span,
}  # fmt: skip


def decode_plan(data: bytes) -> StepPlan:
    """The plan in `data`, its sections as lists of objects; raises ValueError as `read_plan` does."""
    view = read_plan(data)
    sections = {name: [KINDS[name](*row) for row in getattr(view, name).tolist()] for name in SECTIONS}
    admissions = [admission._replace(tokens=np.asarray(admission.tokens).tolist()) for admission in view.admissions]
    return StepPlan(view.step, *read_header(data), view.drafts, **sections, admissions=admissions, encodes=list(view.encodes))


def decode_slots(plan: StepPlan) -> list[int]:
    """Slot of each of the plan's decode rows."""
    return [slot for slot, *_ in plan.rows]


def decode_rows(plan: StepPlan) -> list[DecodeRow]:
    """The plan's."""
    return [DecodeRow(*row) for row in plan.rows]


def listed(plan: StepPlan) -> StepPlan:
    """The plan with sections as lists of objects."""
    return decode_plan(encode_plan(plan))


def result_of(
    step: int, rows: Sequence[ResultRow], prompts: Sequence[PromptRow] = (), drafts: Sequence[Sequence[int]] = ()
) -> StepResult:
    """A result of these rows, with the drafts behind each, if there are any."""
    width = max((len(row.tokens) for row in rows), default=1)
    table = np.zeros((len(rows), RESULT_HEAD + max(width, 1)), np.int32)
    for at, row in enumerate(rows):
        head = (row.slot, row.number & NUMBER_MASK, len(row.tokens), ROW_NAN * row.nan | ROW_EMPTY * row.empty)
        table[at, : RESULT_HEAD + len(row.tokens)] = head + row.tokens
    if drafts:
        table = np.concatenate([table, np.array(drafts, np.int32)], axis=1)
    return StepResult(step, table, {at: row.logprobs for at, row in enumerate(rows) if row.logprobs}, prompts, ended=0, took_us=0)


def result_rows(result: StepResult) -> list[ResultRow]:
    """All rows of `result` as objects."""
    return [result.row(index) for index in range(len(result.table))]


def encode_result(result: StepResult) -> bytes:
    """Bytes of `result`; `decode_result` is its inverse."""
    return encode_rows(result.step, result.table, result.logprobs, result.prompts, result.ended)


def encoded(results: Sequence[StepResult]) -> list[bytes]:
    """Bytes of each, which can be compared."""
    return [encode_result(result) for result in results]
