"""The tables of the OmniDraft paper (arXiv 2507.02659) for one's own targets: acceptance and speed-up per target, task
and method, with standard errors; LoRA ranks, losses, n-gram caches, adaptive drafting, temperatures.

`python -m pipelines.paper_table --targets qwen2.5-coder-0.5b --tasks gsm8k,code --json OUT`. Cells are computed once,
each decoded prompt is one: an interrupted run goes on. Tables and plots go into `--out`.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from omnidraft.distill.training.losses import parse
from omnidraft.errors import RequestError
from omnidraft.hosts import process
from pipelines.bench.methods import HUGGINGFACE
from pipelines.lib.choices import chosen
from pipelines.paper_table import report
from pipelines.paper_table.agreement import agreement
from pipelines.paper_table.decoding import PLAIN, Way, decode_all, huggingface_ways
from pipelines.paper_table.methods import METHODS
from pipelines.paper_table.parts import DEPENDS_ON, TablePlan, fingerprint, prompts_of, settings_for
from pipelines.paper_table.result_cache import ResultCache
from pipelines.paper_table.sweeps import DISTILLED, SWEEPS, Sweep, ways_of

RESULTS = Path("runs/paper_table.json")
NAMES = (PLAIN, *METHODS, *HUGGINGFACE)
DEFAULT = [name for name in NAMES if name != "alm"]


def main(
    targets: Annotated[str, typer.Option(help="With commas.")] = "qwen2.5-coder-0.5b",
    tasks: Annotated[str, typer.Option(help="Names of prompt files in --data, with commas.")] = "gsm8k,code",
    methods: Annotated[
        str, typer.Option(help=f"Some of {', '.join(NAMES)}; with commas. {PLAIN} is always measured.")
    ] = ",".join(DEFAULT),
    sweeps: Annotated[
        str, typer.Option(help=f"Some of {', '.join(SWEEPS)}, for the first target and task; '' for none.")
    ] = ",".join(SWEEPS),
    data: Annotated[Path, typer.Option(help="Folder of JSON lines with prompt and split.")] = Path("../shared/data"),
    drafter: Annotated[str | None, typer.Option()] = None,
    num_train: Annotated[int, typer.Option(min=2, help="Answers of each task to learn from.")] = 24,
    num_test: Annotated[int, typer.Option(min=1, help="Answers of each task to judge by.")] = 24,
    num_decoded: Annotated[int, typer.Option(min=1, help="Test prompts that are decoded, timed.")] = 6,
    num_slow: Annotated[int, typer.Option(min=1, help="Prompts that transformers decodes, of those.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 128,
    num_chain_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the paper's chains.")] = 4,
    dm: Annotated[
        str, typer.Option(help=f"L_DM in the paper's rows: {', '.join(DISTILLED)}, or any loss.")
    ] = "dm_paper",
    work: Annotated[Path, typer.Option(help="Records and snapshots; may be removed afterwards.")] = Path(
        "runs/paper_table"
    ),
    out: Annotated[Path, typer.Option(help="Folder of tables and plots.")] = Path("runs/paper_table"),
    json_path: Annotated[Path, typer.Option("--json", help="Figures; an interrupted run goes on from them.")] = RESULTS,
) -> None:
    """Reproduce the paper's tables in shape."""
    names = [name for name in chosen(methods, NAMES, "method") if name != PLAIN]
    sweep_names = chosen(sweeps, SWEEPS, "sweep")
    parse(dm)  # fails before hours of work, not after
    if num_decoded > num_test:
        raise RequestError(f"--num-decoded {num_decoded} is more than --num-test {num_test}")
    plan = TablePlan(data, work, num_train, num_test, max_new_tokens, drafter, num_chain_tokens, dm)
    pairs = [(target, task) for target in chosen(targets) for task in chosen(tasks)]
    for _, task in pairs:
        for split in ("train", "test"):
            prompts_of(task, split, plan)  # so does this
    sizes = {"num_decoded": num_decoded, "num_slow": num_slow}
    cells = ResultCache(json_path, {"plan": str(plan), "methods": [PLAIN, *names], **sizes})
    for target, task in pairs:
        cells.require(f"rows of {task}", fingerprint(task, plan))
        cells.require(f"settings of {target}", settings_for(target, plan).model_dump(mode="json", include=DEPENDS_ON))
    for target, task in pairs:
        texts = prompts_of(task, "test", plan)[:num_decoded]
        decode_all(cells, f"table/{target}/{task}", texts, partial(_ways, target, task, names, plan), num_slow=num_slow)
        cells.get(f"offline/{target}/{task}", partial(agreement, target, task, names, plan))
        report.write(cells.content, out)
    for name in sweep_names:
        SWEEPS[name](Sweep(*pairs[0], plan, num_decoded, cells))
        report.write(cells.content, out)
    Console().print((out / report.PAGE).read_text())


def _ways(target: str, task: str, names: list[str], plan: TablePlan) -> dict[str, Way]:
    ours = tuple(name for name in names if name in METHODS)
    theirs = [name for name in names if name in HUGGINGFACE]
    return ways_of(target, task, ours, plan) | huggingface_ways(settings_for(target, plan), theirs, plan.max_new_tokens)


if __name__ == "__main__":
    process.entry("paper_table", main)
