"""Write the Grafana dashboards, which are code: `python deploy/grafana/make_dashboards.py`, or `make dashboards`.

The panels are in serving.py and learning.py beside this file, one line for each query; a test fails when the JSON files
are not what this writes. `$target` chooses among the targets; `$__rate_interval` is Grafana's.
"""

import json
from pathlib import Path
from typing import Any

from learning import LEARNING
from panels import Board, Panel, Row
from serving import SERVING

HERE = Path(__file__).parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
PANELS_A_ROW = 24 // WIDTH


def dashboard(board: Board) -> dict[str, Any]:
    """Return a board in Grafana's JSON model: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in board.rows:
        panels.append(_row(row, y, len(panels) + 1))
        y += 1
        for number, panel in enumerate(row.panels):
            position = {"x": number % PANELS_A_ROW * WIDTH, "y": y + number // PANELS_A_ROW * HEIGHT}
            panels.append(_panel(panel, position, len(panels) + 1))
        y += -(-len(row.panels) // PANELS_A_ROW) * HEIGHT
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["omnidraft"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(board)},
        "annotations": {"list": [_annotation(name, expr) for name, expr in board.events]},
        "links": [{"type": "dashboards", "title": "omnidraft", "tags": ["omnidraft"], "keepTime": True}],
        "panels": panels,
    }


def _row(row: Row, y: int, number: int) -> dict[str, Any]:
    position = {"x": 0, "y": y, "w": 24, "h": 1}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": position, "panels": []}


def _panel(panel: Panel, position: dict[str, int], number: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "noValue": "none"}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.threshold is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.threshold}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    targets = [
        {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": position | {"w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def _variables(board: Board) -> list[dict[str, Any]]:
    query = f"label_values({board.targets_of}, target)"
    return [
        {"name": "datasource", "type": "datasource", "label": "Prometheus", "query": "prometheus"},
        {
            "name": "target",
            "type": "query",
            "label": "Target",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": "targets"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _annotation(name: str, expr: str) -> dict[str, Any]:
    return {"name": name, "enable": True, "datasource": DATASOURCE, "expr": expr, "iconColor": "orange"}


def files() -> dict[Path, str]:
    """Return every dashboard's file and its content."""
    return {
        HERE / "dashboards" / f"{board.uid}.json": json.dumps(dashboard(board), indent=2) + "\n"
        for board in (SERVING, LEARNING)
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path)
