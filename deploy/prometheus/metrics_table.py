"""Write the table of metrics into docs/observability.md: `python deploy/prometheus/metrics_table.py`."""

from pathlib import Path

from omnidraft.telemetry.metric_definitions import COMMON, CONTROLLER, DISTILLER, PROPOSER, WORKER

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
BEGIN, END = "<!-- metrics:", "<!-- end of metrics -->"
ROLES = {"all": COMMON, "worker": WORKER, "in vLLM, too": PROPOSER, "distiller": DISTILLER, "controller": CONTROLLER}


def table() -> str:
    """Of all roles, in Markdown."""
    lines = ["| by | metric | labels | what it counts |", "| --- | --- | --- | --- |"]
    for role, metrics in ROLES.items():
        for name, metric in metrics.items():
            kind = "" if metric.kind == "counter" else f" ({metric.kind})"
            lines.append(f"| {role} | `{name}`{kind} | {', '.join(metric.labels)} | {metric.help} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table as it should be."""
    head, rest = text.split(BEGIN, 1)
    comment, rest = rest.split("\n", 1)
    return f"{head}{BEGIN}{comment}\n\n{table()}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
