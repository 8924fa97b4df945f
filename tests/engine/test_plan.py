"""The byte layouts: what goes in comes out, whatever it is, and what is no record is refused."""

import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.channel import create_shared, map_shared
from engine.logit_adjustments import MAX_ALLOWED_IDS, MAX_BAD_WORD_IDS, MAX_BAD_WORDS, MAX_BIAS_IDS, LogitAdjustments
from engine.memory import ENCODER_ROWS
from engine.plan import (
    _ENCODES_BYTES,
    COUNTS,
    HEADER,
    MAX_PARAMS,
    MAX_SCORED,
    PROMPT_ROW_BYTES,
    RESULT_HEAD,
    ROW_MASKED,
    SECTIONS,
    STEP,
    Admission,
    Encode,
    PromptRow,
    ResultRow,
    StepPlan,
    StepResult,
    admission_size,
    decode_result,
    encode_plan,
    encode_rows,
    largest_result,
    read_header,
    read_plan,
    single_rows,
    with_time,
)
from engine.protocol import (
    MAX_ALTERNATIVES,
    MAX_MEDIA_BYTES,
    MAX_STOP_IDS,
    Logprobs,
    MediaKind,
    PlacedItem,
    PromptLogprobs,
    SamplingParams,
    token_bytes,
)
from engine.rank_status import STATUS_BYTES, EncoderFigures, RankStatus, StatusBlock
from engine.vision_geometry import SIDE
from tests.support.engine.plans import (
    KINDS,
    DecodeRow,
    PageAppend,
    PageRelease,
    PageZero,
    PrefillChunk,
    Span,
    decode_plan,
    encode_result,
    result_of,
    result_rows,
)
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure

