"""The same log learned once more, in one process without kills, and its weights compared bit for bit.

The log has one partition. Batches are then a function of the log alone; with several, the order of partitions depends
on time while one is idle, and only that each record is learned once can be promised.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from omnidraft import assembly
from omnidraft.config import Settings
from omnidraft.distill.publisher import BATCHER
from omnidraft.ports import Registry, SnapshotVersion
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics

FILES = (bundle.DRAFTER, bundle.NGRAMS, "resume/learner.safetensors", BATCHER)
"""Weights, n-gram cache, optimizer, and the records held out or seen."""


def compare(settings: Settings, folder: Path) -> dict[str, Any]:
    """Learn as many steps as the fleet's newest snapshot has, and return figures of the newest snapshots of both.

    Args:
        folder: where the uninterrupted run has a registry of its own.
    """
    theirs = assembly.registry(settings)
    final = theirs.resolve("latest")
    registry = settings.registry.model_copy(update={"url": f"directory:///{folder.absolute()}"})
    alone = settings.model_copy(update={"registry": registry})
    _learn(alone, final.manifest.num_steps, folder / "staging")
    ours = assembly.registry(alone)
    newest = ours.resolve("latest")
    differing = _differing(theirs, final, ours, newest)
    positions = [(each.manifest.offsets, each.manifest.counts, each.manifest.num_records) for each in (final, newest)]
    return {
        "steps": final.manifest.num_steps,
        "records_learned": final.manifest.num_records,
        "tensors_that_differ": differing[:5],
        "same_offsets_and_counts": positions[0] == positions[1],
        "weights_equal_bit_for_bit": not differing and positions[0] == positions[1],
    }


def _learn(settings: Settings, num_steps: int, staging: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(settings.learner.threads or 1)
    try:
        distillation = assembly.distillation(settings, CountingMetrics(), folder=staging)
        distillation.run(lambda: distillation.status().num_steps >= num_steps)
    finally:
        torch.set_num_threads(before)


def _differing(theirs: Registry, final: SnapshotVersion, ours: Registry, newest: SnapshotVersion) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="omnidraft-soak-") as staging:
        parts = ("serving", "resume")
        one = theirs.fetch(final.version, Path(staging, "theirs"), parts)
        other = ours.fetch(newest.version, Path(staging, "ours"), parts)
        return [name for file in FILES for name in _differing_in(one, other, file)]


def _differing_in(one: Path, other: Path, file: str) -> list[str]:
    first, second = (bundle.tensors(each, file) if (each / file).exists() else {} for each in (one, other))
    names = sorted({*first, *second})
    return [f"{file}:{name}" for name in names if not same_bits(first.get(name), second.get(name))]


def same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same bits: a nan equals itself, and 0.0 is not -0.0."""
    if first is None or second is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*bits)
