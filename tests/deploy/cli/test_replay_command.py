"""`quartet replay`: the golden stream comes out as recorded; a changed one does not, and says where."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.cli.main import main
from engine.rank.plan_stream import read_stream, write_stream
from tests.golden.record import PATH
from tests.support.engine.plans import encoded, result_of

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
    stream.results[at] = result_of(at + 1, rows)
    short = replace(stream, plans=stream.plans[: at + 1], results=stream.results[: at + 1])
    write_stream(short, tmp_path / "x.json.gz")
    again = read_stream(tmp_path / "x.json.gz")
    assert (again.plans, encoded(again.results)) == (short.plans, encoded(short.results))
    assert main(["replay", str(tmp_path / "x.json.gz")]) == 1
    out = capsys.readouterr().out
    assert f"step {at + 1}, slot {row.slot}: tokens [{row.tokens[0]}], recorded [{row.tokens[0] + 1}]" in out


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
