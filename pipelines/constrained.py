"""Structured output with a drafter that knows its schema, beside the same drafter that does not, and plain decoding.

`python -m pipelines.constrained --prompts FILE --json OUT`; each row of FILE has a `schema`. All three say the same
text of each prompt, or the run fails. They take turns, so that a machine that gets slower is slower for all.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omnidraft import config, prompts, wiring
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.snapshot.slot import LoadedSnapshot
from omnidraft.errors import ContractError, RequestError
from omnidraft.hosts import process
from omnidraft.ports import DraftRequest, DraftTree, Grammar, Proposer, ProposerSession, Request, Sampling, Source
from omnidraft.progress import bar
from omnidraft.telemetry.metrics import CountingMetrics
from pipelines.lib import report

METHODS = ("plain", "blind", "constrained")


class BlindProposer(Proposer):
    """A proposer that is told the temperature of a request and none of its other settings."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def open(self, request: Request) -> ProposerSession:
        """See ports.Proposer."""
        return self._proposer.open(replace(request, sampling=Sampling(request.sampling.temperature)))

    def propose_all(self, requests: Sequence[DraftRequest], num_other_rows: int = 0) -> list[DraftTree]:
        """See ports.Proposer."""
        return self._proposer.propose_all(requests, num_other_rows)


@dataclass(slots=True)
class Totals:
    """Sums over all prompts of one method."""

    num_tokens: int = 0
    num_passes: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    other_s: float = 0.0
    num_forced: int = 0
    """Forced tokens that were drafted."""
    num_forced_accepted: int = 0

    def row(self) -> dict[str, float]:
        """Return the sums, and what follows from them."""
        seconds = self.draft_s + self.target_s + self.other_s
        ratios = {"tokens_per_pass": self.num_tokens / self.num_passes, "tokens_per_s": self.num_tokens / seconds}
        return asdict(self) | ratios | {"other_share": self.other_s / seconds}


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
    settings = config.load(config_path, models=models, decode={"suffix_memory": has_lookup, "lookup": has_lookup})
    rows = list(zip(prompts.read(prompts_path, num_prompts), _schemas(prompts_path, num_prompts), strict=True))
    engine = wiring.engine(settings, CountingMetrics(), snapshot=snapshot).engine
    totals = {method: Totals() for method in METHODS}
    with bar("decoding", len(rows)) as advance:
        for prompt, schema in rows:
            sampling = Sampling(temperature, grammar=Grammar("json_schema", schema))
            messages = [{"role": "user", "content": prompt.text}]
            request = GenerationRequest(
                messages=messages, max_new_tokens=max_new_tokens, sampling=sampling, seed=0, is_stored=False
            )
            measure(engine, engine.prepare(request), totals)
            advance()
    figures = {method: each.row() for method, each in totals.items()}
    if json_path is not None:
        report.save({"prompts": len(rows), "temperature": temperature, "methods": figures}, json_path)
    Console().print(_table(figures))


def measure(engine: Engine, request: GenerationRequest, totals: Mapping[str, Totals]) -> None:
    """Decode one request by every method. Raises ContractError when the texts differ."""
    aware = engine.slot.snapshot_for(request.request_id)
    texts = {
        "plain": _decoded(engine, replace(request, num_draft_tokens=0), aware, totals["plain"]),
        "blind": _decoded(engine, request, replace(aware, proposer=BlindProposer(aware.proposer)), totals["blind"]),
        "constrained": _decoded(engine, request, aware, totals["constrained"]),
    }
    if len(set(texts.values())) > 1:
        raise ContractError(f"the texts differ: {texts}")


def _decoded(engine: Engine, request: GenerationRequest, snapshot: LoadedSnapshot, totals: Totals) -> tuple[int, ...]:
    """Return the text's ids. Its first pass, which reads the prompt, adds no seconds."""
    ids: list[int] = []
    for number, step in enumerate(engine.stream(request, snapshot).steps):
        ids += step.emitted
        totals.num_passes += 1
        totals.num_tokens += len(step.emitted)
        forced = [node for node, source in enumerate(step.tree.sources) if source is Source.FORCED]
        totals.num_forced += len(forced)
        totals.num_forced_accepted += len(set(forced) & set(step.path))
        if number:
            totals.draft_s += step.timings.draft_s
            totals.target_s += step.timings.target_s
            totals.other_s += step.timings.other_s
    return tuple(ids)


def _schemas(path: Path, num: int) -> list[str]:
    """Return the schema of each of the first rows, as text. Raises RequestError."""
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()][:num]
    try:
        return [json.dumps(json.loads(line)["schema"]) for line in lines]
    except KeyError as exc:
        raise RequestError(f"{path} has rows without a schema") from exc


def _table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    plain = figures["plain"]["tokens_per_s"]
    table = Table("method", "tokens/pass", "tokens/s", "speed-up", "other than models", "forced accepted")
    for method, row in figures.items():
        table.add_row(
            method,
            f"{row['tokens_per_pass']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s'] / plain:.2f}x",
            f"{row['other_share']:.1%}",
            f"{row['num_forced_accepted']} of {row['num_forced']}",
        )
    return table


if __name__ == "__main__":
    process.entry("constrained", main)
