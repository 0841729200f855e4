"""The dashboards and alerts of deploy/, as tests read them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
BOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
_VARIABLES = {"$__rate_interval": "20s", "$target": ".*"}
_NAME = re.compile(r"\b(?:omnidraft|process)_[a-z_]+")


def board(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def queries() -> Iterator[tuple[str, str]]:
    """(board: panel: legend, expression) of every query, Grafana's variables filled in."""
    for path in BOARDS:
        loaded = board(path)
        for panel in loaded["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.stem}: {panel['title']}: {target['legendFormat']}", filled(target["expr"])
        for each in loaded["annotations"]["list"]:
            yield f"{path.stem}: {each['name']}", filled(each["expr"])


def alerts() -> dict[str, dict[str, Any]]:
    """By name."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def filled(expr: str) -> str:
    for name, value in _VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def metric_names(expr: str) -> set[str]:
    """Ours, as the table calls them."""
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name in _NAME.findall(expr)}
    return {name for name in names if name.startswith("omnidraft_")}
