"""Structured output by a drafter that is aware of its constraints, beside the same drafter unaware of them.

`python -m pipelines.constrained --prompts FILE --json OUT`; each row of FILE has a `schema`, which is the grammar of
all three methods:

plain      nothing is drafted
unaware    the drafter proposes as if the text were free, and the target draws under the grammar
aware      the drafter's candidates pass the grammar before they are ranked, and forced tokens are drafted

None of them has a memory, of this request's prompt or of earlier answers, unless `--lookup` gives it to both drafters.
They take turns, in another order for each prompt, so that a machine that gets slower is slower for all. They are timed
in fast mode: in reproducible mode some targets compute more rows, which plain decoding would pay for, too. Then all
three answer again in reproducible mode, with the same text of each prompt, or the run fails. The n-gram cache of each
drafter learns from its own texts only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config, prompts, wiring
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.errors import ContractError, RequestError
from omnidraft.hosts import process
from omnidraft.ports import (
    NO_OTHERS,
    DraftRequest,
    DraftTree,
    Grammar,
    Mode,
    OtherTexts,
    Proposer,
    ProposerSession,
    Request,
    Sampling,
    Source,
)
from omnidraft.progress import bar
from omnidraft.prompts import Prompt
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines.bench.runs import rotated
from pipelines.lib import machine, report
from pipelines.lib.own_snapshot import own_snapshot

METHODS = {
    "plain": "the target alone",
    "unaware": "the drafter, which drafts as if the text were free",
    "aware": "the same drafter, whose candidates pass the grammar, and forced tokens",
}


class UnawareProposer(Proposer):
    """A proposer that is told the temperature of a request and none of its other settings."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def open(self, request: Request) -> ProposerSession:
        """See ports.Proposer."""
        return self._proposer.open(replace(request, sampling=Sampling(request.sampling.temperature)))

    def propose_all(self, requests: Sequence[DraftRequest], others: OtherTexts = NO_OTHERS) -> list[DraftTree]:
        """See ports.Proposer."""
        return self._proposer.propose_all(requests, others)


def main(
    prompts_path: Annotated[Path, typer.Option("--prompts", help="JSON lines with prompt and schema.")],
    num_prompts: Annotated[int, typer.Option(min=1)] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    has_lookup: Annotated[bool, typer.Option("--lookup/--no-lookup", help="Also copy from the prompt.")] = False,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    quantize: Annotated[str | None, typer.Option(help="int4 or int8.")] = None,
    snapshot: Annotated[str | None, typer.Option(help="Folder, version or alias; the base drafter without it.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
    config_path: Annotated[Path | None, typer.Option("--config")] = None,
) -> None:
    """Measure drafting under JSON schemas."""
    models = {"target": target, "drafter": drafter, "precision": quantize}
    decode = {"mode": "fast", "suffix_memory": has_lookup, "lookup": has_lookup}
    settings = config.load(config_path, models=models, decode=decode)
    requests = [_request(prompt, max_new_tokens, temperature) for prompt in prompts.read(prompts_path, num_prompts)]
    worker = wiring.engine(settings, CountingMetrics(), snapshot=snapshot)
    unaware, aware = (own_snapshot(settings, worker, snapshot) for _ in range(2))
    snapshots = {"unaware": replace(unaware, proposer=UnawareProposer(unaware.proposer)), "aware": aware}
    totals = {method: DecodeStats() for method in METHODS}
    about = machine.made_by("pipelines.constrained") | {
        "settings": settings.model_dump(mode="json", include={"models", "decode", "cache"}),
        "fingerprint": worker.target.fingerprint,
        "snapshot": snapshot,
        "mode": settings.decode.mode,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "has_memory": has_lookup,
    }
    with bar("decoding", len(requests)) as advance:
        for number, request in enumerate(requests):
            for method, stats in measure(worker.engine, snapshots, worker.engine.prepare(request), number).items():
                totals[method] += stats
            if json_path is not None:
                methods = {method: {"about": METHODS[method]} | stats.summary() for method, stats in totals.items()}
                report.save({"prompts": number + 1} | about | {"methods": methods}, json_path)
            advance()
    Console().print(_table(totals))


def _request(prompt: Prompt, max_new_tokens: int, temperature: float) -> GenerationRequest:
    """Return the request for an answer under the prompt's schema. Raises RequestError where it has none."""
    if prompt.schema is None:
        raise RequestError(f"no schema to answer under: {prompt.text[:60]!r}")
    return GenerationRequest(
        messages=[{"role": "user", "content": prompt.text}],
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, grammar=Grammar("json_schema", prompt.schema)),
        seed=0,
        is_stored=False,
    )


def measure(
    engine: Engine, snapshots: Mapping[str, LoadedSnapshot], request: GenerationRequest, number: int
) -> dict[str, DecodeStats]:
    """Decode one request by every method; return the statistics of fast mode. Raises ContractError when the texts of
    reproducible mode differ.

    Args:
        snapshots: what each method that drafts drafts with.
        number: which method is the first.
    """
    timed = _answers(engine, snapshots, request, number, "fast")
    texts = {name: ids for name, (ids, _) in _answers(engine, snapshots, request, number, "reproducible").items()}
    if any(ids != texts["plain"] for ids in texts.values()):
        raise ContractError(f"the texts differ: {texts}")
    return {method: stats for method, (_, stats) in timed.items()}


def _answers(
    engine: Engine, snapshots: Mapping[str, LoadedSnapshot], request: GenerationRequest, number: int, mode: Mode
) -> dict[str, tuple[list[int], DecodeStats]]:
    answers = {}
    for method in rotated(list(METHODS), number):
        num_draft_tokens = None if method in snapshots else 0
        asked = replace(request, mode=mode, num_draft_tokens=num_draft_tokens)
        answers[method] = _decoded(engine, asked, snapshots.get(method))
    return answers


def _decoded(
    engine: Engine, request: GenerationRequest, snapshot: LoadedSnapshot | None
) -> tuple[list[int], DecodeStats]:
    ids, stats = list[int](), DecodeStats()
    for step in engine.stream(request, snapshot).steps:
        stats.take(step)
        ids += step.emitted
    return ids, stats


def _table(totals: Mapping[str, DecodeStats]) -> Table:
    speed = totals["plain"].tokens_per_s
    table = Table("method", "tokens/pass", "tokens/s", "speed-up", "ms/pass outside models", "forced accepted")
    for method, stats in totals.items():
        table.add_row(
            method,
            f"{stats.tokens_per_pass:.2f}",
            f"{stats.tokens_per_s:.1f}",
            f"{stats.tokens_per_s / speed:.2f}x" if speed else "",
            f"{1000 * stats.other_s / stats.num_passes:.2f}",
            str(stats.accepted_by_source[str(Source.FORCED)]),
        )
    table.caption = "\n".join(f"{method}: {about}" for method, about in METHODS.items())
    return table


if __name__ == "__main__":
    process.entry("constrained", main)