INT32 = st.integers(0, 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
SMALL = st.integers(0, 2**20)


def lists(element: Callable[..., object], *fields: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    return st.lists(st.builds(element, *fields), max_size=6)


ADJUSTMENTS = st.builds(
    LogitAdjustments,
    repetition_penalty=FLOAT32,
    presence_penalty=FLOAT32,
    frequency_penalty=FLOAT32,
    bias=st.lists(st.tuples(INT32, FLOAT32), max_size=3).map(tuple),
    allowed_ids=st.lists(INT32, max_size=3).map(tuple),
    bad_words=st.lists(st.lists(INT32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(0),
    temperature=FLOAT32,
    top_k=SMALL,
    top_p=FLOAT32,
    min_p=FLOAT32,
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=SMALL,
    stop_ids=st.lists(INT32, max_size=5).map(tuple),
    logprobs=st.none() | st.integers(0, 100),
    prompt_logprobs=st.none() | st.integers(0, 20),
    adjustments=st.none() | ADJUSTMENTS,
)


TOKENS = st.lists(INT32, max_size=40)
ADMISSION = lists(Admission, INT32, st.integers(0, 2**63 - 1), TOKENS, SMALL, PARAMS, SMALL, st.integers(-1, 63))
RUNS = st.lists(st.tuples(INT32, INT32), max_size=3).map(tuple)
SHAPES = st.lists(SMALL, max_size=4).map(tuple)
PLACED = st.builds(
    PlacedItem, INT32, SMALL, st.binary(min_size=32, max_size=32), RUNS, st.sampled_from(get_args(MediaKind)), SHAPES,
    st.integers(0, 2**63 - 1),
)  # fmt: skip
PLANS = st.builds(
    StepPlan, step=st.integers(0, 2**64 - 1), stop=st.booleans(), releases=lists(PageRelease, INT32, INT32, INT32, INT32),
    admissions=ADMISSION, appends=lists(PageAppend, INT32, INT32, INT32, INT32), zeros=lists(PageZero, INT32, INT32),
    chunks=lists(PrefillChunk, INT32, INT32, INT32, INT32, INT32, INT32), masked=st.booleans(),
    rows=lists(DecodeRow, INT32, INT32, st.sampled_from([0, ROW_MASKED])), spans=lists(Span, INT32, INT32),
    encodes=lists(Encode, INT32, PLACED),
)
LOGPROBS = st.builds(Logprobs, FLOAT32, st.lists(st.tuples(INT32, FLOAT32), max_size=5))
GIVEN = st.lists(st.tuples(INT32, LOGPROBS), max_size=4)  # tokens, and their logprobs
ROWS = st.builds(
    lambda slot, number, given, nan, empty, reports: ResultRow(
        slot, number, tuple(token for token, _ in given), nan, [one for _, one in given] if reports and given else (), empty
    ),
    INT32, INT32, GIVEN, st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
PIECES = st.integers(0, 3).flatmap(
    lambda count: st.builds(
        PromptLogprobs, INT32, st.just(count), st.lists(st.binary(min_size=8 + 8 * count, max_size=8 + 8 * count)).map(b"".join)
    )
)
RESULTS = st.builds(
    result_of, st.integers(0, 2**64 - 1), st.lists(ROWS, max_size=8), lists(PromptRow, INT32, INT32, PIECES)
)


@given(PLANS)
def test_plans_come_back(plan: StepPlan) -> None:
    """Any plan decodes to itself."""
    assert decode_plan(encode_plan(plan)) == plan


@given(PLANS)
def test_admissions_take_no_more_than_was_counted(plan: StepPlan) -> None:
    """The scheduler's count of a plan's admissions bounds what they take in it."""
    bound = sum(admission_size(len(admission.tokens), admission.params, 0) for admission in plan.admissions)
    assert len(encode_plan(plan)) - len(encode_plan(msgspec.structs.replace(plan, admissions=[]))) <= 4 * bound


def test_the_largest_admission_is_bounded() -> None:
    """Of everything as much as may be, in the largest numbers: no request takes more than MAX_PARAMS beside its tokens; twice as
    many biases would."""
    ids, least = tuple(range(2**31 - 1 - MAX_BIAS_IDS, 2**31 - 1)), float("-inf")
    words = [(ids[0],)] * (MAX_BAD_WORDS - 1) + [ids[: MAX_BAD_WORD_IDS - MAX_BAD_WORDS + 1]]

    def size(repeats: int) -> int:
        adjustments = LogitAdjustments(
            repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, allowed_ids=ids[:MAX_ALLOWED_IDS],
            bias=tuple((token, least) for token in ids) * repeats, bad_words=tuple(words),
        )  # fmt: skip
        params = SamplingParams(
            max_tokens=1, temperature=0.1, top_k=2**31 - 1, top_p=0.1, min_p=0.1, seed=2**63 - 1, min_tokens=2**31 - 1,
            stop_ids=ids[:MAX_STOP_IDS], logprobs=20, prompt_logprobs=20, adjustments=adjustments, drafts=False,
        )  # fmt: skip
        return admission_size(0, params, 0)

    assert size(1) <= MAX_PARAMS < size(2)


def test_the_largest_media_are_bounded() -> None:
    """Pictures of a soft token each, as many as a step encodes, and a film of as many frames as a request's bytes allow; the same
    film and four times as many pictures would be too many."""

    def size(times: int) -> int:
        frames, place = MAX_MEDIA_BYTES // (SIDE * SIDE * 3), 1 << 40
        spans = tuple((500_000 + 2 * frame, 500_001 + 2 * frame) for frame in range(frames))
        film = PlacedItem(500_000, 2 * frames, bytes(32), spans, "video", (frames, SIDE, SIDE, 3), place)
        one = PlacedItem(500_000, 1, bytes(32), ((500_000, 500_001),), "image", (SIDE, SIDE, 3), place)
        encodes = [Encode(1, item) for item in (film, *[one] * ENCODER_ROWS * times)]
        return len(encode_plan(StepPlan(1, encodes=encodes))) - len(encode_plan(StepPlan(1)))

    assert size(1) <= _ENCODES_BYTES < size(4)


@given(PLANS)
def test_a_rank_reads_sections_in_place(plan: StepPlan) -> None:
    """The arrays that a rank reads are the plan's rows, and header and sections are one run of int32 at the record's start."""
    data = encode_plan(plan)
    view = read_plan(data)
    assert (view.step, view.masked, *read_header(data)) == (plan.step, plan.masked, plan.stop, plan.masked)
    assert view.fixed.tobytes() == data[: view.fixed.nbytes]
    assert view.fixed[STEP] == np.uint32(plan.step & 0xFFFFFFFF).view(np.int32)
    sections = [getattr(view, name) for name in SECTIONS]
    *counts, admissions, drafts, encodes = view.fixed[COUNTS : COUNTS + len(SECTIONS) + 3].tolist()
    assert (counts, drafts) == ([*map(len, sections)], plan.drafts)
    assert admissions + encodes == len(data) - view.fixed.nbytes
    assert (encodes > 0) == bool(plan.encodes)
    assert np.array_equal(view.fixed[HEADER:], np.concatenate([section.ravel() for section in sections]))
    for name, section in zip(SECTIONS, sections, strict=True):
        assert section.tolist() == [list(row) for row in getattr(plan, name)]
    assert view.result_slots.tolist() == plan.result_slots


def test_the_names_of_numbers_are_as_many_as_the_numbers() -> None:
    """Each section's rows are as wide as the layout says."""
    assert {name: len(kind._fields) for name, kind in KINDS.items()} == SECTIONS


@pytest.mark.parametrize(
    ("records", "encode", "decode"), [(PLANS, encode_plan, decode_plan), (RESULTS, encode_result, decode_result)]
)
@given(st.data())
def test_what_is_cut_or_grown_is_refused(
    records: st.SearchStrategy[Any], encode: Callable[[Any], bytes], decode: Callable[[bytes], object], data: st.DataObject
) -> None:
    """A plan or a result that lost its tail, or got one, is an error and never another one."""
    whole = encode(data.draw(records))
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0\0\0\0"):
        with pytest.raises((ValueError, struct.error)):
            decode(wrong)


@given(RESULTS)
def test_results_come_back(result: StepResult) -> None:
    """Any result decodes to itself: rows of different widths, NaN flags, logprobs of every token of some rows."""
    again = decode_result(with_time(encode_result(result), 2**32 - 1))
    assert (again.step, result_rows(again), again.prompts) == (result.step, result_rows(result), list(result.prompts))
    assert (again.took_us, decode_result(encode_result(result)).took_us) == (2**32 - 1, 0)
    assert again.table.shape[1] == RESULT_HEAD + max([1, *(len(row.tokens) for row in result_rows(result))])


def test_logprobs_of_a_prompt_take_little_beside_their_words() -> None:
    """The largest numbers fit the bytes that are counted beside the words of a prompt's logprobs; half as many would not do."""
    table, words = np.zeros((0, RESULT_HEAD + 1), np.int32), bytes(MAX_SCORED * token_bytes(MAX_ALTERNATIVES))
    row = PromptRow(2**31 - 1, 2**31 - 1, PromptLogprobs(2**31 - 1, MAX_ALTERNATIVES, words))
    beside = len(encode_rows(1, table, {}, [row])) - len(encode_rows(1, table, {})) - len(words)
    assert PROMPT_ROW_BYTES // 2 < beside <= PROMPT_ROW_BYTES - 5  # as many for the number of rows


def test_the_largest_result_has_the_bytes_that_are_counted() -> None:
    """Rows whose every token has the most logprobs, of the largest numbers, take what `largest_result` says and little less."""
    seqs, width = 2**16 + 1, 9
    table = np.zeros((seqs, RESULT_HEAD + 2 * width), np.int32)
    reported = [Logprobs(-0.5, [(2**31 - 1, -0.5)] * MAX_ALTERNATIVES)] * width
    size = len(encode_rows(1, table, dict.fromkeys(range(seqs), reported)))
    counted = largest_result(seqs, width) - seqs * PROMPT_ROW_BYTES - MAX_SCORED * token_bytes(MAX_ALTERNATIVES)
    assert 0.99 * counted < size <= counted


def test_admission_numbers_come_back_modulo_2_to_the_31() -> None:
    """A result row carries the low 31 bits of its admission's number."""
    row = ResultRow(1, 2**31 + 5, (7,))
    assert decode_result(encode_result(result_of(1, [row]))).row(0).number == 5


def test_steady_state_is_small_and_fast() -> None:
    """A plan of 256 decode rows is about 3 KB, and encodes and decodes in a few milliseconds of CPU at most."""
    plan = StepPlan(1, rows=single_rows(range(256)), appends=[PageAppend(0, slot, 9, slot + 1) for slot in range(8)])
    data = encode_plan(plan)
    started = time.process_time()
    for _ in range(100):
        decode_plan(encode_plan(plan))
    assert len(data) < 4096
    assert time.process_time() - started < 0.4


WRITER = """
import sys, zlib
from engine.channel import map_shared
from engine.rank_status import StatusBlock
block, step = StatusBlock(map_shared(int(sys.argv[1]))), 0
while True:
    step += 1
    block.progress(0, step, step, step, zlib.crc32(b"%d" % step))
"""


def test_a_hash_belongs_to_its_step_whenever_it_is_read() -> None:
    """While another process finishes tens of thousands of steps a second, every hash that is read is that of the step it names."""
    fd = create_shared("status", STATUS_BYTES)
    block = StatusBlock(map_shared(fd))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(fd)], cwd=ROOT, pass_fds=(fd,))
    os.close(fd)
    try:
        while not block.read(0).finished:
            assert writer.poll() is None
        seen = {}
        deadline = time.monotonic() + 30
        while len(seen) <= 1000:
            seen |= block.read(0).hashes
            assert time.monotonic() < deadline
        assert all(state == zlib.crc32(b"%d" % step) for step, state in seen.items())
    finally:
        writer.kill()
        writer.wait()


def test_status_fields_have_one_writer_each() -> None:
    """The writers of a record fill disjoint fields, leave its neighbours alone, and all of it is read back."""
    memory = memoryview(bytearray(3 * STATUS_BYTES))
    block = StatusBlock(memory)
    block.progress(1, launched=7, finished=6, now_ns=2**63, state_hash=0xFFFFFFFF)
    block.heartbeat(1, 99)
    block.device(1, busy_us=4500, idle_us=2**63, late_compilations=65535)
    block.read_encodes(1, 12)
    figures = EncoderFigures(*(2**64 - number for number in range(1, 12)))
    block.encoder(1, figures)
    expected = RankStatus(7, 6, 2**63, 99, 4500, 2**63, 65535, 12, hashes={6: 0xFFFFFFFF}, encoder=figures)
    assert block.read(1) == expected
    block.heartbeat(1, 100)
    assert block.read(1) == expected._replace(heartbeat_ns=100)
    assert block.read(0) == block.read(2) == RankStatus()
    assert not any(memory[2 * STATUS_BYTES :])
