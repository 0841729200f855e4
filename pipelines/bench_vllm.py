"""Decoding speed inside vLLM: its own plain decoding, its own drafting across vocabularies, and ours.

`python -m pipelines.bench_vllm --venv .venv-vllm --prompts FILE --json OUT`. Every row is a server of its own, asked
over HTTP as its users do. Plain vLLM runs all the time, the others one after the other beside it (7 GB each with the
reference pair), and each prompt is asked of both in turn: a speed-up is over plain decoding at the same time.

vllm              plain decoding
vllm-tli          vLLM's draft model with use_heterogeneous_vocab
vllm+omnidraft    our proposer
vllm+omnidraft+traces    ... that also records traces into a SQLite log
"""

import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from omnidraft import config, prompts
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import ModelError, RequestError
from omnidraft.hosts import process
from omnidraft.models.catalog import store
from pipelines.bench import page, summary
from pipelines.bench.runs import BenchRun, Failure, Outcome, attempt, rotated
from pipelines.lib import machine, report
from pipelines.lib.vllm_server import VllmServer, custom_class, serve

PLAIN = "vllm"
NAMES = (PLAIN, "vllm-tli", "vllm+omnidraft", "vllm+omnidraft+traces")
Outcomes = dict[str, dict[str, dict[str, list[Outcome]]]]
"""Method -> task -> its outcomes and those of plain vLLM beside it, by method."""

_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_WARM_UP_TOKENS = 64
"""Our proposer tries out what passes of each size cost before it decides; a server does that once in its life."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer is no longer plain vLLM's."""

    task: str
    method: str
    prompt: int
    index: int
    """Of the first token that differs."""
    plain_id: int
    other_id: int
    gap: float | None
    """Nats from one to the other, by plain vLLM's log-probabilities from one pass over the text so far; None: one is
    not among the likeliest. bfloat16 logits from 16 to 32 come in steps of 0.125."""

    def __str__(self) -> str:
        apart = "more than can be told" if self.gap is None else f"{self.gap:.3f} nats"
        tokens = f"{self.plain_id} and {self.other_id}"
        return f"{self.task} {self.prompt + 1}: {self.method} parts at token {self.index}, {tokens} are {apart} apart"


@dataclass(frozen=True, slots=True)
class VllmSetup:
    """What all rows share."""

    venv: Path
    settings: config.Settings
    snapshot: str | None
    num_tokens: int
    folder: Path
    arguments: tuple[str, ...]


