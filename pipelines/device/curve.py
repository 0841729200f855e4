"""Agreement by learned tokens: every snapshot on the target's answers to the same prompts, paired with the base."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.ports import SnapshotVersion
from omnidraft.prompts import Prompt
from omnidraft.traces.record import TraceRecord
from pipelines.lib.paired_gain import paired_gain
from pipelines.lib.recording import Recording, RecordingLimits


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One snapshot."""

    version: int
    num_requests: int
    """Records learned."""
    num_tokens: int
    """Tokens learned."""
    agreement: float
    gain: float
    """Over the drafter as it came."""
    gain_error: float | None
    """The standard error of the gain, an answer being one draw."""

    def plain_data(self) -> dict[str, Any]:
        return asdict(self)


def agreement_curve(
    settings: Settings,
    snapshots: Sequence[tuple[SnapshotVersion, Path]],
    test: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
) -> Iterator[CurvePoint]:
    """Yield a point for each snapshot, oldest first."""
    tokenizers = wiring.vocabularies(settings)
    records = _records(settings, test, answers)
    base = wiring.learner(settings, tokenizers).hits(records, with_cache=True)
    for version, folder in snapshots:
        hits = wiring.learner_from_snapshot(settings, tokenizers, version.manifest, folder).hits(
            records, with_cache=True
        )
        yield _point(version, records, base, hits)


def _records(settings: Settings, test: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> list[TraceRecord]:
    """Score the answers with the target; they are its own."""
    answered = [replace(each, answer_ids=tuple(ids)) for each, ids in zip(test, answers, strict=True) if ids]
    limits = RecordingLimits(max(map(len, answers)), "test")
    with TemporaryDirectory() as parts:
        recording = Recording(settings, Path(parts), limits, is_given=True)
        return [record for each in recording.records_of(answered) for record in each]


def _point(
    version: SnapshotVersion, records: Sequence[TraceRecord], base: Sequence[np.ndarray], hits: Sequence[np.ndarray]
) -> CurvePoint:
    manifest, measured = version.manifest, paired_gain(records, base, hits)
    counts = (manifest.num_records, manifest.num_tokens)
    return CurvePoint(version.version, *counts, measured.agreement, measured.gain, measured.gain_error)
