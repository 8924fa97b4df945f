"""A panel and its lines as HTML and SVG text, for pages that have neither Grafana nor a drawing library."""

import html
import math
from collections.abc import Mapping, Sequence

from dashboards.boards.committed import CommittedPanel
from dashboards.pictures import COLORS, LEGEND_LINES, Span, buckets, clock, text
from dashboards.prometheus import Series

UNIT = (50, 30)  # pixels of a grid unit; the browser stretches the width
LEGEND = 38  # pixels below the chart
AXIS = 14
Line = tuple[str, Series]
Marks = tuple[list[str], list[str]]  # inside the SVG, and labels beside it


def panel(drawn: CommittedPanel, lines: Sequence[Line], span: Span) -> str:
    """One panel: title, chart, and each line's name with its newest value."""
    left, top, width, height = drawn.grid
    place = f"grid-column:{left + 1}/span {width};grid-row:{top + 1}/span {height}"
    head = f'<section style="{place}" id="p{drawn.number}"><h3>{html.escape(drawn.title)}</h3>'
    if drawn.kind == "stat":
        return f"{head}{_stat(drawn, lines, span)}</section>"
    size = width * UNIT[0], height * UNIT[1] - LEGEND - 24
    marks, labels = {"heatmap": _heatmap, "state-timeline": _timeline}.get(drawn.kind, _chart)(drawn, lines, span, size)
    chart = f'<svg viewBox="0 0 {size[0]} {size[1]}" preserveAspectRatio="none">{"".join(marks)}</svg>'
    box = f'<div style="height:{size[1]}px">{chart}{"".join(labels)}</div>'
    ends = f"<footer><i>{clock(span.start)}</i><i>{clock(span.end)}</i></footer>"
    return f"{head}{box}{ends}{_legend(drawn, lines, span)}</section>"


def newest(series: Series, span: Span) -> float | None:
    """A line's value now; None where it has ended before."""
    when, value = series.points[-1]
    return value if when > span.end - span.step else None


def _stat(drawn: CommittedPanel, lines: Sequence[Line], span: Span) -> str:
    value = newest(lines[0][1], span) if lines else None
    return f"<output>{'no traffic' if value is None or math.isnan(value) else text(value, drawn.unit)}</output>"


def _legend(drawn: CommittedPanel, lines: Sequence[Line], span: Span) -> str:
    if drawn.kind == "heatmap":
        return ""
    items = [
        f'<span style="color:{_color(index)}">&#9632;</span>{html.escape(name)} <b>{_value(drawn, newest(series, span))}</b>'
        for index, (name, series) in enumerate(lines[: 2 * LEGEND_LINES])
    ]
    return f"<p>{' &#160; '.join(items) or 'no data'}</p>"


def _value(drawn: CommittedPanel, value: float | None) -> str:
    if value is None:
        return "-"
    return html.escape(drawn.words[f"{value:g}"][0] if f"{value:g}" in drawn.words else text(value, drawn.unit))


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _across(when: float, span: Span, width: int) -> float:
    return width * (when - span.start) / max(span.end - span.start, 1e-9)


def _box(left: float, top: float, width: float, height: float) -> str:
    return f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'


def _label(top: float, words: str) -> str:
    """Beside the SVG, not in it: the browser stretches that."""
    return f'<small style="top:{top:.0f}px">{html.escape(words)}</small>'


def _chart(drawn: CommittedPanel, lines: Sequence[Line], span: Span, size: tuple[int, int]) -> Marks:
    """Lines, or areas laid on each other, over a scale from zero."""
    layers = _stacked(lines) if drawn.stacked else [dict(series.points) for _, series in lines]
    values = [value for layer in layers for value in layer.values() if math.isfinite(value)]
    high, low = max([*values, 0.0]), min([*values, 0.0])
    reach = (high - low) or 1.0
    width, height = size

    def at(when: float, value: float) -> str:
        return f"{_across(when, span, width):.1f},{AXIS + (height - AXIS) * (1 - (value - low) / reach):.1f}"

    marks = []
    for index, layer in reversed(list(enumerate(layers))):
        for piece in _pieces(layer, span.step):
            points = [at(when, value) for when, value in piece]
            if drawn.stacked:
                points = [at(piece[0][0], low), *points, at(piece[-1][0], low)]
            fill = _color(index) if drawn.stacked else "none"
            marks.append(f'<polyline points="{" ".join(points)}" fill="{fill}" stroke="{_color(index)}"/>')
    return marks, [_label(0, text(high, drawn.unit))]


def _pieces(layer: Mapping[float, float], step: float) -> list[list[tuple[float, float]]]:
    """A line where it is unbroken: what Prometheus has no value for is a gap."""
    pieces: list[list[tuple[float, float]]] = []
    for when, value in sorted(layer.items()):
        if not math.isfinite(value):
            continue
        if not pieces or when - pieces[-1][-1][0] > 1.5 * step:
            pieces.append([])
        pieces[-1].append((when, value))
    return pieces


def _stacked(lines: Sequence[Line]) -> list[dict[float, float]]:
    """Each line's upper edge when it lies on those before it; a missing value counts as nothing."""
    instants = sorted({when for _, series in lines for when, _ in series.points})
    edges, below = [], dict.fromkeys(instants, 0.0)
    for _, series in lines:
        own = {when: value for when, value in series.points if math.isfinite(value)}
        below = {when: below[when] + own.get(when, 0.0) for when in instants}
        edges.append(below)
    return edges


def _heatmap(drawn: CommittedPanel, lines: Sequence[Line], span: Span, size: tuple[int, int]) -> Marks:
    """A row a bucket; darker is more."""
    shown = buckets(lines)
    most = max([value for _, cells in shown for value in cells.values()], default=1.0)
    tall, wide = size[1] / max(len(shown), 1), size[0] * span.step / max(span.end - span.start, 1e-9)
    marks: list[str] = []
    labels: list[str] = []
    for index, (bound, cells) in enumerate(shown):
        top = size[1] - (index + 1) * tall
        for when, value in cells.items():
            left = _across(when, span, size[0]) - wide
            marks.append(f'<rect {_box(left, top, wide, tall)} fill="{COLORS[1]}" opacity="{value / most:.2f}"/>')
        if index % max(1, len(shown) // 5) == 0:
            labels.append(_label(top + tall - AXIS, text(bound, drawn.unit)))
    return marks, labels


def _timeline(drawn: CommittedPanel, lines: Sequence[Line], span: Span, size: tuple[int, int]) -> Marks:
    """A bar a line, in the colours of its values' words."""
    tall, wide = size[1] / max(len(lines), 1), size[0] * span.step / max(span.end - span.start, 1e-9)
    marks: list[str] = []
    for index, (_, series) in enumerate(lines):
        for when, value in series.points:
            color = drawn.words.get(f"{value:g}", ("", "gray"))[1]
            left, top = _across(when, span, size[0]) - wide, index * tall
            marks.append(f'<rect {_box(left, top + 2, wide + 0.5, max(tall - 4, 1))} fill="{color}"/>')
    return marks, [_label((index + 0.5) * tall - AXIS / 2, name) for index, (name, _) in enumerate(lines)]
