"""Taking up a published snapshot: to go on from it, or to go back to its weights from a later one.

Whoever goes on takes everything, the place in the log too. Whoever goes back takes weights, optimizer, n-gram cache and
replay buffer, and keeps its own place, counts and held-out records: what was learned since is unlearned, not repeated.
"""

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.publisher import Restored
from omnidraft.distill.training.learner import Learner
from omnidraft.distill.training.step_report import Counters
from omnidraft.vocab.ngram_cache import NgramCache

LoadCache = Callable[[Mapping[str, np.ndarray]], NgramCache]
LoadBase = Callable[[], Mapping[str, Tensor]]


def go_on(restored: Restored, learner: Learner, batcher: Batcher, load_cache: LoadCache) -> None:
    """Let a new learner and its batcher go on from a snapshot. Raises ConfigError, WireError as their `load_state`."""
    manifest = restored.version.manifest
    if restored.ngrams:
        learner.cache = load_cache(restored.ngrams)
    if restored.learner is not None and restored.batcher is not None:
        learner.load_state(restored.learner)
        batcher.load_state(restored.batcher, manifest.offsets)
        return
    learner.counters = Counters(manifest.num_steps, manifest.num_records, manifest.num_tokens, dict(manifest.counts))
    batcher.start_at(manifest.offsets)
    if restored.serving is not None:
        learner.start_from(restored.serving)


def go_back(restored: Restored, learner: Learner, load_cache: LoadCache, load_base: LoadBase) -> None:
    """Let a learner go back to a snapshot; with a fresh optimizer where the snapshot's is gone.

    Args:
        load_base: returns the serving tensors of the base drafter, for a snapshot that has none of its own.

    Raises:
        ConfigError: its weights do not fit this learner, as its rank was another.
    """
    counters = learner.counters
    if restored.learner is not None:
        learner.load_state(restored.learner)
    else:
        learner.start_afresh_from(load_base() if restored.serving is None else restored.serving)
    learner.counters = counters
    learner.cache = load_cache(restored.ngrams)
