"""Decoding speed, side by side in one process on the same prompts, interleaved.

`python -m pipelines.bench --prompts FILE --json OUT`; the methods are in methods.py, the figures in summary.py.
OUT is written after every prompt.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from omnidraft import config, prompts
from omnidraft.demo.recorded import QUESTIONS
from omnidraft.errors import ConfigError, RequestError
from omnidraft.files import require_writable_file, save_json
from omnidraft.hosts import process
from omnidraft.progress import bar
from omnidraft.prompts import Prompt
from pipelines.bench import page, summary
from pipelines.bench.methods import NAMES, BenchSetup, LoadedMethods, load
from pipelines.bench.runs import WARM_UP_TEXT, WARM_UP_TOKENS, Failure, Method, Outcome, attempt, rotated
from pipelines.lib import machine
from pipelines.lib.choices import chosen, named_files

DEFAULT_METHODS = "plain,omnidraft,hf-generate"

Outcomes = dict[str, list[Outcome]]


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
    quantize: Annotated[str | None, typer.Option(help="int4 or int8: the target of our own engine.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; an accelerator is used if there is one.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for rows and runs.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="A page with the tables.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Compare decoding methods."""
    names = _names(methods)
    require_writable_file(json_path)
    _choose_device(device)
    models = {"target": target, "drafter": drafter, "precision": quantize}
    settings = config.load(config_path, models=models, decode={"mode": mode})
    tasks = _tasks(prompts_paths, num_prompts)
    with ExitStack() as stack:
        loaded = load(names, BenchSetup(settings, temperature, snapshot, is_stream=stream), stack)
        options = {
            "command": machine.command("pipelines.bench"),
            "fingerprint": loaded.target,
            "snapshot": snapshot,
            "temperature": temperature,
            "stream": stream,
            "max_new_tokens": max_new_tokens,
            "num_prompts": {task: len(texts) for task, texts in tasks.items()},
        }
        about = {"machine": machine.describe(), "options": options, "settings": settings.model_dump(mode="json")}
        outcomes: dict[str, Outcomes] = {task: {name: [] for name in names} for task in tasks}
        publish = _publisher(about, outcomes, is_greedy=temperature == 0, json_path=json_path)
        _measure_all(tasks, _runnable(names, loaded), max_new_tokens, outcomes, publish)
    page.show(publish(), markdown_path)


def _names(methods: str) -> list[str]:
    names = chosen(methods, NAMES, "method")
    if "plain" not in names:
        raise RequestError("--methods needs plain: speed-ups are quoted against it")
    return names


def _choose_device(device: str | None) -> None:
    """Hide the accelerator, or require it: models go to the one that torch sees."""
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {device!r}")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no accelerator here")


def _tasks(paths: Sequence[Path] | None, num_prompts: int) -> dict[str, list[Prompt]]:
    """Return the prompts of each file by the file's name."""
    if not paths:
        print(f"no --prompts: using {QUESTIONS}", file=sys.stderr)
    files = named_files(paths or [QUESTIONS])
    return {task: prompts.read(path, num_prompts, split="test") for task, path in files.items()}


def _runnable(names: Sequence[str], loaded: LoadedMethods) -> dict[str, Method | Failure]:
    for name, reason in loaded.missing.items():
        print(f"{name}: {reason}", file=sys.stderr)
    return {name: loaded.methods.get(name) or Failure(loaded.missing[name]) for name in names}


def _measure_all(
    tasks: Mapping[str, Sequence[Prompt]],
    methods: Mapping[str, Method | Failure],
    max_new_tokens: int,
    outcomes: Mapping[str, Outcomes],
    publish: Callable[[], Any],
) -> None:
    """Run every method on every prompt; the order rotates from prompt to prompt."""
    warm_up = replace(next(iter(tasks.values()))[0], text=WARM_UP_TEXT)
    for method in methods.values():
        _outcome(method, warm_up, min(WARM_UP_TOKENS, max_new_tokens))
    for task, texts in tasks.items():
        with bar(f"{task}: prompts", len(texts)) as advance:
            for number, prompt in enumerate(texts):
                for name in rotated(list(methods), number):
                    outcomes[task][name].append(_outcome(methods[name], prompt, max_new_tokens))
                publish()
                advance()


def _outcome(method: Method | Failure, prompt: Prompt, max_new_tokens: int) -> Outcome:
    return method if isinstance(method, Failure) else attempt(method, prompt, max_new_tokens)


def _publisher(
    about: Mapping[str, Any], outcomes: Mapping[str, Outcomes], *, is_greedy: bool, json_path: Path | None
) -> Callable[[], dict[str, Any]]:
    def publish() -> dict[str, Any]:
        """Return the report so far, and save it."""
        rows = [row for task in outcomes for row in summary.rows(task, outcomes[task], is_greedy=is_greedy)]
        runs = [
            {"task": task, "method": name, "prompt": number} | outcome.plain_data()
            for task, of_task in outcomes.items()
            for name, of_method in of_task.items()
            for number, outcome in enumerate(of_method)
        ]
        content = {**about, "rows": rows, "runs": runs}
        if json_path is not None:
            save_json(content, json_path)
        return content

    return publish


if __name__ == "__main__":
    process.entry("bench", main)