def main(
    prompts_paths: Annotated[list[Path], typer.Option("--prompts", help="JSON lines with prompt or question.")],
    venv: Annotated[Path, typer.Option(help="Where vLLM and omnidraft are installed.")] = Path(".venv-vllm"),
    num_prompts: Annotated[int, typer.Option(min=1, help="Of each file, test split first.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    methods: Annotated[str, typer.Option(help=f"Of {', '.join(NAMES)}, with commas.")] = ",".join(NAMES[:3]),
    num_tokens: Annotated[int, typer.Option(min=1, help="num_speculative_tokens of our rows.")] = 7,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    snapshot: Annotated[str | None, typer.Option(help="Folder, version or alias; the base drafter without it.")] = None,
    dtype: Annotated[str, typer.Option(help="vLLM's --dtype.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json", help="Where rows and runs go.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="A page, and a picture beside it.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Compare decoding inside vLLM."""
    names = _names(methods)
    settings = config.load(config_path, models={"target": target, "drafter": drafter})
    tasks = {path.stem: [each.text for each in prompts.read(path, num_prompts, split="test")] for path in prompts_paths}
    arguments = ("--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "8", "--seed", "0")
    about = {
        "machine": machine.describe(),
        "options": {
            "command": shlex.join(["python", "-m", "pipelines.bench_vllm", *sys.argv[1:]]),
            "fingerprint": f"vllm serve {shlex.join(arguments)}",
            "snapshot": snapshot,
            "temperature": 0.0,
            "max_new_tokens": max_new_tokens,
            "num_prompts": {task: len(texts) for task, texts in tasks.items()},
            "num_speculative_tokens": num_tokens,
        },
        "settings": settings.model_dump(mode="json"),
    }
    outcomes: Outcomes = {name: {task: {} for task in tasks} for name in names[1:] or names}
    with tempfile.TemporaryDirectory(prefix="omnidraft-bench-vllm-") as folder:
        setup = VllmSetup(venv.resolve(), settings, snapshot, num_tokens, Path(folder), arguments)
        partings: list[Divergence] = []
        for parting in _measured(setup, tasks, max_new_tokens, outcomes):
            if parting is not None:
                partings.append(parting)
            made = _report(about, outcomes) | {"partings": [asdict(each) for each in partings]}
            if json_path is not None:
                report.save(made, json_path)
    page.show(_report(about, outcomes), markdown_path)
    for parting in partings:
        print(parting)


def _names(methods: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in methods.split(",")))
    if unknown := sorted(set(names) - set(NAMES)):
        raise RequestError(f"no method {unknown[0]!r}; there are {', '.join(NAMES)}")
    if PLAIN not in names:
        raise RequestError(f"--methods needs {PLAIN}: speed-ups are quoted against it")
    return [PLAIN, *(name for name in names if name != PLAIN)]


def _measured(
    setup: VllmSetup, tasks: Mapping[str, Sequence[str]], max_new_tokens: int, outcomes: Outcomes
) -> Iterator[Divergence | None]:
    """Ask every prompt of plain vLLM and of the row beside it; yields after each prompt, with where the two part."""
    first = next(iter(tasks.values()))[0]
    with ExitStack() as whole:
        plain = _server(PLAIN, setup, whole)
        _outcome(plain, first, _WARM_UP_TOKENS)
        for name in outcomes:
            with ExitStack() as stack:
                servers = {PLAIN: plain}
                if name != PLAIN:
                    servers[name] = _server(name, setup, stack)
                    _outcome(servers[name], first, _WARM_UP_TOKENS)
                for task, texts in tasks.items():
                    its = outcomes[name][task]
                    for number, text in enumerate(texts):
                        for each in rotated(list(servers), number):
                            its.setdefault(each, []).append(_outcome(servers[each], text, max_new_tokens))
                        print(f"{task}: {number + 1} of {len(texts)} prompts, {', '.join(servers)}", file=sys.stderr)
                        yield _parting(task, name, number, text, plain, its)


def _parting(
    task: str, name: str, number: int, text: str, plain: VllmServer | Failure, its: Mapping[str, Sequence[Outcome]]
) -> Divergence | None:
    """None where the answers are the same, or there are none to compare."""
    ours, theirs = its[name][number], its[PLAIN][number]
    if isinstance(ours, Failure) or isinstance(theirs, Failure) or isinstance(plain, Failure):
        return None
    index = next((at for at, both in enumerate(zip(ours.ids, theirs.ids, strict=False)) if both[0] != both[1]), None)
    if index is None:
        return None
    log_probs = plain.log_probs_after(text, theirs.ids[:index])
    first, second = log_probs.get(theirs.ids[index]), log_probs.get(ours.ids[index])
    gap = None if first is None or second is None else abs(first - second)
    return Divergence(task, name, number, index, theirs.ids[index], ours.ids[index], gap)


def _outcome(server: VllmServer | Failure, text: str, max_new_tokens: int) -> Outcome:
    return server if isinstance(server, Failure) else attempt(partial(_ask, server), text, max_new_tokens)


def _server(name: str, setup: VllmSetup, stack: ExitStack) -> VllmServer | Failure:
    """Starts the server of a row; why there is none."""
    target = store.resolve(setup.settings.models.target)
    speculation, environment = _speculation(name, setup)
    log_path = setup.folder / f"{name}.log"
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


def _speculation(name: str, setup: VllmSetup) -> tuple[dict[str, Any] | None, dict[str, str]]:
    models = setup.settings.models
    if name == PLAIN:
        return None, {}
    if name == "vllm-tli":
        drafter = str(store.resolve(models.drafter))
        options = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 5}
        return options | {"use_heterogeneous_vocab": True}, {}
    environment = {
        "OMNIDRAFT_MODELS__TARGET": models.target,
        "OMNIDRAFT_MODELS__DRAFTER": models.drafter,
        "OMNIDRAFT_RECORDER__ENABLED": str(name.endswith("+traces")).lower(),
        "OMNIDRAFT_LOG": f"sqlite:///{setup.folder / 'log.db'}",
        "MLFLOW_TRACKING_URI": f"directory://{setup.folder / 'registry'}",
    }
    if setup.snapshot is not None:
        environment["OMNIDRAFT_WORKER__SNAPSHOT"] = setup.snapshot
        environment["MLFLOW_TRACKING_URI"] = setup.settings.registry.url
    return custom_class(setup.num_tokens), environment


def _ask(server: VllmServer, text: str, max_new_tokens: int) -> BenchRun:
    """An answer; passes are tokens less those that vLLM says were accepted drafts."""
    before = server.counters().get(_ACCEPTED, 0.0)
    heard = server.ask(text, max_new_tokens)
    accepted = server.counters().get(_ACCEPTED, 0.0) - before
    figures = DecodeStats(
        num_tokens=len(heard.ids),
        num_passes=max(len(heard.ids) - int(accepted), 1),
        num_later_tokens=len(heard.ids) - heard.num_first,
        first_token_s=heard.first_token_s,
        decode_s=heard.decode_s,
    )
    return BenchRun(heard.ids, figures)


def _report(about: Mapping[str, Any], outcomes: Outcomes) -> dict[str, Any]:
    """A row for each method; plain vLLM's is of its first turn, each other's beside the turn that it had itself."""
    rows: list[summary.Row] = []
    for task in next(iter(outcomes.values())):
        for of_method in outcomes.values():
            its = summary.rows(task, of_method[task], is_greedy=True, plain_name=PLAIN)
            rows += [
                row for row in its if row["method"] not in {each["method"] for each in rows if each["task"] == task}
            ]
    rows.sort(key=lambda row: NAMES.index(row["method"]))
    runs = [
        {"task": task, "method": name, "beside": beside, "prompt": number} | outcome.plain_data()
        for beside, of_method in outcomes.items()
        for task, of_task in of_method.items()
        for name, done in of_task.items()
        for number, outcome in enumerate(done)
    ]
    return {**about, "rows": rows, "runs": runs}


if __name__ == "__main__":
    process.entry("bench_vllm", main)
