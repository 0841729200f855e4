"""Perplexity of texts, and the share of tokens that are those of the model in 16 bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

from omnidraft.errors import OmnidraftError
from pipelines.bench.engines.engine import EngineSpec
from pipelines.bench.engines.engine_process import EngineProcess, running
from pipelines.bench.quality.texts import QualityTexts
from pipelines.lib.progress import bar

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt with the greedy answer of the model in 16 bits."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass
class QualityMeasurement:
    """The rows so far, and how they are measured."""

    texts: Sequence[QualityTexts]
    answer_tokens: int
    publish: Callable[[Sequence[Row]], None]
    rows: list[Row] = field(default_factory=list)

    def measure(self, reference: EngineSpec, specs: Sequence[EngineSpec]) -> None:
        """Generate the greedy answers of the reference, then measure each engine on them. Raises ModelError."""
        with running(reference) as engine:
            continuations = {texts.name: self._continue(engine, texts) for texts in self.texts}
        for spec in specs:
            try:
                with running(spec) as engine:
                    for texts in self.texts:
                        self._add(_row(engine, texts, continuations[texts.name]))
            except OmnidraftError as exc:
                self._add(spec.plain_data() | {"text": None, "error": str(exc)})

    def _continue(self, engine: EngineProcess, texts: QualityTexts) -> list[Continuation]:
        with bar(f"answers of {engine.spec}, {texts.name}", len(texts.prompts)) as advance:
            continuations = []
            for prompt in texts.prompts:
                answer = engine.ask({"generate": list(prompt), "num": self.answer_tokens})["ids"]
                continuations.append(Continuation(prompt, answer))
                advance()
        return continuations

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.publish(self.rows)


def _row(engine: EngineProcess, texts: QualityTexts, continuations: Sequence[Continuation]) -> Row:
    with bar(f"{engine.spec}, {texts.name}", len(texts.windows) + len(continuations)) as advance:
        log_probs: list[float] = []
        for window in texts.windows:
            log_probs += engine.ask({"score": list(window)})["log_probs"]
            advance()
        equal: list[bool] = []
        for each in continuations:
            best = engine.ask({"score": [*each.prompt, *each.answer]})["best"][-len(each.answer) :]
            equal += [mine == theirs for mine, theirs in zip(best, each.answer, strict=True)]
            advance()
    return engine.spec.plain_data() | {
        "text": texts.name,
        "perplexity": exp(-sum(log_probs) / len(log_probs)),
        "greedy_equal": sum(equal) / len(equal),
        "bits_per_weight": engine.bits_per_weight,
        "tokens": len(log_probs),
        "greedy_tokens": len(equal),
        "error": None,
    }
