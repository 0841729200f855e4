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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft import config, prompts
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.demo.recorded import QUESTIONS
from omnidraft.errors import ModelError, RequestError
from omnidraft.files import save_json
from omnidraft.hosts import process
from omnidraft.models.catalog import store
from omnidraft.prompts import Prompt
from pipelines.bench import page, summary
from pipelines.bench.runs import WARM_UP_TEXT, BenchRun, Failure, Outcome, attempt, rotated
from pipelines.lib import machine, vllm_methods
from pipelines.lib.choices import chosen, named_files
from pipelines.lib.vllm_methods import NAMES, PLAIN
from pipelines.lib.vllm_server import VllmServer, serve

Outcomes = dict[str, dict[str, dict[str, list[Outcome]]]]
"""Method -> task -> its outcomes and those of plain vLLM beside it, by method."""

_METHODS = "vllm,vllm-tli,vllm+omnidraft"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_NO_PROMPT_CACHE = "--no-enable-prefix-caching"
_WARM_UP_TOKENS = 64
"""Our proposer measures the cost of passes of each size before it decides; a server does that once."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which an answer differs from plain vLLM's."""

    task: str
    method: str
    prompt: int
    index: int
    """Index of the first token that differs."""
    plain_id: int
    other_id: int
    gap: float | None
    """Nats between the two tokens, by plain vLLM's log-probabilities from one pass over the text so far; None: one is
    not among the likeliest, as is usual under a schema, which they do not know. bfloat16 logits from 16 to 32 come in
    steps of 0.125."""

    def __str__(self) -> str:
        distance = "an unknown distance" if self.gap is None else f"{self.gap:.3f} nats"
        tokens = f"{self.plain_id} and {self.other_id}"
        return (
            f"{self.task} {self.prompt + 1}: {self.method} differs at token {self.index}, {tokens} are {distance} apart"
        )


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
    names = _names(methods)
    if not (venv / "bin" / "python").exists():
        raise RequestError(f"{venv} is no virtual environment with vLLM; --venv names another (docs/vllm.md)")
    settings = config.load(config_path, models={"target": target, "drafter": drafter})
    files = named_files(prompts_paths or [QUESTIONS])
    tasks = {task: prompts.read(path, num_prompts, split="test") for task, path in files.items()}
    arguments = ("--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "8", "--seed", "0", _NO_PROMPT_CACHE)
    about = {
        "machine": machine.describe(),
        "options": {
            "command": machine.command("pipelines.bench_vllm"),
            "fingerprint": f"vllm serve {shlex.join(arguments)}",
            "snapshot": snapshot,
            "temperature": 0.0,
            "max_new_tokens": max_new_tokens,
            "num_prompts": {task: len(rows) for task, rows in tasks.items()},
            "num_schemas": {task: sum(row.schema is not None for row in rows) for task, rows in tasks.items()},
            "num_speculative_tokens": num_tokens,
        },
        "settings": settings.model_dump(mode="json"),
    }
    outcomes: Outcomes = {name: {task: {} for task in tasks} for name in names[1:] or names}
    with tempfile.TemporaryDirectory(prefix="omnidraft-bench-vllm-") as folder:
        setup = VllmSetup(venv.resolve(), settings, snapshot, num_tokens, Path(folder), arguments)
        divergences: list[Divergence] = []
        for divergence in _measured(setup, tasks, max_new_tokens, outcomes):
            if divergence is not None:
                divergences.append(divergence)
            content = _report(about, outcomes) | {"partings": [asdict(each) for each in divergences]}
            if json_path is not None:
                save_json(content, json_path)
    page.show(_report(about, outcomes), markdown_path)
    for divergence in divergences:
        print(divergence)


def _names(methods: str) -> list[str]:
    names = chosen(methods, NAMES, "method")
    if PLAIN not in names:
        raise RequestError(f"--methods needs {PLAIN}: speed-ups are quoted against it")
    return [PLAIN, *(name for name in names if name != PLAIN)]


def _measured(
    setup: VllmSetup, tasks: Mapping[str, Sequence[Prompt]], max_new_tokens: int, outcomes: Outcomes
) -> Iterator[Divergence | None]:
    """Send every prompt to plain vLLM and to the row beside it; yield after each, with their divergence if any."""
    firsts = [rows[0] for rows in tasks.values()]
    with ExitStack() as whole:
        plain = _server(PLAIN, setup, whole)
        _warm_up(plain, firsts)
        for name in outcomes:
            with ExitStack() as stack:
                servers = {PLAIN: plain}
                if name != PLAIN:
                    servers[name] = _server(name, setup, stack)
                    _warm_up(servers[name], firsts)
                for task, rows in tasks.items():
                    turn = outcomes[name][task]
                    for number, prompt in enumerate(rows):
                        for each in rotated(list(servers), number):
                            turn.setdefault(each, []).append(_outcome(servers[each], prompt, max_new_tokens))
                        print(f"{task}: {number + 1} of {len(rows)} prompts, {', '.join(servers)}", file=sys.stderr)
                        yield _divergence(task, name, number, prompt.text, plain, turn)


def _warm_up(server: VllmServer | Failure, firsts: Sequence[Prompt]) -> None:
    """Answer a prompt like the first of each task, which may also start what keeps answers to a schema."""
    for prompt in firsts:
        _outcome(server, replace(prompt, text=WARM_UP_TEXT), _WARM_UP_TOKENS)


def _divergence(
    task: str, name: str, number: int, text: str, plain: VllmServer | Failure, turn: Mapping[str, Sequence[Outcome]]
) -> Divergence | None:
    """Return the divergence; None where the answers are the same, or one is missing."""
    ours, theirs = turn[name][number], turn[PLAIN][number]
    if isinstance(ours, Failure) or isinstance(theirs, Failure) or isinstance(plain, Failure):
        return None
    index = next((at for at, both in enumerate(zip(ours.ids, theirs.ids, strict=False)) if both[0] != both[1]), None)
    if index is None:
        return None
    log_probs = plain.log_probs_after(text, theirs.ids[:index])
    first, second = log_probs.get(theirs.ids[index]), log_probs.get(ours.ids[index])
    gap = None if first is None or second is None else abs(first - second)
    return Divergence(task, name, number, index, theirs.ids[index], ours.ids[index], gap)


def _outcome(server: VllmServer | Failure, prompt: Prompt, max_new_tokens: int) -> Outcome:
    return server if isinstance(server, Failure) else attempt(partial(_ask, server), prompt, max_new_tokens)


def _server(name: str, setup: VllmSetup, stack: ExitStack) -> VllmServer | Failure:
    """Start the server of a row; return it, or the reason of its failure."""
    target = store.resolve(setup.settings.models.target)
    speculation, environment = vllm_methods.speculation(
        name, setup.settings, setup.folder, num_tokens=setup.num_tokens, snapshot=setup.snapshot
    )
    log_path = setup.folder / f"{name}.log"
    print(f"{name}: starting, which takes a minute or two; its log is {log_path}", file=sys.stderr)
    try:
        server = stack.enter_context(
            serve(
                setup.venv,
                target,
                log_path,
                speculation=speculation,
                settings=environment,
                arguments=setup.arguments,
            )
        )
    except (ModelError, OSError) as exc:
        print(f"{name}: {exc}", file=sys.stderr)
        return Failure(str(exc).strip().splitlines()[-1][:300])
    print(f"{name}: serving", file=sys.stderr)
    return server


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


def _report(about: Mapping[str, Any], outcomes: Outcomes) -> dict[str, Any]:
    """Return the report; plain vLLM's row is of its first turn, each other row is compared with plain in its own."""
    rows: list[summary.Row] = []
    for task in next(iter(outcomes.values())):
        for turns in outcomes.values():
            turn_rows = summary.rows(task, turns[task], is_greedy=True, plain_name=PLAIN)
            rows += [
                row
                for row in turn_rows
                if row["method"] not in {each["method"] for each in rows if each["task"] == task}
            ]
    rows.sort(key=lambda row: NAMES.index(row["method"]))
    runs = [
        {"task": task, "method": name, "beside": beside, "prompt": number} | outcome.plain_data()
        for beside, turns in outcomes.items()
        for task, task_outcomes in turns.items()
        for name, done in task_outcomes.items()
        for number, outcome in enumerate(done)
    ]
    return {**about, "rows": rows, "runs": runs}


if __name__ == "__main__":
    process.entry("bench_vllm", main)
