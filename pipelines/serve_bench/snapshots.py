"""Real snapshots of a pair in its registry: the base drafter's weights, each time shaken a little."""

from pathlib import Path

import torch

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.snapshots import bundle

NOISE = 1e-3
"""Of each weight, as a share of it."""


def publish(settings: Settings, folder: Path, num: int) -> list[int]:
    """So many versions with all weights and an n-gram cache."""
    words = wiring.vocabularies(settings)
    identity, registry = wiring.identity(settings, words), wiring.registry(settings)
    tensors = load_trainable(words.drafter_folder, train="full", rank=1, seed=0).serving_tensors()
    ngrams = wiring.ngram_cache(settings, words, None).to_arrays()
    versions: list[int] = []
    parent_id: str | None = None
    for number in range(num):
        generator = torch.Generator().manual_seed(number)
        shaken = {name: _shaken(tensor, generator) for name, tensor in tensors.items()}
        manifest = identity.manifest(parent_id, train="full")
        made = folder / f"made-{number}"
        bundle.write(made, manifest, {bundle.DRAFTER: shaken, bundle.NGRAMS: ngrams})
        published = registry.publish(made, versions[-1] if versions else None)
        versions.append(published.version)
        parent_id = manifest.snapshot_id
    return versions


def _shaken(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return tensor * (1 + NOISE * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
