"""A line of `doctor`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    found: str
    advice: str = ""


Findings = Iterator[Finding]


def checked(name: str, good: bool, detail: str, advice: str, bad: State = "warn") -> Finding:
    if good:
        return Finding(name, "ok", detail)
    return Finding(name, bad, detail, advice)
