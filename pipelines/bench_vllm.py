"""Decoding speed inside vLLM: its own plain decoding, its own drafting across vocabularies, and ours.

`python -m pipelines.bench_vllm --venv .venv-vllm --prompts FILE --json OUT`. Every row is a server of its own, used
over HTTP as by its clients. Plain vLLM runs all the time, the others one after the other beside it (7 GB each with the
reference pair), and each prompt goes to both in turn: a speed-up is over plain decoding at the same time. Prompts are
cached by neither, since plain vLLM reads each of them beside every row. A row with a `schema` is answered under it.

The methods are those of pipelines/lib/vllm_methods.py.
"""

import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft import config
from omnidraft.cli.choices import chosen
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import ModelError, RequestError
from omnidraft.files import save_json
from omnidraft.hosts import process
from omnidraft.models.catalog import store
from omnidraft.prompts import Prompt
from pipelines.bench import page, summary
from pipelines.bench.runs import BenchRun, Failure, Method, Outcomes, about, measure, plain_rows, tasks_of
from pipelines.lib import vllm_methods
from pipelines.lib.vllm_methods import NAMES, PLAIN
from pipelines.lib.vllm_server import VllmServer, serve

_METHODS = "vllm,vllm-tli,vllm+omnidraft"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_NO_PROMPT_CACHE = "--no-enable-prefix-caching"
_WARM_UP_TOKENS = 64
"""Our proposer measures the cost of passes of each size before it decides; a server does that once."""


@dataclass(frozen=True, slots=True)
class VllmSetup:
    """Options of all rows."""

    venv: Path
    settings: config.Settings
    snapshot: str | None
    num_tokens: int
    folder: Path
    arguments: tuple[str, ...]


def main(
    prompts_paths: Annotated[
        list[Path] | None,
        typer.Option("--prompts", help="JSON lines with prompt or question; without it those of the demo."),
    ] = None,
    venv: Annotated[Path, typer.Option(help="The virtual environment of vLLM and omnidraft.")] = Path(".venv-vllm"),
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts of each file, of split test where it names splits.")
    ] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}, with commas.")] = _METHODS,
    num_tokens: Annotated[int, typer.Option(min=1, help="num_speculative_tokens of our rows.")] = 7,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    snapshot: Annotated[str | None, typer.Option(help="Folder, version or alias; the base drafter without it.")] = None,
    dtype: Annotated[str, typer.Option(help="vLLM's --dtype.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for rows and runs.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="A page, and a picture beside it.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Compare decoding inside vLLM."""
    names = chosen(methods, NAMES, "method", baseline=PLAIN)
    if not (venv / "bin" / "python").exists():
        raise RequestError(f"{venv} is no virtual environment with vLLM; --venv names another (docs/vllm.md)")
    settings = config.load(config_path, models={"target": target, "drafter": drafter})
    tasks = tasks_of(prompts_paths, num_prompts)
    arguments = ("--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "8", "--seed", "0", _NO_PROMPT_CACHE)
    described = about(
        "pipelines.bench_vllm",
        settings,
        tasks,
        fingerprint=f"vllm serve {shlex.join(arguments)}",
        snapshot=snapshot,
        temperature=0.0,
        max_new_tokens=max_new_tokens,
        num_schemas={task: sum(row.schema is not None for row in rows) for task, rows in tasks.items()},
        num_speculative_tokens=num_tokens,
    )
    outcomes: dict[str, Outcomes] = {name: {} for name in names[1:] or names}

    def publish() -> dict[str, Any]:
        """Return the report so far, and save it."""
        content = described | _report(tasks, outcomes)
        if json_path is not None:
            save_json(content, json_path)
        return content

    with tempfile.TemporaryDirectory(prefix="omnidraft-bench-vllm-") as folder, ExitStack() as whole:
        setup = VllmSetup(venv.resolve(), settings, snapshot, num_tokens, Path(folder), arguments)
        plain = _method(PLAIN, setup, whole)
        for name in outcomes:
            with ExitStack() as stack:
                asked = {PLAIN: plain} | ({} if name == PLAIN else {name: _method(name, setup, stack)})
                measure(tasks, asked, max_new_tokens, outcomes[name], publish, warm_up_tokens=_WARM_UP_TOKENS)
    page.show(publish(), markdown_path)


def _method(name: str, setup: VllmSetup, stack: ExitStack) -> Method | Failure:
    """Start the server of a row; return how it is asked, or the reason of its failure."""
    target = store.resolve(setup.settings.models.target)
    speculation, environment = vllm_methods.speculation(
        name, setup.settings, setup.folder, num_tokens=setup.num_tokens, snapshot=setup.snapshot
    )
    log_path = setup.folder / f"{name}.log"
    print(f"{name}: starting, which takes a minute or two; its log is {log_path}", file=sys.stderr)
    try:
        options = {"speculation": speculation, "settings": environment, "arguments": setup.arguments}
        server = stack.enter_context(serve(setup.venv, target, log_path, **options))  # type: ignore[arg-type]
    except (ModelError, OSError) as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return Failure(str(exc).strip().splitlines()[-1][:300])
    print(f"{name}: serving", file=sys.stderr)
    return partial(_ask, server)


def _ask(server: VllmServer, prompt: Prompt, max_new_tokens: int) -> BenchRun:
    """Send one prompt; its passes are its tokens less the drafts that vLLM counts as accepted."""
    before = server.counters().get(_ACCEPTED, 0.0)
    answer = server.ask(prompt.text, max_new_tokens, schema=prompt.schema)
    accepted = server.counters().get(_ACCEPTED, 0.0) - before
    stats = DecodeStats(
        num_tokens=len(answer.ids),
        num_passes=max(len(answer.ids) - int(accepted), 1),
        num_later_tokens=len(answer.ids) - answer.num_first,
        first_token_s=answer.first_token_s,
        decode_s=answer.decode_s,
    )
    return BenchRun(answer.ids, stats)


def _report(tasks: Iterable[str], outcomes: Mapping[str, Outcomes]) -> dict[str, Any]:
    """Return rows and runs so far; plain vLLM's row is of its first turn, each other row is compared with plain in its
    own."""
    rows: list[summary.Row] = []
    for task in tasks:
        known: set[str] = set()
        for turns in outcomes.values():
            turn_rows = summary.rows(task, turns.get(task, {}), is_greedy=True, plain_name=PLAIN)
            rows += [row for row in turn_rows if row["method"] not in known]
            known |= {row["method"] for row in turn_rows}
    rows.sort(key=lambda row: NAMES.index(row["method"]))
    return {"rows": rows, "runs": [run for name, turns in outcomes.items() for run in plain_rows(turns, beside=name)]}


if __name__ == "__main__":
    process.entry("bench_vllm", main)
