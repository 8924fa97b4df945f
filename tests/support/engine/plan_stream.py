"""Recorded plans and what they gave, as a file: JSON, so that the layout of plans in memory may change and the file stays.

    {"model": ..., "settings": {...}, "pages": [...],
     "steps": [{"plan": {...}, "masks": base64, "table": [...], "logprobs": [[row, [[chosen, [[id, value], ...]]]]]}, ...]}

`masks` where a step has any; plan, table and logprobs as in StepPlan and StepResult. Gzipped. `model` is a reference as the command
line takes it; `settings` those of the engine that are not the defaults.
"""

import gzip
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.plan import RESULT_HEAD, SECTIONS, Admission, Encode, ResultRow, StepPlan, StepResult
from engine.protocol import Logprobs, SamplingParams
from tests.support.engine.plans import result_rows

_NO_TOKENS = ("nan", "empty")  # flags of result rows


@dataclass(frozen=True)
class PlanStream:
    """Plans in order, each with its result; masks: bytes by step; pages: of each group's pool, null page included."""

    model: str
    settings: dict[str, Any]
    pages: tuple[int, ...]
    plans: list[StepPlan]
    results: list[StepResult]
    masks: Mapping[int, bytes] = field(default_factory=dict)


def write_stream(stream: PlanStream, path: Path) -> None:
    """Write the file; the same stream gives the same bytes."""
    pairs = zip(stream.plans, stream.results, strict=True)
    steps = [
        {"plan": _plan_to_json(plan), **_masks_to_json(stream.masks, plan.step), **_result_to_json(result)}
        for plan, result in pairs
    ]
    value = {"model": stream.model, "settings": stream.settings, "pages": stream.pages, "steps": steps}
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        file.write(json.dumps(value, separators=(",", ":")).encode())


def read_stream(path: Path) -> PlanStream:
    """What `write_stream` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        value = json.load(file)
    plans = [_plan_of(step["plan"]) for step in value["steps"]]
    results = [_result_of(plan.step, step) for plan, step in zip(plans, value["steps"], strict=True)]
    masks = {step["plan"]["step"]: b64decode(step["masks"]) for step in value["steps"] if "masks" in step}
    return PlanStream(value["model"], value["settings"], tuple(value["pages"]), plans, results, masks)


def _plan_to_json(plan: StepPlan) -> dict[str, Any]:
    admissions = [admission._asdict() for admission in plan.admissions]
    made = msgspec.to_builtins({**msgspec.structs.asdict(plan), "admissions": admissions})
    return {name: value for name, value in made.items() if value} | {"rows": [*chain.from_iterable(plan.rows)]}


def _masks_to_json(masks: Mapping[int, bytes], step: int) -> dict[str, str]:
    return {"masks": b64encode(masks[step]).decode()} if step in masks else {}


def _plan_of(data: dict[str, Any]) -> StepPlan:
    sections = {name: [tuple(row) for row in data.get(name, [])] for name in SECTIONS if name != "rows"}
    sections["rows"] = [*zip(*[iter(data["rows"])] * SECTIONS["rows"], strict=True)]
    admissions = [
        Admission(**{**row, "params": msgspec.convert(row["params"], SamplingParams)}) for row in data.get("admissions", [])
    ]
    encodes = msgspec.convert(data.get("encodes", []), list[Encode])
    flags = {"masked": data.get("masked", False), "drafts": data.get("drafts", 0)}
    return StepPlan(data["step"], **flags, admissions=admissions, encodes=encodes, **sections)


def _result_to_json(result: StepResult) -> dict[str, Any]:
    """The table and the reported logprobs to six digits."""
    logprobs = [
        [row, [[round(one.chosen, 6), [[token, round(value, 6)] for token, value in one.top]] for one in reported]]
        for row, reported in result.logprobs.items()
    ]
    return {"table": result.table.tolist(), "logprobs": logprobs}


def _result_of(step: int, data: dict[str, Any]) -> StepResult:
    table = np.array(data["table"] or np.zeros((0, RESULT_HEAD)), np.int32)
    logprobs = {
        row: [Logprobs(chosen, [(token, value) for token, value in top]) for chosen, top in reported]
        for row, reported in data["logprobs"]
    }
    return StepResult(step, table, logprobs, (), ended=0, took_us=0)


def different_tokens(results: Sequence[StepResult], expected: Sequence[StepResult]) -> list[str]:
    """A sentence for each result row that is not the expected one, logprobs apart."""
    differences = []
    for one, other in zip(results, expected, strict=True):
        rows, recorded = ([(row.slot, row.number, _told(row)) for row in result_rows(result)] for result in (one, other))
        if len(rows) != len(recorded):
            differences.append(f"step {other.step}: {len(rows)} rows, recorded {len(recorded)}")
        differences += [
            f"step {other.step}, slot {b[0]}: {a[2]}, recorded {b[2].removeprefix('tokens ')}" if a[:2] == b[:2]
            else f"step {other.step}: a row of slot {a[0]}, recorded of slot {b[0]}"
            for a, b in zip(rows, recorded, strict=False) if a != b
        ]  # fmt: skip
    return differences


def _told(row: ResultRow) -> str:
    return next((flag for flag in _NO_TOKENS if getattr(row, flag)), f"tokens {list(row.tokens)}")


def logprob_error(found: Sequence[StepResult], expected: Sequence[StepResult]) -> float:
    """The largest difference of any reported logprob; rows must report alike."""
    errors = [0.0]
    for results in zip(found, expected, strict=True):
        for first, second in zip(*(result_rows(result) for result in results), strict=True):
            for one, other in zip(first.logprobs, second.logprobs, strict=True):
                errors.append(abs(one.chosen - other.chosen))
                errors += [abs(a[1] - b[1]) for a, b in zip(one.top, other.top, strict=True)]
    return max(errors)
