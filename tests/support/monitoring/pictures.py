"""Draws the committed boards from a Prometheus.

The panels' queries, units, legends and places are the boards' own; drawn by matplotlib, not by Grafana.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.monitoring.committed import CommittedBoard, CommittedPanel, paths, read
from tests.support.monitoring.prometheus import Api, Series, finite

UNIT_PIXELS = (48, 34)  # a grid unit's width and height
DPI = 72
POINTS = 120
LEGEND_LINES = 8
COLORS = ("#3274d9", "#e0752d", "#3f9f5f", "#b04a9a", "#c4a000", "#7b61c9", "#4fa3a5", "#a05030")
BACK, INK, FAINT = "#ffffff", "#222222", "#8a8a8a"


@dataclass(frozen=True)
class Span:
    """The time drawn: unix seconds, and the points' distance in seconds."""

    start: float
    end: float
    step: float


def draw(page: CommittedBoard, api: Api, span: Span, path: Path) -> None:
    """One board into one PNG. ConfigError where Prometheus refuses a query."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tall = max(panel.grid[1] + panel.grid[3] for panel in page.panels)
    width, height = 24 * UNIT_PIXELS[0], (tall + 1) * UNIT_PIXELS[1]
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=BACK)
    FigureCanvasAgg(figure)
    figure.text(0.008, 1 - 0.6 / (tall + 1), page.title, fontsize=15, weight="bold", color=INK, va="center")
    for top, title in page.rows:
        figure.text(0.008, 1 - (top + 1.55) / (tall + 1), title, fontsize=12, weight="bold", color=INK, va="center")
    for panel in page.panels:
        _panel(figure, panel, api, span, tall + 1)
    figure.savefig(path, pil_kwargs={"optimize": True})
    _shrink(path)


def _panel(figure: Any, panel: CommittedPanel, api: Api, span: Span, rows: int) -> None:
    left, top, width, height = panel.grid
    inset = (0.9, 0.75, 1.2, 1.75) if panel.kind != "stat" else (0.2, 0.8, 0.4, 1.0)  # left, top, less width, less height
    low = 1 - (top + 1 + inset[1] + height - inset[3]) / rows
    axes = figure.add_axes(((left + inset[0]) / 24, low, (width - inset[2]) / 24, (height - inset[3]) / rows))
    axes.set_title(panel.title, fontsize=8.5, color=INK, loc="left", pad=3)
    if panel.kind == "stat":
        return _stat(axes, panel, api, span)
    lines = [(series.named(asked.legend), series) for asked in panel.asked for series in _asked(api, asked.expr, span)]
    axes.tick_params(labelsize=6.5, colors=FAINT, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(span.start, span.end)
    axes.set_xticks([span.start, span.end], [_clock(span.start), _clock(span.end)])
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=FAINT)
        return None
    return (_timeline if panel.kind == "state-timeline" else _lines)(axes, panel, lines, span)


def _asked(api: Api, expr: str, span: Span) -> tuple[Series, ...]:
    return api.ask_range(expr, span.start, span.end, span.step)


def _lines(axes: Any, panel: CommittedPanel, lines: Sequence[tuple[str, Series]], _: Span) -> None:
    shades = dict(zip(range(len(lines)), COLORS * (len(lines) // len(COLORS) + 1), strict=False))
    if panel.stacked:
        _stack(axes, lines, list(shades.values()))
    else:
        for index, (name, series) in enumerate(lines):
            axes.plot(*zip(*series.points, strict=True), color=shades[index], linewidth=1.1, label=name)
    low, high = axes.get_ylim()
    flat = all(value == 0 for _, series in lines for _, value in series.points)
    axes.set_ylim(0 if flat else min(0.0, low), 1 if flat else high * (1.25 if len(lines) <= LEGEND_LINES else 1))  # room for names
    axes.yaxis.set_major_formatter(lambda value, _place: _text(value, panel.unit))
    axes.grid(axis="y", linewidth=0.3, color="#dddddd")
    if len(lines) > LEGEND_LINES:
        axes.text(0.01, 0.99, f"{len(lines)} lines", transform=axes.transAxes, fontsize=6.5, color=FAINT, va="top")
        return
    columns = 4 if len(lines) > 3 else len(lines)
    axes.legend(fontsize=6, frameon=False, ncols=columns, loc="upper left", labelcolor=INK, handlelength=1.0, borderaxespad=0.1)


def _stack(axes: Any, lines: Sequence[tuple[str, Series]], shades: Sequence[str]) -> None:
    """Values at the same instants, laid on each other; a missing one counts as nothing."""
    instants = sorted({when for _, series in lines for when, _ in series.points})
    heights = [
        [value if math.isfinite(value := dict(series.points).get(when, 0.0)) else 0.0 for when in instants] for _, series in lines
    ]
    axes.stackplot(instants, heights, labels=[name for name, _ in lines], colors=shades[: len(lines)], alpha=0.75, linewidth=0)


def _timeline(axes: Any, panel: CommittedPanel, lines: Sequence[tuple[str, Series]], span: Span) -> None:
    for row, (_, series) in enumerate(lines):
        for when, value in series.points:
            color = panel.words.get(f"{value:g}", ("", "gray"))[1]
            axes.broken_barh([(when, span.step)], (row - 0.4, 0.8), color=f"tab:{color}")
    axes.set_yticks(range(len(lines)), [name.removeprefix("replica-") for name, _ in lines])
    axes.set_ylim(-0.6, len(lines) - 0.4)
    for word, color in panel.words.values():
        axes.plot([], [], color=f"tab:{color}", linewidth=5, label=word)
    axes.legend(fontsize=6, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)


def _stat(axes: Any, panel: CommittedPanel, api: Api, span: Span) -> None:
    answer = api.ask(panel.asked[0].expr, span.end)
    shown = _text(answer[0].last, panel.unit) if finite(answer) else "no traffic"
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#dddddd")
    axes.text(0.5, 0.45, shown, transform=axes.transAxes, ha="center", va="center", fontsize=17, color=INK)


def _text(value: float, unit: str) -> str:
    """A figure as Grafana's unit would write it, roughly."""
    if not math.isfinite(value):
        return "inf" if value > 0 else "-"
    match unit:
        case "s" if 0 < abs(value) < 1:
            return f"{value * 1000:.3g} ms"
        case "s":
            return f"{value:.3g} s"
        case "percentunit":
            return f"{value * 100:.4g} %"
        case "currencyUSD":
            return f"${value:.3g}"
        case "reqps":
            return f"{value:.3g}/s"
    return f"{value / 1000:.3g} k" if abs(value) >= 10000 else f"{value:.4g}"


def _clock(instant: float) -> str:
    """The time of day, UTC."""
    return time.strftime("%H:%M:%S", time.gmtime(instant))


def _shrink(path: Path) -> None:
    """A few colours are enough for a chart, and a third of the bytes."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(160)
    small.save(path, optimize=True)


def draw_all(api: Api, seconds: float, folder: Path, window: str, end: float | None = None) -> list[Path]:
    """Every committed board of the last `seconds` (up to `end`, unix time) into `folder`; rates look back over `window`."""
    until = time.time() if end is None else end
    span = Span(until - seconds, until, max(1.0, seconds / POINTS))
    written = []
    for path in paths():
        written.append(folder / f"{path.stem}.png")
        draw(read(path, window), api, span, written[-1])
    return written
