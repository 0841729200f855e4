"""The HTTP server, measured: its overhead over the library call, many clients for minutes, snapshot swaps under load.

`python -m pipelines.serve_bench --json OUT`; the parts are the modules beside this one. OUT is written after every
part.
"""

import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft.hosts import process
from pipelines.lib import machine, report
from pipelines.lib.check_result import CheckResult, broken_assertions, exit_if_broken, run_part
from pipelines.lib.choices import chosen
from pipelines.serve_bench import load, overhead, swap
from pipelines.serve_bench.server import ServeBenchPlan

PARTS: Mapping[str, Callable[[ServeBenchPlan], CheckResult]] = {
    "overhead": overhead.run,
    "load": load.run,
    "swap": swap.run,
}
LISTS = ("rss_mib",)
"""Figures that are too long for a table."""


def main(
    parts: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}, with commas.")] = ",".join(PARTS),
    target: Annotated[str, typer.Option(help="A name, folder or hub id; tiny is a random model.")] = "tiny",
    drafter: Annotated[str, typer.Option(help="Like --target.")] = "tiny",
    repeats: Annotated[int, typer.Option(min=3, help="For overhead: requests of each kind.")] = 40,
    tokens: Annotated[int, typer.Option(min=2, help="For overhead and swap: tokens of an answer.")] = 128,
    clients: Annotated[int, typer.Option(min=2, help="For load.")] = 64,
    seconds: Annotated[float, typer.Option(min=5, help="For load.")] = 600.0,
    swaps: Annotated[int, typer.Option(min=1, help="For swap: snapshots swapped in, one after another.")] = 10,
    seed: Annotated[int, typer.Option(help="For load: it decides the requests and their order.")] = 0,
    out: Annotated[Path, typer.Option(help="A folder for settings, logs and snapshots.")] = Path("runs/serve"),
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for figures and promises.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="The same as a page.")] = None,
) -> None:
    """Measure the HTTP server on this machine and check its promises. Exit code 1 when one was broken.

    \b
    python -m pipelines.serve_bench                                        some 15 minutes, two tiny models
    python -m pipelines.serve_bench --parts load --seconds 30              a first look
    python -m pipelines.serve_bench --parts overhead,swap --target qwen2.5-coder-0.5b --drafter smollm2-135m
    """
    names = chosen(parts, PARTS, "part")
    plan = ServeBenchPlan(out.absolute(), target, drafter, repeats, tokens, clients, seconds, swaps, seed)
    content: dict[str, Any] = machine.made_by("pipelines.serve_bench") | {"parts": {}}
    for name in names:
        content["parts"][name] = run_part(name, partial(PARTS[name], plan))
        if json_path is not None:
            report.save(content, json_path)
    for name, part in content["parts"].items():
        Console().print(_table(name, part["figures"]))
    if markdown_path is not None:
        markdown_path.parent.mkdir(parents=True, exist_ok=True)
        markdown_path.write_text(_page(content))
    exit_if_broken(broken_assertions(content["parts"]))


def _table(name: str, figures: Mapping[str, Any]) -> Table:
    table = Table("figure", "value", title=name)
    for figure, value in figures.items():
        if figure not in LISTS:
            table.add_row(figure.replace("_", " "), str(value))
    return table


def _page(content: Mapping[str, Any]) -> str:
    about = content["machine"]
    lines = ["# The HTTP server, measured\n", f"Written by `{content['command']}`, commit {about['commit']},"]
    lines += [f"{about['cores']} cores of {about['processor']}. Nothing here is typed by hand.\n"]
    for name, part in content["parts"].items():
        lines += [f"## {name}\n", "| promise | held |", "|---|---|"]
        lines += [f"| {promise} | {'yes' if held else '**no**'} |" for promise, held in part["promises"].items()]
        lines += ["\n| figure | value |", "|---|---|"]
        shown = [(figure, value) for figure, value in part["figures"].items() if figure not in LISTS]
        lines += [f"| {figure.replace('_', ' ')} | {value} |" for figure, value in shown]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends its server first
    process.entry("serve_bench", main)
