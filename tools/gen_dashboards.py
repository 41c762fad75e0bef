"""Generate deploy/grafana/dashboards from tools/dashboards.py.

.venv/bin/python tools/gen_dashboards.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import dashboards
from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
_SOURCE = DataSourceRef("prometheus", "${source}")
_WIDTH, _HEIGHT = 8, 8
_NUMBER_WIDTH, _NUMBER_HEIGHT = 6, 4
_PAGE_WIDTH = 24


def _queries(panel: dashboards.Panel) -> Iterable[prometheus.Dataquery]:
    for position, (legend, expression) in enumerate(panel.queries.items()):
        yield (
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + position))
            .datasource(_SOURCE)
            .expr(expression)
            .legend_format(legend)
        )


def _number(panel: dashboards.Panel) -> stat.Panel:
    steps = [Threshold(None, "green")]
    if panel.bad_from is not None:
        steps.append(Threshold(panel.bad_from, "red"))
    built = stat.Panel().span(_NUMBER_WIDTH).height(_NUMBER_HEIGHT)
    return built.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))


def _lines(panel: dashboards.Panel, width: int) -> timeseries.Panel:
    built = timeseries.Panel().span(width).height(_HEIGHT).min(0)
    if panel.kind == "stacked":
        built.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    return built


def _panel(panel: dashboards.Panel, number: int, width: int) -> stat.Panel | timeseries.Panel:
    built = _number(panel) if panel.kind == "number" else _lines(panel, width)
    built.id(number).title(panel.title).description(panel.says).unit(panel.unit)
    built.datasource(_SOURCE)
    for query in _queries(panel):
        built.with_target(query)
    return built


def _variable(variable: dashboards.Variable) -> dashboard.QueryVariable:
    built = dashboard.QueryVariable(variable.name).datasource(_SOURCE)
    built.query(f"label_values({variable.metric}, {variable.label})")
    built.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    if variable.all_too:
        built.multi(True).include_all(True).all_value(".*")
    return built


def build(page: dashboards.Dashboard) -> str:
    """Grafana's JSON of a dashboard."""
    built = dashboard.Dashboard(page.title).uid(f"kvcm-{page.name}").description(page.says)
    built.tags(["kvcm"]).time("now-6h", "now").refresh("30s").readonly()
    built.link(
        dashboard.DashboardLink("kvcm")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["kvcm"])
        .keep_time(True)
    )
    built.with_variable(dashboard.DatasourceVariable("source").type("prometheus"))
    for variable in page.variables:
        built.with_variable(_variable(variable))
    number = 0
    for heading, panels in page.rows.items():
        built.with_row(dashboard.Row(heading).id(number := number + 1))
        lines = [panel for panel in panels if panel.kind != "number"]
        width = _PAGE_WIDTH // len(lines) if len(lines) < _PAGE_WIDTH // _WIDTH else _WIDTH
        for panel in panels:
            built.with_panel(_panel(panel, number := number + 1, width))
    return json.dumps(built.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check: bool = parser.parse_args(arguments).check
    made = {FOLDER / f"{page.name}.json": build(page) for page in dashboards.ALL}
    if not check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
        return 0
    found = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    if found == made:
        return 0
    print("deploy/grafana/dashboards is not what tools/gen_dashboards.py makes; run it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
