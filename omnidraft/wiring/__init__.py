"""From settings to objects: the only package that knows every implementation. Heavy imports stay inside functions."""

from omnidraft.wiring.logs import log_reader, log_writer, registry
from omnidraft.wiring.models import (
    SnapshotLoader,
    Vocabularies,
    ngram_cache,
    snapshot_loader,
    target,
    vocabularies,
)
from omnidraft.wiring.processes import Worker, controller, distillation, engine, worker

__all__ = [
    "SnapshotLoader",
    "Vocabularies",
    "Worker",
    "controller",
    "distillation",
    "engine",
    "log_reader",
    "log_writer",
    "ngram_cache",
    "registry",
    "snapshot_loader",
    "target",
    "vocabularies",
    "worker",
]
