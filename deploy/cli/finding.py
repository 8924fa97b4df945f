"""A line of what `doctor` looks at."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it stands, what was found, and what to do unless all is well."""

    name: str
    state: State
    found: str
    advice: str = ""


Findings = Iterator[Finding]


def checked(name: str, good: bool, detail: str, advice: str, bad: State = "warn") -> Finding:
    """Makes a finding that is `ok` with nothing to do, or `bad` with the advice."""
    return Finding(name, "ok", detail) if good else Finding(name, bad, detail, advice)
