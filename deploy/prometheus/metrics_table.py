"""Write the table of metrics into docs/operate.md: `python deploy/prometheus/metrics_table.py`."""

from pathlib import Path

from omnidraft.telemetry.metric_definitions import COMMON, CONTROLLER, DISTILLER, PROPOSER, WORKER

PAGE = Path(__file__).parents[2] / "docs" / "operate.md"
BEGIN, END = "<!-- metrics:", "<!-- end of metrics -->"
ROLES = {"all": COMMON, "worker": WORKER, "in vLLM, too": PROPOSER, "distiller": DISTILLER, "controller": CONTROLLER}


def table() -> str:
    """Return the metrics of all roles as a Markdown table."""
    lines = ["| by | metric | labels | what it counts |", "| --- | --- | --- | --- |"]
    for role, metrics in ROLES.items():
        for name, metric in metrics.items():
            kind = "" if metric.kind == "counter" else f" ({metric.kind})"
            lines.append(f"| {role} | `{name}`{kind} | {', '.join(metric.labels)} | {metric.help} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the table of the metrics as they are defined."""
    head, rest = text.split(BEGIN, 1)
    comment, rest = rest.split("\n", 1)
    return f"{head}{BEGIN}{comment}\n\n{table()}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
