"""The same log learned once more, in one process without kills, and its weights compared bit for bit.

The log has one partition. Batches are then a function of the log alone; with several, the order of partitions depends
on time while one is idle, and only that each record is learned once can be promised.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.distill.publisher import BATCHER
from omnidraft.ports import Registry, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics

FILES = (bundle.DRAFTER, bundle.NGRAMS, "resume/learner.safetensors", BATCHER)
"""Weights, n-gram cache, optimizer, and the records held out or seen."""


@dataclass(frozen=True, slots=True)
class WeightComparison:
    """The newest snapshot of the fleet beside that of the uninterrupted run."""

    num_steps: int
    num_records: int
    differing: tuple[str, ...]
    """Tensors that differ in a bit, as file:name."""
    same_offsets: bool
    """Both stopped at the same offsets with the same counts."""

    @property
    def are_equal(self) -> bool:
        return not self.differing and self.same_offsets

    def plain_data(self) -> dict[str, Any]:
        """Return the fields of the report."""
        return {
            "steps": self.num_steps,
            "records_learned": self.num_records,
            "tensors_that_differ": list(self.differing[:5]),
            "same_offsets_and_counts": self.same_offsets,
            "weights_equal_bit_for_bit": self.are_equal,
        }


def compare(settings: Settings, folder: Path) -> WeightComparison:
    """Learn as many steps as the fleet's newest snapshot has; `folder` gets a registry of its own."""
    theirs = wiring.registry(settings)
    final = theirs.resolve("latest")
    alone = settings.model_copy(
        update={"registry": settings.registry.model_copy(update={"url": f"directory:///{folder.absolute()}"})}
    )
    _learn(alone, final.manifest.num_steps, folder / "staging")
    ours = wiring.registry(alone)
    newest = ours.resolve("latest")
    differing = _differing(theirs, final, ours, newest)
    positions = [(each.manifest.offsets, each.manifest.counts, each.manifest.num_records) for each in (final, newest)]
    return WeightComparison(
        final.manifest.num_steps, final.manifest.num_records, differing, positions[0] == positions[1]
    )


def _learn(settings: Settings, num_steps: int, staging: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(settings.learner.threads or 1)
    try:
        distillation = wiring.distillation(settings, CountingMetrics(), folder=staging)
        distillation.run(lambda: distillation.status().num_steps >= num_steps)
    finally:
        torch.set_num_threads(before)


def _differing(theirs: Registry, final: SnapshotVersion, ours: Registry, newest: SnapshotVersion) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory(prefix="omnidraft-soak-") as staging:
        parts = ("serving", "resume")
        one = theirs.fetch(final.version, Path(staging, "theirs"), parts)
        other = ours.fetch(newest.version, Path(staging, "ours"), parts)
        return tuple(name for file in FILES for name in _differing_in(one, other, file))


def _differing_in(one: Path, other: Path, file: str) -> list[str]:
    if not (one / file).exists() and not (other / file).exists():
        return []
    if (one / file).exists() != (other / file).exists():
        return [file]
    first, second = bundle.tensors(one, file), bundle.tensors(other, file)
    names = sorted({*first, *second})
    return [f"{file}:{name}" for name in names if not _same(first.get(name), second.get(name))]


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same bits: a nan equals itself, and 0.0 is not -0.0."""
    if first is None or second is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*bits)
