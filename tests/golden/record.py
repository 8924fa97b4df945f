"""Writes the golden plan stream: `python -m tests.golden.record`. Run it only where what a model answers is meant to change.

One rank in fp32 on the CPU serves the requests of `tests.support.engine.recording` with the trained nano 31b. The file holds every
plan, and of every result row the token and the reported logprobs, as JSON: the layout of plans in memory may change, what they say
may not.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec

from deploy.models.resolve import resolve
from engine.plan import Admission, PageAppend, PageRelease, PageZero, PrefillChunk, ResultRow, StepPlan, StepResult
from engine.protocol import Logprobs, SamplingParams
from tests.support.engine.recording import record

PATH = Path(__file__).with_name("nano-31b.json.gz")
SECTIONS = {"releases": PageRelease, "appends": PageAppend, "zeros": PageZero, "chunks": PrefillChunk}


def plan_to_json(plan: StepPlan) -> dict[str, Any]:
    """The plan as plain data."""
    made: dict[str, Any] = msgspec.to_builtins(plan)
    return {name: value for name, value in made.items() if value}


def plan_of(data: dict[str, Any]) -> StepPlan:
    """The plan that `plan_to_json` wrote."""
    sections = {name: [kind(**row) for row in data.get(name, [])] for name, kind in SECTIONS.items()}
    admissions = [
        Admission(**{**row, "params": msgspec.convert(row["params"], SamplingParams)}) for row in data.get("admissions", [])
    ]
    return StepPlan(data["step"], admissions=admissions, decodes=data.get("decodes", []), **sections)


def row_to_json(row: ResultRow) -> list[Any]:
    """Slot, admission number, tokens, and the reported logprobs to six digits."""
    logprobs = row.logprobs and [round(row.logprobs.chosen, 6), [[token, round(value, 6)] for token, value in row.logprobs.top]]
    return [row.slot, row.number, list(row.tokens), logprobs]


def row_of(data: list[Any]) -> ResultRow:
    """The row that `row_to_json` wrote."""
    slot, number, tokens, logprobs = data
    reported = logprobs and Logprobs(logprobs[0], [(token, value) for token, value in logprobs[1]])
    return ResultRow(slot, number, tuple(tokens), False, reported)


def load() -> tuple[list[StepPlan], list[StepResult]]:
    """The committed stream and what it gave."""
    with gzip.open(PATH, "rt", encoding="utf-8") as file:
        steps = json.load(file)
    plans = [plan_of(step["plan"]) for step in steps]
    return plans, [StepResult.of(plan.step, [row_of(row) for row in step["rows"]]) for plan, step in zip(plans, steps, strict=True)]


def main() -> None:
    """Record and write."""
    recording = record(resolve("nano:31b"))
    steps = [
        {"plan": plan_to_json(plan), "rows": [row_to_json(row) for row in result.rows]}
        for plan, result in zip(recording.plans, recording.results, strict=True)
    ]
    with PATH.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        file.write(json.dumps(steps, separators=(",", ":")).encode())
    print(f"{len(steps)} steps, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
