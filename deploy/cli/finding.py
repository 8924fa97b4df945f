"""A line of what `doctor` looks at, and how all of them are shown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deploy.cli.output import Table, emit

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it stands, what was found, and what to do unless all is well."""

    name: str
    state: State
    found: str
    advice: str = ""


def checked(name: str, good: bool, found: str, advice: str, bad: State = "warn") -> Finding:
    """`ok` with nothing to do, or `bad` with the advice."""
    return Finding(name, "ok", found) if good else Finding(name, bad, found, advice)


def emit_findings(findings: Sequence[Finding], about: dict[str, Any], summary: str, *, as_json: bool) -> None:
    """A row each and the summary; as JSON the findings beside what `about` says."""
    rows = [(finding.state, finding.name, " -> ".join(filter(None, (finding.found, finding.advice)))) for finding in findings]
    value = {**about, "findings": [asdict(finding) for finding in findings]}
    emit(value, [Table(("", "", ""), rows), summary], as_json=as_json)
