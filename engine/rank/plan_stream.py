"""Recorded plans and what they gave, as a file: JSON, so that the layout of plans in memory may change and the file stays.

    {"model": ..., "settings": {...}, "pages": [...],
     "steps": [{"plan": {...}, "masks": base64, "rows": [[slot, number, tokens, logprobs], ...]}, ...]}       masks: if it has any

A row without tokens also says why: "nan" or "empty". Gzipped. `model` is a reference as the command line takes it; `settings` those
of the engine that are not the defaults.
"""

import gzip
import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.plan import Admission, PageAppend, PageRelease, PageZero, PrefillChunk, ResultRow, StepPlan, StepResult
from engine.protocol import Logprobs, SamplingParams

_NO_TOKENS = ("nan", "empty")  # flags of result rows
_SECTIONS = {"releases": PageRelease, "appends": PageAppend, "zeros": PageZero, "chunks": PrefillChunk}


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
        {"plan": _plan_to_json(plan), **_masks_to_json(stream.masks, plan.step), "rows": [_row_to_json(row) for row in result.rows]}
        for plan, result in pairs
    ]
    value = {"model": stream.model, "settings": stream.settings, "pages": stream.pages, "steps": steps}
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as file:
        file.write(json.dumps(value, separators=(",", ":")).encode())


def read_stream(path: Path) -> PlanStream:
    """What `write_stream` wrote; ConfigError where it is not such a file."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            value = json.load(file)
        plans = [_plan_of(step["plan"]) for step in value["steps"]]
        rows = [[_row_of(row) for row in step["rows"]] for step in value["steps"]]
        results = [StepResult.of(plan.step, found) for plan, found in zip(plans, rows, strict=True)]
        masks = {step["plan"]["step"]: b64decode(step["masks"]) for step in value["steps"] if "masks" in step}
        return PlanStream(value["model"], value["settings"], tuple(value["pages"]), plans, results, masks)
    except (OSError, EOFError, zlib.error, KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: no plan stream: {error}") from error


def _plan_to_json(plan: StepPlan) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(plan)
    return {name: value for name, value in made.items() if value}


def _masks_to_json(masks: Mapping[int, bytes], step: int) -> dict[str, str]:
    return {"masks": b64encode(masks[step]).decode()} if step in masks else {}


def _plan_of(data: dict[str, Any]) -> StepPlan:
    sections: dict[str, Any] = {name: [kind(**row) for row in data.get(name, [])] for name, kind in _SECTIONS.items()}
    admissions = [
        Admission(**{**row, "params": msgspec.convert(row["params"], SamplingParams)}) for row in data.get("admissions", [])
    ]
    masked = data.get("masked", False)
    return StepPlan(data["step"], masked=masked, admissions=admissions, decodes=data.get("decodes", []), **sections)


def _row_to_json(row: ResultRow) -> list[Any]:
    """Slot, admission number, tokens, the reported logprobs to six digits, and why there are no tokens."""
    logprobs = row.logprobs and [round(row.logprobs.chosen, 6), [[token, round(value, 6)] for token, value in row.logprobs.top]]
    return [row.slot, row.number, list(row.tokens), logprobs, *(flag for flag in _NO_TOKENS if getattr(row, flag))]


def _row_of(data: list[Any]) -> ResultRow:
    slot, number, tokens, logprobs, *flags = data
    if unknown := [flag for flag in flags if flag not in _NO_TOKENS]:
        raise ValueError(f"a row of slot {slot} says {unknown[0]!r}")
    reported = logprobs and Logprobs(logprobs[0], [(token, value) for token, value in logprobs[1]])
    return ResultRow(slot, number, tuple(tokens), logprobs=reported, **dict.fromkeys(flags, True))


def different_tokens(found: Sequence[StepResult], expected: Sequence[StepResult]) -> list[str]:
    """A sentence for each result row that is not the expected one, logprobs apart."""
    told = []
    for one, other in zip(found, expected, strict=True):
        rows, wanted = ([(row.slot, row.number, _told(row)) for row in result.rows] for result in (one, other))
        if len(rows) != len(wanted):
            told.append(f"step {other.step}: {len(rows)} rows, recorded {len(wanted)}")
        told += [
            f"step {other.step}, slot {b[0]}: {a[2]}, recorded {b[2].removeprefix('tokens ')}" if a[:2] == b[:2]
            else f"step {other.step}: a row of slot {a[0]}, recorded of slot {b[0]}"
            for a, b in zip(rows, wanted, strict=False) if a != b
        ]  # fmt: skip
    return told


def _told(row: ResultRow) -> str:
    """The row's tokens, or why it has none."""
    return next((flag for flag in _NO_TOKENS if getattr(row, flag)), f"tokens {list(row.tokens)}")


def logprob_error(one: Sequence[StepResult], other: Sequence[StepResult]) -> float:
    """The largest difference of any reported logprob; rows must report alike."""
    errors = [0.0]
    for results in zip(one, other, strict=True):
        for first, second in zip(*(result.rows for result in results), strict=True):
            assert (first.logprobs is None) == (second.logprobs is None), (first, second)
            if first.logprobs and second.logprobs:
                errors.append(abs(first.logprobs.chosen - second.logprobs.chosen))
                errors += [abs(a[1] - b[1]) for a, b in zip(first.logprobs.top, second.logprobs.top, strict=True)]
    return max(errors)
