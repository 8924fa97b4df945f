"""`quartet replay`: the golden stream and a page dump come out as recorded; a changed one does not, and says where."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deploy.cli.main import main
from deploy.models.resolve import resolve
from engine.plan import StepPlan, StepResult, encode_plan
from engine.rank.page_dump import PageDump, write_dump
from engine.rank.plan_stream import read_stream, write_stream
from tests.golden.record import PATH
from tests.support.engine.recording import PAGES, config_of

pytestmark = pytest.mark.cpu


def test_the_golden_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """Every token as recorded, in text and as JSON, with one state hash."""
    assert main(["replay", str(PATH), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["as_recorded"], first["different"], first["steps"]) == (True, [], 196)
    assert main(["replay", str(PATH)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("196 steps, every token as recorded, logprobs within ")
    assert told[1] == f"state hash {first['state_hash']}"


def test_another_token_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planted fault: a recorded token is another one; its step and slot are named and the exit code is 1."""
    stream = read_stream(PATH)
    at = next(at for at, result in enumerate(stream.results) if result.rows)
    row = stream.results[at].rows[0]
    rows = [row._replace(tokens=(row.tokens[0] + 1,)), *stream.results[at].rows[1:]]
    stream.results[at] = StepResult.of(at + 1, rows)
    short = replace(stream, plans=stream.plans[: at + 1], results=stream.results[: at + 1])
    write_stream(short, tmp_path / "x.json.gz")
    assert read_stream(tmp_path / "x.json.gz") == short
    assert main(["replay", str(tmp_path / "x.json.gz")]) == 1
    out = capsys.readouterr().out
    assert f"step {at + 1}, slot {row.slot}: tokens [{row.tokens[0]}], recorded [{row.tokens[0] + 1}]" in out


def dump_with(entry: int, page: int) -> PageDump:
    """Slot 0 decodes position 40 on pages 1 and 2 of both groups; the device's full table names `page` at `entry`."""
    expected = np.zeros((2, 5, 8), np.int32)
    expected[:, 0, :2] = (1, 2)
    tables = expected.copy()
    tables[1, 0, entry] = page
    lengths = np.array([40, 0, 0, 0, 0], np.int32)
    return PageDump(
        config=config_of(resolve("nano:31b"), 1), rank=0, step=7, pages=PAGES, message="as it was",
        plan=encode_plan(StepPlan(7, decodes=[0])), masks=b"", lost_pages={}, tables=tables.ravel(),
        expected=expected.ravel(), lengths=lengths, expected_lengths=lengths,
        tokens=np.full((5, 42), 9, np.int32),
    )  # fmt: skip


def test_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The violation of a dump is shown again; of one with nothing wrong that is said, with exit code 1."""
    bad, sound = write_dump(dump_with(3, 4), tmp_path), write_dump(dump_with(1, 2), tmp_path)
    assert main(["replay", str(bad), "--model", "nano:31b"]) == 0
    assert "shown again: step 7: slot 0, group full, entry 3: names page 4, expected no page" in capsys.readouterr().out
    assert main(["replay", str(sound), "--model", "nano:31b", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["found"] is None


@pytest.mark.parametrize(
    ("content", "why"), [(None, "no such file"), (b"{}", "no plan stream"), (b"\x1f\x8b\x08", "no plan stream")]
)
def test_other_files_are_refused(
    tmp_path: Path, content: bytes | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the file is named."""
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    assert f"{path}: {why}" in capsys.readouterr().err
