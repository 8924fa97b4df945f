"""The sizes that steps are padded to."""

from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig, Mtp
from engine.plan import StepPlan, encode_plan, read_plan, single_rows
from engine.step_shapes import LARGE_PROMPT_ROWS, MOST_PADDED_CHUNKS, StepShapes, StepSizes
from tests.support.repo_rules import ROOT

pytestmark = pytest.mark.pure


def shapes(member: str, **settings: Any) -> StepShapes:
    """Of a public model on a GPU; four sequences."""
    folder = ROOT / "deploy" / "models" / "public" / member
    config = EngineConfig(model=str(folder), device="cuda", max_seqs=4, prefill_budget=3500)
    return StepShapes.of(msgspec.structs.replace(config, **settings))


def sizes(*chunks: int, rows: int = 0, width: int = 1) -> StepSizes:
    """Of a step with chunks of so many tokens that end there, and sequences that decode."""
    of_chunks = [(slot, 0, tokens, tokens - 1, 0, 0) for slot, tokens in enumerate(chunks)]
    plan = StepPlan(1, chunks=of_chunks, rows=single_rows(range(rows)))
    return StepSizes.of(read_plan(encode_plan(plan)))._replace(width=width)


def test_chunks_are_padded_up_to_a_size() -> None:
    """To the next number of rows and sequences; not steps of more rows or chunks than their size has. There are larger sizes where
    layers share K and V, or ranks norm rows of their own."""
    alone, sharing, by_rows = shapes("31b"), shapes("e2b"), shapes("31b", tp=4, prefill_budget=4096)
    assert alone.padded(sizes(17)) == (32, MOST_PADDED_CHUNKS, 0, 4, 1)
    assert alone.padded(sizes(17, rows=1)) == (32, MOST_PADDED_CHUNKS, 4, 4, 1)
    assert alone.padded(sizes(2048)) == (2048, MOST_PADDED_CHUNKS, 0, 4, 1)
    assert alone.padded(sizes(2049)) is None
    assert sharing.padded(sizes(2049)) == by_rows.padded(sizes(2049)) == (2560, 20, 0, 4, 1)
    assert sharing.padded(sizes(3500)) == (3500, 27, 0, 4, 1), "of the budget"
    assert by_rows.padded(sizes(*[150] * (MOST_PADDED_CHUNKS + 4))) == (3072, 24, 0, 4, 1)
    assert alone.padded(sizes(*[1] * (MOST_PADDED_CHUNKS + 1))) is None
    assert alone.padded_prompts == 2048
    assert sharing.padded_prompts == 3500
    assert shapes("e2b", prefill_budget=20_000).padded_prompts == LARGE_PROMPT_ROWS[-1]


def test_decode_rows_are_padded_to_a_bucket_and_a_width() -> None:
    """Without chunks every width has a graph, beside chunks every second one; a step without rows has no size."""
    it = shapes("31b", max_seqs=20, mtp=Mtp(model="drafter"))
    assert it.widths == (1, 2, 3, 4, 6, 8)
    assert it.padded(sizes(rows=3)) == (0, 0, 4, 4, 1)
    assert it.padded(sizes(rows=9, width=3)) == (0, 0, 16, 16, 3)
    assert it.padded(sizes(5, rows=9, width=3)) == (16, MOST_PADDED_CHUNKS, 24, 24, 4)
    assert it.padded(sizes()) is None
    assert it.unpadded(sizes(2049, rows=3, width=3)) == (2049, 1, 3, 4, 4)
    assert list(it.sizes) == sorted(it.sizes)


def test_where_chunks_run_as_they_are() -> None:
    """On a CPU, which also runs every number of sequences, and where another backend has them."""
    cpu, other = shapes("31b", device="cpu"), shapes("31b", attention_extend="trtllm_mha")
    assert cpu.padded(sizes(rows=3)) == (0, 0, 3, 3, 1)
    assert cpu.padded(sizes(7)) is None
    assert other.padded(sizes(7)) is None
    assert other.padded(sizes(rows=3)) == (0, 0, 4, 4, 1)
    assert other.padded_prompts == 0


def test_one_size_is_a_mode() -> None:
    """Every step that fits has it: of decode rows alone, of chunks, of both; a step that does not fit runs as it is."""
    size = StepSizes(64, 4, 4, 4)
    one = StepShapes((size,), prefill=64, longest=64)
    assert [one.padded(sizes(*chunks, rows=rows)) for chunks, rows in (((), 1), ((7,), 0), ((30, 34), 3))] == [size] * 3
    assert one.padded(sizes(65)) is one.padded(sizes(*[1] * 5)) is None
    assert (one.sequences, one.widths) == ((4,), (1,))
