"""`quartet profile`: tables, JSON, a trace, a sweep as CSV and as a picture, and what it refuses."""

import csv
import json
from pathlib import Path

import pytest

from deploy.cli import profile_command
from deploy.cli.main import main
from engine.geometry import kv_groups, read_geometry
from engine.rank.profiling.session import most_pages
from tests.conftest import Nano

pytestmark = pytest.mark.cpu

CPU = ("--device", "cpu", "--dtype", "float32", "--steps", "16")


def test_a_table_and_a_trace(nano: Nano, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names the nodes of both kinds of layer and the step's floor; the trace has an event for each node."""
    trace = tmp_path / "trace.json"
    assert main(["profile", str(nano("31b")), *CPU, "--context", "40", "--trace", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "batch 1, context 40"
    names = {line.split("  ")[0].strip() for line in lines}
    assert {"sliding attention.qkv", "full mlp.down", "head", "sampling"} <= names
    assert "floor" in lines[-1]
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    starts = [event["ts"] for event in events]
    assert len(events) > 40
    assert starts == sorted(starts)


def test_json_of_two_batches_in_loopback(nano: Nano, capsys: pytest.CaptureFixture[str]) -> None:
    """A document a batch; every node of a shard with its bytes, whose K and V grow with the batch."""
    loopback = ["--tp", "2", "--loopback", "--batch", "1", "3", "--context", "40", "--json"]
    assert main(["profile", str(nano("31b")), *CPU, *loopback]) == 0
    one, three = json.loads(capsys.readouterr().out)
    assert [one["batch"], three["batch"]] == [1, 3]
    assert 3 * sum(node["keys"] for node in one["nodes"]) == sum(node["keys"] for node in three["nodes"])
    assert one["floor_ms"] == pytest.approx(sum(node["floor_us"] for node in one["nodes"]) / 1e3)


def test_a_sweep(
    nano: Nano, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row a batch and context, in a table and as CSV; what does not fit is named and left out."""
    groups = kv_groups(read_geometry(nano("31b")), 1, dtype="float32")
    pages = most_pages(groups, [(4, 40), (1, 200)], 16)
    budget = sum(count * group.page_bytes for count, group in zip(pages, groups, strict=True))
    monkeypatch.setattr("engine.rank.profiling.session.cpu_budget", lambda tp: budget)
    table = tmp_path / "sweep.csv"
    sweep = ["--sweep", "--batch", "1", "4", "--context", "40", "200", "--csv", str(table)]
    assert main(["profile", str(nano("31b")), *CPU, *sweep]) == 0
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
    assert main(["profile", str(nano("31b")), "--device", "cpu", "--dtype", "float32", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_hidden_share_stands_in_the_table() -> None:
    """Of a captured step: what a fused norm costs beyond its neighbours against its time alone, and the share of the whole."""
    from engine.rank.profiling.step_nodes import StepNode, StepProfile

    product = StepNode("o", None, ("_gemv",), weights=10**8, us=60.0, alone_us=60.0)
    nodes = (product, StepNode("allreduce_norm", None, ("_joint",), us=10.0, alone_us=40.0))
    table, floor, hidden = profile_command.parts(StepProfile(1, 1024, 4e12, 0.07, True, (), nodes), folded=True)
    assert not isinstance(table, str)
    assert [row[-1] for row in table.rows] == ["", "75%"]
    assert floor == "step 0.070 ms; floor 0.025 ms, of bytes at 4.00 TB/s"
    assert hidden == "hidden share of all but the products: 75%"
