"""The HTTP server, measured: what it adds to the library call, many clients for minutes, snapshots taken up under load.

`python -m pipelines.serve_bench --json OUT`; the parts are the modules beside this one. What was measured so far
is in OUT after every part.
"""

import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.hosts import process
from pipelines.lib import machine, report
from pipelines.lib.check_result import CheckResult
from pipelines.serve_bench import load, overhead, swap
from pipelines.serve_bench.server import ServeBenchPlan

PARTS: Mapping[str, Callable[[ServeBenchPlan], CheckResult]] = {
    "overhead": overhead.run,
    "load": load.run,
    "swap": swap.run,
}
LISTS = ("rss_mib",)
"""Figures that are too long for a table."""
EXIT_BROKEN = 1


def main(
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}, with commas.")] = ",".join(PARTS),
    target: Annotated[str, typer.Option(help="A name, folder or hub id; tiny is a random model.")] = "tiny",
    drafter: Annotated[str, typer.Option(help="As --target.")] = "tiny",
    repeats: Annotated[int, typer.Option(min=3, help="Of overhead: how often each way is asked.")] = 40,
    tokens: Annotated[int, typer.Option(min=2, help="Of overhead and swap: tokens of an answer.")] = 128,
    clients: Annotated[int, typer.Option(min=2, help="Of load.")] = 64,
    seconds: Annotated[float, typer.Option(min=5, help="Of load.")] = 600.0,
    swaps: Annotated[int, typer.Option(min=1, help="Of swap: snapshots taken up, one after another.")] = 10,
    seed: Annotated[int, typer.Option(help="Of load: what clients ask, and in which order.")] = 0,
    out: Annotated[Path, typer.Option(help="Where settings, logs and snapshots go.")] = Path("runs/serve"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Where figures and promises go.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="The same as a page.")] = None,
) -> None:
    """Measure the HTTP server on this machine, and say which promises held. Exit code 1 when one was broken.

    \b
    python -m pipelines.serve_bench                                        some 15 minutes, two tiny models
    python -m pipelines.serve_bench --parts load --seconds 30              a first look
    python -m pipelines.serve_bench --parts overhead,swap --target qwen2.5-coder-0.5b --drafter smollm2-135m
    """
    names = [name.strip() for name in parts.split(",") if name.strip()]
    if unknown := sorted(set(names) - set(PARTS)):
        raise RequestError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    plan = ServeBenchPlan(out.absolute(), target, drafter, repeats, tokens, clients, seconds, swaps, seed)
    command = shlex.join(["python", "-m", "pipelines.serve_bench", *sys.argv[1:]])
    made: dict[str, Any] = {"command": command, "machine": machine.describe(), "parts": {}}
    for name in names:
        made["parts"][name] = _run(name, plan)
        if json_path is not None:
            report.save(made, json_path)
    for name, told in made["parts"].items():
        Console().print(_table(name, told["figures"]))
    if markdown_path is not None:
        markdown_path.parent.mkdir(parents=True, exist_ok=True)
        markdown_path.write_text(_page(made))
    if broken := [promise for told in made["parts"].values() for promise, held in told["promises"].items() if not held]:
        for promise in broken:
            print(f"BROKEN: {promise}")
        raise typer.Exit(EXIT_BROKEN)


def _run(name: str, plan: ServeBenchPlan) -> dict[str, Any]:
    """One part; one that could not be brought to its end is a broken promise."""
    print(f"{name} ...", file=sys.stderr)
    started = time.monotonic()
    try:
        told = PARTS[name](plan).plain_data()
    except OmnidraftError as exc:
        told = {"figures": {}, "promises": {f"{name} runs to its end: {exc}": False}}
    return told | {"seconds": round(time.monotonic() - started, 1)}


def _table(name: str, figures: Mapping[str, Any]) -> Table:
    made = Table("figure", "value", title=name)
    for figure, value in figures.items():
        if figure not in LISTS:
            made.add_row(figure.replace("_", " "), str(value))
    return made


def _page(made: Mapping[str, Any]) -> str:
    about = made["machine"]
    lines = ["# The HTTP server, measured\n", f"Written by `{made['command']}`, commit {about['commit']},"]
    lines += [f"{about['cores']} cores of {about['processor']}. Nothing here is typed by hand.\n"]
    for name, told in made["parts"].items():
        lines += [f"## {name}\n", "| promise | held |", "|---|---|"]
        lines += [f"| {promise} | {'yes' if held else '**no**'} |" for promise, held in told["promises"].items()]
        lines += ["\n| figure | value |", "|---|---|"]
        shown = [(figure, value) for figure, value in told["figures"].items() if figure not in LISTS]
        lines += [f"| {figure.replace('_', ' ')} | {value} |" for figure, value in shown]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends its server first
    process.entry("serve_bench", main)
