"""One loaded target that decodes prompts with several proposers and plainly, in turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from omnidraft import config, wiring
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.ports import Proposer, Step
from omnidraft.progress import bar
from omnidraft.prompts import Prompt
from omnidraft.wiring.named_snapshots import named_snapshot
from pipelines.bench.runs import BenchRun, rotated, run_of_steps
from pipelines.lib.prompt_requests import request_for

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Drafting:
    """A proposer and its largest number of tokens; no proposer in plain decoding."""

    proposer: Proposer | None
    num_draft_tokens: int


class Decoding:
    """Loads a target. Raises as wiring when the models cannot be loaded."""

    def __init__(self, settings: config.Settings) -> None:
        self._settings = settings
        self._tokenizers = wiring.vocabularies(settings)
        target = wiring.target(settings, self._tokenizers)
        self._costs = MeasuredCosts(target)
        self._costs.passes("fast")
        self._decoder = Decoder(target, self._tokenizers.target.vocabulary, costs=self._costs)

    def drafting(self, folder: Path | None, **decode: Any) -> "Drafting":
        """Return the drafting of a snapshot folder, or of the base drafter, after changes to section `decode`."""
        section = self._settings.decode.model_copy(update=decode)
        settings = self._settings.model_copy(update={"decode": section})
        load = wiring.snapshot_loader(settings, self._tokenizers, self._costs)
        loaded = load(None, None) if folder is None else named_snapshot(settings, load, str(folder))
        return Drafting(loaded.proposer, section.num_draft_tokens)

    def compare(
        self, texts: Sequence[Prompt], drafts: Mapping[str, "Drafting"], max_new_tokens: int
    ) -> dict[str, dict[str, Any]]:
        """Return figures of plain decoding and of each drafting, in turns over the prompts."""
        draftings = {PLAIN: Drafting(None, 0), **drafts}
        runs: dict[str, list[_CountedRun]] = {name: [] for name in draftings}
        with bar(f"{self._settings.models.target}: decoding", len(texts) * len(draftings)) as advance:
            for number, prompt in enumerate(texts):
                for name in rotated(list(draftings), number):
                    runs[name].append(self._decode(prompt, draftings[name], max_new_tokens))
                    advance()
        return {name: _figures(each, runs[PLAIN]) for name, each in runs.items()}

    def _decode(self, prompt: Prompt, drafting: "Drafting", max_new_tokens: int) -> "_CountedRun":
        request = request_for(prompt, self._tokenizers, max_new_tokens, drafting.num_draft_tokens)
        counts = {"drafted": 0, "accepted": 0}

        def counted(steps: Iterator[Step]) -> Iterator[Step]:
            for step in steps:
                counts["drafted"] += len(step.tree) - 1
                counts["accepted"] += len(step.path)
                yield step

        run = run_of_steps(counted(self._decoder.decode(request, drafting.proposer)))
        return _CountedRun(run, counts["drafted"], counts["accepted"])


@dataclass(frozen=True, slots=True)
class _CountedRun:
    run: BenchRun
    drafted: int
    accepted: int


def _figures(runs: Sequence[_CountedRun], plain: Sequence[_CountedRun]) -> dict[str, Any]:
    drafted, passes = sum(each.drafted for each in runs), sum(each.run.stats.num_passes for each in runs)
    ratios = [
        ours.run.stats.tokens_per_s / base.run.stats.tokens_per_s
        for ours, base in zip(runs, plain, strict=True)
        if base.run.stats.tokens_per_s
    ]
    scored = sum(each.run.stats.num_scored for each in runs)
    return {
        "acceptance": sum(each.accepted for each in runs) / drafted if drafted else None,
        "agreement": sum(each.run.stats.num_agreed for each in runs) / scored if scored else None,
        "tokens_per_pass": sum(each.run.stats.num_tokens for each in runs) / passes,
        "speedup": median(ratios) if ratios else None,
        "same_texts": sum(ours.run.ids == base.run.ids for ours, base in zip(runs, plain, strict=True)),
        "num_texts": len(runs),
    }
