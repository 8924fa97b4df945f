"""Recorded plans as a file: what a row gave comes back, also where it gave no token, and each difference is told."""

from pathlib import Path

import pytest

from engine.plan import ResultRow, StepPlan, single_rows
from tests.support.engine.plan_stream import PlanStream, different_tokens, read_stream, write_stream
from tests.support.engine.plans import PrefillChunk, result_of, result_rows

pytestmark = pytest.mark.pure

ROWS = [ResultRow(0, 1, (7,)), ResultRow(1, 2, (), nan=True), ResultRow(2, 3, (), empty=True)]


def stream(rows: list[ResultRow]) -> PlanStream:
    plan = StepPlan(1, chunks=[PrefillChunk(0, 0, 3, 2)], rows=single_rows([1, 2]))
    return PlanStream("nano:31b", {}, (3, 3), [plan], [result_of(1, rows)])


def test_rows_without_tokens_come_back(tmp_path: Path) -> None:
    """A row whose logits held NaN and one whose ids were all forbidden are what they were; no difference is told."""
    write_stream(stream(ROWS), tmp_path / "x.json.gz")
    results = read_stream(tmp_path / "x.json.gz").results
    assert result_rows(results[0]) == ROWS
    assert different_tokens(results, stream(ROWS).results) == []


@pytest.mark.parametrize(
    ("at", "row", "told"),
    [
        (0, ROWS[0]._replace(tokens=(8,)), "step 1, slot 0: tokens [8], recorded [7]"),
        (1, ROWS[1]._replace(nan=False, empty=True), "step 1, slot 1: empty, recorded nan"),
        (2, ROWS[2]._replace(empty=False, tokens=(9,)), "step 1, slot 2: tokens [9], recorded empty"),
        (2, ROWS[2]._replace(slot=5), "step 1: a row of slot 5, recorded of slot 2"),
    ],
)
def test_each_difference_is_told(at: int, row: ResultRow, told: str) -> None:
    """Planted faults: another token, another reason for none, a token where there was none, another slot."""
    found = [*ROWS[:at], row, *ROWS[at + 1 :]]
    assert different_tokens(stream(found).results, stream(ROWS).results) == [told]
