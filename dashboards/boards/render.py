"""A Board becomes Grafana's JSON, through grafana-foundation-sdk (the extra [dashboards])."""

import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as commons
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.boards.panels import GRID_WIDTH, Board, Panel, Query

SOURCE = commons.DataSourceRef(type_val="prometheus", uid="${datasource}")
SCOPES = ("application", "deployment", "replica")
GPU_PRICE_USD_HOUR = 3.0  # a constant variable of each board: edit it there, or here


def document(board: Board) -> str:
    """The board as committed: JSON text, keys sorted, so that equal boards are equal files."""
    return json.dumps(_dashboard(board).build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _dashboard(board: Board) -> dashboard.Dashboard:
    built = (
        dashboard.Dashboard(board.title).uid(board.uid).description(board.about).tags(["quartet"])
        .refresh("10s").time("now-1h", "now").timezone("browser").readonly().tooltip(models.DashboardCursorSync.CROSSHAIR)
    )  # fmt: skip
    for variable in _variables():
        built = built.with_variable(variable)
    for item in _layout(board):
        built = built.with_row(item) if isinstance(item, dashboard.Row) else built.with_panel(item)
    return built


def _variables() -> Iterator[Any]:
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    for name in SCOPES:
        yield (
            dashboard.QueryVariable(name).label(name).datasource(SOURCE).query(f"label_values(up{{job=\"quartet\"}}, {name})")
            .multi(True).include_all(True).all_value(".*").refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .current(models.VariableOption(text="All", value="$__all"))
        )  # fmt: skip
    yield dashboard.ConstantVariable("gpu_usd_hour").label("USD a GPU and hour").value(f"{GPU_PRICE_USD_HOUR:g}")


def _layout(board: Board) -> Iterator[Any]:
    """Rows under each other, panels flowing from left to right; ids count up from 1."""
    number, top = 0, 0
    for row in board.rows:
        number += 1
        yield dashboard.Row(row.title).id(number).grid_pos(models.GridPos(h=1, w=GRID_WIDTH, x=0, y=top))
        left, tallest, top = 0, 0, top + 1
        for panel in row.panels:
            if left + panel.width > GRID_WIDTH:
                left, tallest, top = 0, 0, top + tallest
            number += 1
            yield _panel(panel).id(number).grid_pos(models.GridPos(h=panel.height, w=panel.width, x=left, y=top))
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _panel(panel: Panel) -> Any:
    match panel.kind:
        case "lines":
            built: Any = _lines()
        case "stack":
            built = _lines().fill_opacity(40).stacking(common.StackingConfig().mode(commons.StackingMode.NORMAL))
        case "stat":
            built = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        case "timeline":
            built = statetimeline.Panel().show_value(commons.VisibilityMode.NEVER)
    built = built.title(panel.title).description(panel.about).unit(panel.unit).datasource(SOURCE).no_value("no traffic")
    if panel.steps:
        steps = [models.Threshold(value=step.value, color=step.color) for step in panel.steps]
        built = built.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.names:
        words = {f"{value:g}": models.ValueMappingResult(text=text, color=color) for value, text, color in panel.names}
        built = built.mappings([models.ValueMap(options=words)])
    for index, query in enumerate(panel.queries):
        built = built.with_target(_target(query, panel, chr(ord("A") + index)))
    return built


def _lines() -> Any:
    legend = common.VizLegendOptions().show_legend(True).display_mode(commons.LegendDisplayMode.LIST)
    legend = legend.placement(commons.LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(commons.TooltipDisplayMode.MULTI)
    return timeseries.Panel().legend(legend).tooltip(tooltip).axis_soft_min(0).span_nulls(False)


def _target(query: Query, panel: Panel, ref: str) -> Any:
    built = prometheus.Dataquery().datasource(SOURCE).expr(query.expr).legend_format(query.legend).ref_id(ref)
    built = built.format(PromQueryFormat.TIME_SERIES)
    return built.instant() if panel.kind == "stat" else built.range()
