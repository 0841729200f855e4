"""The tables of the OmniDraft paper (arXiv 2507.02659) for one's own targets: acceptance and speed-up per target, task
and method; LoRA ranks; the n-gram cache bounded; adaptive drafting.

`python -m pipelines.paper_table --targets qwen2.5-coder-0.5b --tasks gsm8k,code --json OUT`. Cells are computed once:
an interrupted run goes on. Tables and plots go into `--out`.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from omnidraft.hosts import process
from omnidraft.snapshots import bundle
from pipelines.lib.choices import chosen
from pipelines.paper_table import report
from pipelines.paper_table.cache_comparison import compare_caches
from pipelines.paper_table.decoding import PLAIN, Decoding
from pipelines.paper_table.parts import (
    METHODS,
    UNTRAINED,
    TablePlan,
    learn_and_measure,
    prompts_of,
    records,
    settings_for,
    snapshot,
)
from pipelines.paper_table.result_cache import ResultCache

RESULTS = Path("runs/paper_table.json")
SWEEPS = ("lora", "cache", "adaptive")
LORA_RANKS = (8, 16, 32, 64, 128)
POLICIES: dict[str, dict[str, Any]] = {
    "fixed, 4 tokens": {"policy": "fixed", "num_draft_tokens": 4},
    "threshold": {"policy": "threshold"},
    "acceptance head": {"policy": "acceptance"},
    "cost": {"policy": "cost"},
}


def main(
    targets: Annotated[str, typer.Option(help="With commas.")] = "qwen2.5-coder-0.5b",
    tasks: Annotated[str, typer.Option(help="Names of prompt files in --data, with commas.")] = "gsm8k,code",
    methods: Annotated[str, typer.Option(help=f"Some of plain, {', '.join(METHODS)}; with commas.")] = ",".join(
        (PLAIN, *METHODS)
    ),
    sweeps: Annotated[
        str, typer.Option(help=f"Some of {', '.join(SWEEPS)}, for the first target and task; '' for none.")
    ] = ",".join(SWEEPS),
    data: Annotated[Path, typer.Option(help="Folder of JSON lines with prompt and split.")] = Path("../shared/data"),
    drafter: Annotated[str | None, typer.Option()] = None,
    num_train: Annotated[int, typer.Option(min=2, help="Answers of each task to learn from.")] = 24,
    num_test: Annotated[int, typer.Option(min=1, help="Answers of each task to judge by.")] = 24,
    num_decoded: Annotated[int, typer.Option(min=1, help="Test prompts that are decoded, timed.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 128,
    work: Annotated[Path, typer.Option(help="Records and snapshots; may be removed afterwards.")] = Path(
        "runs/paper_table"
    ),
    out: Annotated[Path, typer.Option(help="Folder of tables and plots.")] = Path("docs/results"),
    json_path: Annotated[Path, typer.Option("--json", help="Figures; an interrupted run goes on from them.")] = RESULTS,
) -> None:
    """Reproduce the paper's tables in shape."""
    method_names = chosen(methods, (PLAIN, *METHODS), "method")
    sweep_names = chosen(sweeps, SWEEPS, "sweep")
    plan = TablePlan(data, work, num_train, num_test, max_new_tokens, drafter)
    pairs = [(target, task) for target in chosen(targets) for task in chosen(tasks)]
    for _, task in pairs:
        for split in ("train", "test"):
            prompts_of(task, split, plan)  # fails before hours of work, not after
    cells = ResultCache(json_path, {"plan": str(plan), "methods": method_names, "num_decoded": num_decoded})
    for target, task in pairs:
        cells.get(f"table/{target}/{task}", partial(_cell, target, task, method_names, plan, num_decoded))
        cells.get(f"offline/{target}/{task}", partial(_offline, target, task, method_names, plan))
        report.write(cells.content, out)
    for sweep in sweep_names:
        _sweep(sweep, *pairs[0], plan, cells)
        report.write(cells.content, out)
    Console().print((out / report.PAGE).read_text())


def _cell(target: str, task: str, methods: list[str], plan: TablePlan, num_decoded: int) -> dict[str, Any]:
    settings = settings_for(target, plan)
    folders = {name: snapshot(settings, task, name, plan) for name in methods if name != PLAIN}
    decoding = Decoding(settings)
    drafts = {name: decoding.drafting(folder) for name, folder in folders.items()}
    return decoding.compare(prompts_of(task, "test", plan)[:num_decoded], drafts, plan.max_new_tokens)


def _offline(target: str, task: str, methods: list[str], plan: TablePlan) -> dict[str, float | None]:
    """Return agreement on the test answers, of each method's snapshot and of the untrained drafter."""
    settings, agreement = settings_for(target, plan), dict[str, float | None]()
    for name in methods:
        folder = None if name == PLAIN else snapshot(settings, task, name, plan)
        if folder is not None:
            manifest = bundle.read_manifest(folder)
            agreement |= {UNTRAINED: manifest.agreement_before, name: manifest.agreement_after}
    return agreement


def _sweep(sweep: str, target: str, task: str, plan: TablePlan, cells: ResultCache) -> None:
    match sweep:
        case "lora":
            cells.get("lora/full", lambda: learn_and_measure(settings_for(target, plan), task, plan))
            for rank in LORA_RANKS:
                learner = {"train": "lora", "lora_rank": rank}
                settings = settings_for(target, plan, learner=learner)
                cells.get(f"lora/{rank}", partial(learn_and_measure, settings, task, plan))
        case "cache":
            cells.get("cache", lambda: _caches(target, task, plan))
        case "adaptive":
            cells.get("adaptive", lambda: _adaptive(target, task, plan, cells.content["options"]["num_decoded"]))


def _caches(target: str, task: str, plan: TablePlan) -> dict[str, Any]:
    settings = settings_for(target, plan)
    return compare_caches(settings, records(settings, task, "train", plan), records(settings, task, "test", plan))


def _adaptive(target: str, task: str, plan: TablePlan, num_decoded: int) -> dict[str, Any]:
    """Decode with the same snapshot under every policy."""
    settings = settings_for(target, plan, learner={"head": "joint"})
    folder = snapshot(settings, task, "dm+ngram", plan)
    decoding = Decoding(settings)
    drafts = {name: decoding.drafting(folder, **section) for name, section in POLICIES.items()}
    return decoding.compare(prompts_of(task, "test", plan)[:num_decoded], drafts, plan.max_new_tokens)


if __name__ == "__main__":
    process.entry("paper_table", main)
