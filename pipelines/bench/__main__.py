"""Decoding speed, side by side in one process on the same prompts, interleaved.

`python -m pipelines.bench --prompts FILE --json OUT`; the methods are in methods.py, the figures in summary.py.
OUT is written after every prompt.
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from omnidraft import config
from omnidraft.cli.choices import chosen
from omnidraft.cli.options import Quantize
from omnidraft.errors import ConfigError
from omnidraft.files import require_writable_file, save_json
from omnidraft.hosts import process
from pipelines.bench import page, summary
from pipelines.bench.methods import NAMES, Setup, load
from pipelines.bench.runs import Failure, Outcomes, about, measure, plain_rows, tasks_of

DEFAULT_METHODS = "plain,omnidraft,hf-generate"


def main(
    prompts_paths: Annotated[
        list[Path] | None, typer.Option("--prompts", help="JSON lines with prompt or question; may be given again.")
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts of each file, of split test where it names splits.")
    ] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}, with commas.")] = DEFAULT_METHODS,
    mode: Annotated[str | None, typer.Option(help="fast or reproducible, for omnidraft.")] = None,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    snapshot: Annotated[str | None, typer.Option(help="Folder, version or alias; the base drafter without it.")] = None,
    stream: Annotated[
        bool, typer.Option(help="One tenant's stream: each method remembers its own earlier answers, and no others.")
    ] = False,
    quantize: Quantize = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; an accelerator is used if there is one.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for rows and runs.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="A page with the tables.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Compare decoding methods."""
    names = chosen(methods, NAMES, "method", baseline="plain")
    require_writable_file(json_path)
    _choose_device(device)
    models = {"target": target, "drafter": drafter, "precision": quantize}
    settings = config.load(config_path, models=models, decode={"mode": mode})
    tasks = tasks_of(prompts_paths, num_prompts)
    outcomes: Outcomes = {task: {name: [] for name in names} for task in tasks}
    with ExitStack() as stack:
        loaded = load(names, Setup(settings, temperature, snapshot, is_stream=stream), stack)
        for name, reason in loaded.missing.items():
            print(f"{name}: {reason}", file=sys.stderr)
        options = {"snapshot": snapshot, "temperature": temperature, "stream": stream, "max_new_tokens": max_new_tokens}
        described = about("pipelines.bench", settings, tasks, fingerprint=loaded.target, **options)

        def publish() -> dict[str, Any]:
            """Return the report so far, and save it."""
            rows = [row for task in tasks for row in summary.rows(task, outcomes[task], is_greedy=temperature == 0)]
            content = {**described, "rows": rows, "runs": plain_rows(outcomes)}
            if json_path is not None:
                save_json(content, json_path)
            return content

        runnable = {name: loaded.methods.get(name) or Failure(loaded.missing[name]) for name in names}
        measure(tasks, runnable, max_new_tokens, outcomes, publish)
    page.show(publish(), markdown_path)


def _choose_device(device: str | None) -> None:
    """Hide the accelerator, or require it: models go to the one that torch sees."""
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no accelerator here")


if __name__ == "__main__":
    process.entry("bench", main)
