"""Perplexity of texts, and the share of tokens that are those of the model in 16 bits, with their standard errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, sqrt
from statistics import fmean, stdev
from typing import Any

from omnidraft.errors import OmnidraftError
from omnidraft.progress import bar
from pipelines.bench.engines.engine import EngineSpec
from pipelines.bench.engines.engine_process import EngineProcess, running
from pipelines.bench.quality.texts import QualityTexts

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scores:
    """What an engine computes after the texts of a file."""

    log_probs: Sequence[float]
    """Log-probability of each token of the windows but their first."""
    best: Sequence[int]
    """The likeliest tokens there."""
    best_in_answers: Sequence[int]
    """The likeliest tokens along the greedy answers of the model in 16 bits."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The texts of a file, and what the model in 16 bits makes of them."""

    texts: QualityTexts
    answers: Sequence[Sequence[int]]
    """Its greedy answer to each prompt."""
    scores: Scores


@dataclass
class QualityMeasurement:
    """The rows so far, and how they are measured."""

    texts: Sequence[QualityTexts]
    answer_tokens: int
    publish: Callable[[Sequence[Row]], None]
    rows: list[Row] = field(default_factory=list)

    def measure(self, reference: EngineSpec, specs: Sequence[EngineSpec]) -> None:
        """Measure the reference, then compare each engine with it. Raises ModelError."""
        references = []
        with running(reference) as engine:
            for texts in self.texts:
                answers = self._answers(engine, texts)
                references.append(Reference(texts, answers, _scores(engine, texts, answers)))
                self._add(_row(engine, references[-1], references[-1].scores))
        for spec in specs:
            if spec != reference:
                self._compare(spec, references)

    def _compare(self, spec: EngineSpec, references: Sequence[Reference]) -> None:
        try:
            with running(spec) as engine:
                for each in references:
                    self._add(_row(engine, each, _scores(engine, each.texts, each.answers)))
        except OmnidraftError as exc:
            self._add(spec.plain_data() | {"text": None, "error": str(exc)})

    def _answers(self, engine: EngineProcess, texts: QualityTexts) -> list[Sequence[int]]:
        with bar(f"answers of {engine.spec}, {texts.name}", len(texts.prompts)) as advance:
            answers: list[Sequence[int]] = []
            for prompt in texts.prompts:
                answers.append(engine.ask({"generate": list(prompt), "num": self.answer_tokens})["ids"])
                advance()
        return answers

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.publish(self.rows)


def _scores(engine: EngineProcess, texts: QualityTexts, answers: Sequence[Sequence[int]]) -> Scores:
    log_probs: list[float] = []
    best: list[int] = []
    best_in_answers: list[int] = []
    with bar(f"{engine.spec}, {texts.name}", len(texts.windows) + len(answers)) as advance:
        for window in texts.windows:
            scored = engine.ask({"score": list(window)})
            log_probs += scored["log_probs"]
            best += scored["best"]
            advance()
        for prompt, answer in zip(texts.prompts, answers, strict=True):
            best_in_answers += engine.ask({"score": [*prompt, *answer]})["best"][-len(answer) :]
            advance()
    return Scores(log_probs, best, best_in_answers)


def _row(engine: EngineProcess, reference: Reference, scores: Scores) -> Row:
    generated = [token for answer in reference.answers for token in answer]
    losses = [theirs - mine for mine, theirs in zip(scores.log_probs, reference.scores.log_probs, strict=True)]
    ratio = exp(fmean(losses))
    return engine.spec.plain_data() | {
        "text": reference.texts.name,
        "perplexity": exp(-fmean(scores.log_probs)),
        "perplexity_ratio": ratio,
        "perplexity_ratio_error": ratio * stdev(losses) / sqrt(len(losses)),
        **_share("best_equal", scores.best, reference.scores.best),
        **_share("greedy_equal", scores.best_in_answers, generated),
        "bits_per_weight": engine.bits_per_weight,
        "tokens": len(losses),
        "greedy_tokens": len(generated),
        "error": None,
    }


def _share(name: str, tokens: Sequence[int], others: Sequence[int]) -> Row:
    """Return the share of equal tokens, and its standard error as if each were drawn alone."""
    share = fmean(mine == other for mine, other in zip(tokens, others, strict=True))
    return {name: share, f"{name}_error": sqrt(share * (1 - share) / len(tokens))}
