"""What a board is made of, without Grafana: boards have rows, rows have panels, panels have queries."""

from dataclasses import dataclass
from typing import Literal

PanelKind = Literal["lines", "stack", "stat", "timeline"]
GRID_WIDTH = 24


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the name of its lines (Grafana's `{{label}}` form)."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Step:
    """From `value` upward (None: from below everything) a figure has this colour."""

    value: float | None
    color: str


@dataclass(frozen=True)
class Panel:
    """One panel. `about` says what it measures and what to do about it; `unit` is Grafana's; `names` puts words on values."""

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelKind = "lines"
    width: int = 8
    steps: tuple[Step, ...] = ()
    names: tuple[tuple[float, str, str], ...] = ()  # value, text, colour

    @property
    def height(self) -> int:
        """Grid units."""
        return 4 if self.kind == "stat" else 8


@dataclass(frozen=True)
class Row:
    """A titled group of panels, laid from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard; `uid` is its address in Grafana and its file's stem."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]


def good_below(warn: float, bad: float) -> tuple[Step, ...]:
    """Green, then yellow from `warn`, red from `bad`."""
    return (Step(None, "green"), Step(warn, "yellow"), Step(bad, "red"))


def good_above(bad: float, good: float) -> tuple[Step, ...]:
    """Red, then yellow from `bad`, green from `good`."""
    return (Step(None, "red"), Step(bad, "yellow"), Step(good, "green"))
