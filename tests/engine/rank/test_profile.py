"""`tests.bench.profile`: tables, JSON, a trace, a sweep as CSV and as a picture, and what it refuses."""

import csv
import json
from pathlib import Path

import pytest

from engine.geometry import kv_groups, read_geometry
from tests.bench.profile import main, parts
from tests.bench.profiling.session import most_pages
from tests.conftest import Nano

pytestmark = pytest.mark.cpu

CPU = ("--device", "cpu", "--dtype", "float32", "--steps", "16")


def test_a_table_and_a_trace(nano: Nano, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names the stages of both kinds of layer and the step's floor; torch's trace has the operators."""
    trace = tmp_path / "trace.json"
    assert main([str(nano("31b")), *CPU, "--context", "40", "--trace", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "batch 1, context 40"
    names = {line.split("  ")[0].strip() for line in lines}
    assert {"sliding attention.qkv", "full mlp.down", "head", "sampling"} <= names
    assert "floor" in lines[-1]
    events = json.loads((tmp_path / "trace-b1-c40.json").read_text())["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) > 20


def test_json_of_two_batches_in_loopback(nano: Nano, capsys: pytest.CaptureFixture[str]) -> None:
    """A document a batch; every stage of a shard with its bytes, of which K and V grow with the batch."""
    loopback = ["--tp", "2", "--loopback", "--batch", "1", "3", "--context", "40", "--json"]
    assert main([str(nano("31b")), *CPU, *loopback]) == 0
    one, three = json.loads(capsys.readouterr().out)
    assert [one["batch"], three["batch"]] == [1, 3]
    seen = [{stage["name"]: stage["bytes"] for stage in profile["stages"]}["full attention"] for profile in (one, three)]
    assert 3 * seen[0] == seen[1] > 0
    assert one["floor_ms"] == pytest.approx(sum(stage["floor_us"] for stage in one["stages"]) / 1e3)


def test_a_sweep(
    nano: Nano, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row a batch and context, in a table and as CSV; what does not fit is named and left out."""
    groups = kv_groups(read_geometry(nano("31b")), 1, dtype="float32")
    pages = most_pages(groups, [(4, 40), (1, 200)], 16)
    budget = sum(count * group.page_bytes for count, group in zip(pages, groups, strict=True))
    monkeypatch.setattr("tests.bench.profiling.session.CPU_BYTES", budget)
    table = tmp_path / "sweep.csv"
    sweep = ["--sweep", "--batch", "1", "4", "--context", "40", "200", "--csv", str(table)]
    assert main([str(nano("31b")), *CPU, *sweep]) == 0
    shown = capsys.readouterr()
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["batch"], row["context"]) for row in rows] == [("1", "40"), ("4", "40"), ("1", "200")]
    assert all(float(row["launch_ms"]) > float(row["floor_ms"]) > 0 for row in rows)
    assert "batch 4, context 200: does not fit" in shown.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tp", "2"], "2 ranks are measured on 2 GPUs"),
        (["--steps", "9"], "steps must be more than 14"),
        (["--batch", "0"], "begin at 1"),
        (["--csv", "x.csv"], "--csv goes with --sweep"),
        (["--sweep", "--trace", "x.json"], "--trace goes without --sweep"),
        (["--trace", "/nowhere/x.json"], "/nowhere is no folder"),
        (["--device", "cuda"], "--device cpu rehearses"),
    ],
)
def test_what_cannot_run_is_refused(nano: Nano, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line that says why, before anything is measured."""
    assert main([str(nano("31b")), "--device", "cpu", "--dtype", "float32", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_the_rows_of_a_table() -> None:
    """A stage's time a module and in all, its bytes and their floor, and its share of the step; C++ names without their types."""
    from tests.bench.profiling.step_profile import Stage, StepProfile

    stages = (
        Stage("full attention.o", 2, ("_gemv",), 60.0, 10**8, 25.0),
        Stage("sampling", 1, ("void at::native::copy<4, float>(int)", "a", "b", "c"), 10.0, 0, 0.0),
    )
    _, table, floor = parts(StepProfile(1, 1024, 4e12, 0.07, stages))
    assert not isinstance(table, str)
    assert table.rows == [
        ("full attention.o", "_gemv", "2", "30.00", "60.0", "100.0", "25.0", "85.7%"),
        ("sampling", "at::native::copy a b +1", "1", "10.00", "10.0", "", "", "14.3%"),
    ]
    assert floor == "step 0.070 ms; floor 0.025 ms, of bytes at 4.00 TB/s"
