"""The committed boards as read back: what each panel asks, ready to be asked of a Prometheus. Needs nothing but the JSON."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from tests.support.repo_rules import ROOT

FOLDER = ROOT / "dashboards"
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True)
class BoundQuery:
    """One query of a panel: bound PromQL, and the form of its lines' names."""

    expr: str
    legend: str


@dataclass(frozen=True)
class CommittedPanel:
    """One panel as Grafana would lay it: kind is Grafana's type, grid is (x, y, width, height)."""

    title: str
    kind: str
    unit: str
    grid: tuple[int, int, int, int]
    asked: tuple[BoundQuery, ...]
    words: Mapping[str, tuple[str, str]]  # value -> text, colour
    stacked: bool


@dataclass(frozen=True)
class CommittedBoard:
    """One board: its panels, and its rows as (grid y, title)."""

    uid: str
    title: str
    panels: tuple[CommittedPanel, ...]
    rows: tuple[tuple[int, str], ...]


def paths(folder: Path = FOLDER) -> list[Path]:
    """The committed boards, by name."""
    return sorted(folder.glob("quartet-*.json"))


def read(path: Path, window: str, usd_hour: float | None = None) -> CommittedBoard:
    """One board with its variables bound: rates over `window`, every replica, the board's own price unless one is given."""
    board = json.loads(path.read_text())
    bound = _defaults(board) | {"__rate_interval": window}
    if usd_hour is not None:
        bound["gpu_usd_hour"] = f"{usd_hour:g}"
    panels = tuple(_panel(panel, bound) for panel in board["panels"] if panel["type"] != "row")
    rows = tuple((panel["gridPos"]["y"], panel["title"]) for panel in board["panels"] if panel["type"] == "row")
    return CommittedBoard(board["uid"], board["title"], panels, rows)


def bind(expr: str, values: Mapping[str, str]) -> str:
    """`expr` with each `$name` replaced; ConfigError for a variable that the board does not define."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ConfigError(f"{expr}: nothing defines ${match[1]}")
        return values[match[1]]

    return _VARIABLE.sub(value, expr)


def _defaults(board: Mapping[str, Any]) -> dict[str, str]:
    return {
        item["name"]: item.get("allValue") or item["query"] for item in board["templating"]["list"] if item["name"] != "datasource"
    }


def _panel(panel: Mapping[str, Any], values: Mapping[str, str]) -> CommittedPanel:
    grid, defaults = panel["gridPos"], panel["fieldConfig"]["defaults"]
    words = {value: word for mapping in defaults.get("mappings", []) for value, word in mapping["options"].items()}
    return CommittedPanel(
        panel["title"],
        panel["type"],
        defaults["unit"],
        (grid["x"], grid["y"], grid["w"], grid["h"]),
        tuple(BoundQuery(bind(target["expr"], values), target["legendFormat"]) for target in panel["targets"]),
        {value: (word["text"], word["color"]) for value, word in words.items()},
        defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
    )
