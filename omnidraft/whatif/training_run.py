"""Learning from a list of records: the learner of the service, without log, registry or clock.

Deterministic: the same records, settings and seed give the same snapshot.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnidraft import assembly, config
from omnidraft.distill.evaluation.agreement import block_efficiency, share
from omnidraft.distill.evaluation.held_out import HeldOut
from omnidraft.distill.ingest.record_disposition import hash_of_prompt
from omnidraft.distill.ingest.tenant_shares import TenantGroups
from omnidraft.distill.training.learner import Learner
from omnidraft.errors import RequestError
from omnidraft.progress import bar
from omnidraft.snapshots import bundle
from omnidraft.stats import paired_standard_error
from omnidraft.system import keep_freed_memory, usable_processors
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces.record import TraceRecord

DEPTHS = (1, 2, 3, 4, 6, 8, 10)
"""The chain lengths for which tokens per pass are predicted."""
LEAST_HELD_OUT = 16
"""Fewer answers judge with an error as large as what is usually gained."""


@dataclass(frozen=True, slots=True)
class LearningPoint:
    """One point of a learning curve."""

    num_steps: int
    num_tokens: int
    """Target tokens learned."""
    agreement: float
    """On the held-out records."""
    gain: float
    """Over the first point, on the same positions."""
    gain_error: float
    """The standard error of the gain, each answer taken as one draw; infinite for a single one."""
    tokens_per_pass: dict[int, float]
    """Predicted on the held-out records, by the length of a chain of first candidates."""
    losses: dict[str, float] = field(default_factory=dict)
    """The losses of the last step."""


def split_by_prompt(records: Sequence[TraceRecord], every: int) -> tuple[list[TraceRecord], list[TraceRecord]]:
    """Return the records to learn from, and those of one prompt in `every`, but of LEAST_HELD_OUT or a quarter.

    Raises:
        RequestError: there are too few prompts for that.
    """
    prompts = sorted({hash_of_prompt(record) for record in records})
    held_out = set(prompts[: max(len(prompts) // every, min(LEAST_HELD_OUT, len(prompts) // 4), len(prompts) > 1)])
    if not held_out:
        raise RequestError(f"{len(records)} records of one prompt: there is none to judge by")
    split: tuple[list[TraceRecord], list[TraceRecord]] = ([], [])
    for record in records:
        split[hash_of_prompt(record) in held_out].append(record)
    return split


def measure(
    learner: Learner,
    held_out: Sequence[TraceRecord],
    hits: Sequence[np.ndarray],
    first_hits: Sequence[np.ndarray],
    losses: dict[str, float] | None = None,
) -> LearningPoint:
    """Return the point of the learner as it is now. Raises RequestError when no record has a position.

    Args:
        hits: on each held-out record, with the n-gram cache.
        first_hits: those of the first point.
    """
    agreement, before = share(hits), share(first_hits)
    if agreement is None or before is None:
        raise RequestError("no record has a position to score")
    requests = [record.request for record in held_out]
    error = paired_standard_error(zip(requests, first_hits, hits, strict=True))
    tokens_per_pass = {depth: block_efficiency(hits, depth) or 1.0 for depth in DEPTHS}
    return LearningPoint(
        num_steps=learner.counters.num_steps,
        num_tokens=learner.counters.num_tokens,
        agreement=agreement,
        gain=agreement - before,
        gain_error=inf if error is None else error,
        tokens_per_pass=tokens_per_pass,
        losses=losses or {},
    )


@contextmanager
def tracked(
    settings: config.Settings, experiment: str, name: str
) -> Iterator[tuple[str | None, Callable[[LearningPoint], None]]]:
    """Yield the id of a new run of an MLflow experiment and what logs a point of its curve; where the registry is not
    MLflow, None and nothing."""
    mlflow = assembly.experiment(settings, experiment)
    if mlflow is None:
        yield None, lambda point: None
        return
    params = {name: str(value) for name, value in settings.learner.model_dump().items()}
    run_id = mlflow.start(name, params | {"target": settings.models.target, "drafter": settings.models.drafter})

    def log(point: LearningPoint) -> None:
        numbers = {f"loss/{name}": value for name, value in point.losses.items()}
        numbers |= {f"tokens_per_pass/{depth}": value for depth, value in point.tokens_per_pass.items()}
        mlflow.log(run_id, numbers | {"agreement": point.agreement}, point.num_steps)

    has_failed = True
    try:
        yield run_id, log
        has_failed = False
    finally:
        mlflow.end(run_id, has_failed=has_failed)


class TrainingRun:
    """One learner, which begins at the base drafter, and its learning curve."""

    def __init__(self, settings: config.Settings, tokenizers: assembly.Vocabularies) -> None:
        """Learn with all threads unless the settings have a number: nothing is served."""
        torch.set_num_threads(settings.learner.threads or usable_processors())
        keep_freed_memory()
        self._settings, self._tokenizers = settings, tokenizers
        self.learner = assembly.learner(settings, tokenizers)
        self._judge = HeldOut(self.learner, groups=TenantGroups(settings.learner.tenants))
        self._base = self.learner.serving_tensors()
        self._judge.set_parent(self._base)
        self._learned: Sequence[TraceRecord] = ()
        self._held_out: Sequence[TraceRecord] = ()
        self._first_hits: Sequence[np.ndarray] = ()
        self._last_hits: Sequence[np.ndarray] = ()
        self._seconds = 0.0  # in learning steps alone
        self.curve: list[LearningPoint] = []

    def learn(
        self,
        records: Sequence[TraceRecord],
        held_out: Sequence[TraceRecord],
        *,
        title: str,
        num_passes: int = 1,
        measure_every: int | None = None,
        on_point: Callable[[LearningPoint], None] = lambda point: None,
    ) -> None:
        """Learn from all records, in order, `num_passes` times, below a progress bar of this title.

        Args:
            measure_every: steps between two points of the curve; None measures at the beginning and the end only.
        """
        size = self._settings.learner.records_per_step
        batches = [records[start : start + size] for start in range(0, len(records), size)] * num_passes
        self._learned, self._held_out = records, held_out
        self._measure(on_point, {})
        with bar(title, num_passes * len(records)) as advance:
            for number, batch in enumerate(batches, 1):
                started = time.perf_counter()
                report = self.learner.step(batch)
                self._seconds += time.perf_counter() - started
                advance(len(batch))
                if number == len(batches) or (measure_every and number % measure_every == 0):
                    self._measure(on_point, dict(report.losses))

    def _measure(self, on_point: Callable[[LearningPoint], None], losses: dict[str, float]) -> None:
        self._last_hits = self._hits()
        self._first_hits = self._first_hits or self._last_hits
        self.curve.append(measure(self.learner, self._held_out, self._last_hits, self._first_hits, losses))
        on_point(self.curve[-1])

    def _hits(self) -> Sequence[np.ndarray]:
        return self.learner.hits(self._held_out, with_cache=True)

    def figures(self) -> dict[str, Any]:
        """Return its curve and what it learned, for a report."""
        skipped = self.learner.counters.skipped
        curve = [asdict(point) for point in self.curve]
        alone = asdict(self._cache_alone())
        tokens_per_s = self.learner.counters.num_tokens / self._seconds if self._seconds else None
        return {"curve": curve, "cache_alone": alone, "tokens_per_s": tokens_per_s, "skipped": skipped}

    def _cache_alone(self) -> LearningPoint:
        """Return the point of the base weights with the learned n-gram cache, which is a part of the gain."""
        with self.learner.serving(self._base):
            return measure(self.learner, self._held_out, self._hits(), self._first_hits)

    def compared_with(self, other: "TrainingRun") -> dict[str, float]:
        """Return the agreement beside that of another run on the same answers, and its standard error."""
        requests = [record.request for record in self._held_out]
        error = paired_standard_error(zip(requests, other._last_hits, self._last_hits, strict=True))
        beside = self.curve[-1].agreement - other.curve[-1].agreement
        return {"beside": beside, "beside_error": inf if error is None else error}

    def write_snapshot(self, folder: Path) -> None:
        """Write a snapshot folder for workers, `check` and the benchmark. The learned texts become the fleet's memory
        of their tenants, as far as section `memory` lets them. Raises SnapshotError when the folder exists."""
        settings, tokenizers, serving = self._settings, self._tokenizers, self.learner.serving_tensors()
        manifest = assembly.identity(settings, tokenizers).manifest(
            None,
            losses=self.curve[-1].losses,
            held_out_records=len(self._held_out),
            **self.learner.counters.manifest_fields(),
            **self._judge.measure(self._held_out, serving).facts(),
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        parts: dict[str, Path | bundle.Tensors] = {
            bundle.DRAFTER: serving,
            bundle.NGRAMS: self.learner.cache.to_arrays(),
        }
        with tempfile.TemporaryDirectory(prefix="omnidraft-memory-") as staging:
            files = assembly.memory_files(settings, tokenizers, CountingMetrics(), Path(staging) / "memory")
            files.memory.add(self._learned)
            bundle.write(folder, manifest, parts | files.stage(), signing=assembly.snapshot_signing(settings))
