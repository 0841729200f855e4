"""From settings to objects: the only package that knows every implementation. Heavy imports stay inside functions."""

from omnidraft.assembly.controller import controller, overview, worker_url
from omnidraft.assembly.device import device_settings, learning_engine
from omnidraft.assembly.distiller import distillation, identity, learner, learner_from_snapshot
from omnidraft.assembly.drafting import proposer, shared_drafting
from omnidraft.assembly.existing import existing_control_writer, existing_log_reader, existing_registry
from omnidraft.assembly.loaded_model import LoadedModel, loaded_model
from omnidraft.assembly.logs import (
    control_writer,
    experiment,
    log_reader,
    log_writer,
    registry,
    topic_names,
    topics,
    trace_source,
)
from omnidraft.assembly.memory import memory_files, memory_loader
from omnidraft.assembly.models import packed_cache, set_threads, target
from omnidraft.assembly.recording import tracing
from omnidraft.assembly.signing import snapshot_signing
from omnidraft.assembly.snapshot_loading import SnapshotLoader, base_drafter, ngram_cache, snapshot_loader
from omnidraft.assembly.vllm import Batching, batching
from omnidraft.assembly.vocabularies import Vocabularies, served_vocabularies, vocabularies
from omnidraft.assembly.worker import ServedTarget, Worker, engine, worker

__all__ = [
    "Batching",
    "LoadedModel",
    "ServedTarget",
    "SnapshotLoader",
    "Vocabularies",
    "Worker",
    "base_drafter",
    "batching",
    "control_writer",
    "controller",
    "device_settings",
    "distillation",
    "engine",
    "existing_control_writer",
    "existing_log_reader",
    "existing_registry",
    "experiment",
    "identity",
    "learner",
    "learner_from_snapshot",
    "learning_engine",
    "loaded_model",
    "log_reader",
    "log_writer",
    "memory_files",
    "memory_loader",
    "ngram_cache",
    "overview",
    "packed_cache",
    "proposer",
    "registry",
    "served_vocabularies",
    "set_threads",
    "shared_drafting",
    "snapshot_loader",
    "snapshot_signing",
    "target",
    "topic_names",
    "topics",
    "trace_source",
    "tracing",
    "vocabularies",
    "worker",
    "worker_url",
]
