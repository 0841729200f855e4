"""From settings to objects: the only package that knows every implementation. Slow imports stay inside functions."""

from omnidraft.assembly.device import learning_engine
from omnidraft.assembly.distiller import distillation, identity, learner, learner_from_snapshot, memory_files
from omnidraft.assembly.drafting import proposer, shared_drafting
from omnidraft.assembly.fleet import control_log, controller, order_champion, ordering_log, overview, worker_url
from omnidraft.assembly.host import LoadedModel, ServedTarget, loaded_model
from omnidraft.assembly.logs import (
    existing_log_reader,
    log_reader,
    log_writer,
    require_log,
    topic_names,
    topics,
)
from omnidraft.assembly.models import Vocabularies, packed_cache, served_vocabularies, set_threads, target, vocabularies
from omnidraft.assembly.recording import tracing
from omnidraft.assembly.registries import existing_registry, experiment, registry
from omnidraft.assembly.signing import receipt_signer, snapshot_signing
from omnidraft.assembly.snapshot_loading import memory_loader, ngram_cache, snapshot_loader
from omnidraft.assembly.vllm import Batching, batching
from omnidraft.assembly.worker import Worker, engine, worker
