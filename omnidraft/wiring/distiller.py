"""The distiller of one pair and its learner."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omnidraft.config import LearnerSettings, Settings
from omnidraft.ports import LogReader, Metrics, NoopTracing, Tracing
from omnidraft.system import keep_freed_memory
from omnidraft.threads import attentive
from omnidraft.wiring.controller import base_serving_tensors, control_follower, recent_records, snapshot_comparison
from omnidraft.wiring.logs import log_reader, log_writer, registry, trace_source
from omnidraft.wiring.memory import memory_files
from omnidraft.wiring.signing import require_signer
from omnidraft.wiring.snapshot_loading import ngram_cache
from omnidraft.wiring.vocabularies import Vocabularies, drafter_hash, vocabularies

if TYPE_CHECKING:
    from omnidraft.distill.control import Status
    from omnidraft.distill.exactly_once import Distiller
    from omnidraft.distill.forgetting import Forgetting, RecordRetention
    from omnidraft.distill.ingest.batcher import Batcher
    from omnidraft.distill.ingest.log_position import TruncationMark
    from omnidraft.distill.ingest.poison_detector import PoisonDetector
    from omnidraft.distill.ingest.tenant_shares import TenantGroups
    from omnidraft.distill.memory.memory_files import MemoryFiles
    from omnidraft.distill.publisher import Identity
    from omnidraft.distill.training.learner import Learner
    from omnidraft.snapshots.manifest import Manifest

_HEEDED: Final = ("pause", "resume", "restart", "rewind", "drift", "drift_over", "forget")
"""The kinds of orders and statements that a distiller acts on."""


def distillation(
    settings: Settings,
    metrics: Metrics,
    *,
    folder: Path,
    journal_folder: Path | None = None,
    tracing: Tracing | None = None,
    tokenizers: Vocabularies | None = None,
    progress: "Callable[[Status], None]" = lambda status: None,
    on_empty_poll: Callable[[], None] = lambda: None,
) -> "Distiller":
    """Return the distiller of `models.target` and its drafter.

    Args:
        folder: a folder of this distiller alone, for staged snapshots.
        journal_folder: where it is noted for later processes what crashed earlier ones, and what the log lost, unless
            `learner.journal_folder` is set; None: in `folder`.
        tokenizers: those of the pair, where they are loaded already.
        progress: see Distiller, `on_empty_poll` too.

    Raises:
        BusError, RegistryError, ModelError: log, registry or drafter cannot be used.
        ConfigError: the pinned held-out file cannot be used, or snapshots have to be signed and it has no key for that.
    """
    from omnidraft.distill.control import TrainingControl
    from omnidraft.distill.evaluation.held_out import HeldOut, read_pinned
    from omnidraft.distill.evaluation.tenant_factors import FactorJudge
    from omnidraft.distill.exactly_once import Distiller
    from omnidraft.distill.forgetting import RecordRetention
    from omnidraft.distill.ingest.tenant_shares import TenantGroups
    from omnidraft.distill.publisher import Publisher
    from omnidraft.distill.training.step_report import LearningSpans
    from omnidraft.telemetry.metrics import LabelledMetrics

    require_signer(settings, ("distiller", "operator"))
    keep_freed_memory()
    metrics = LabelledMetrics(metrics, target=settings.models.target)
    tokenizers, section = tokenizers or vocabularies(settings), settings.learner
    groups = TenantGroups(section.tenants)
    learning, alignment = learner(settings, tokenizers), tokenizers.alignment.fingerprint
    pinned = None if section.pinned_held_out is None else read_pinned(section.pinned_held_out, alignment)
    reader = log_reader(settings, settings.log.traces_topic)
    dead_letters = log_writer(settings, settings.log.dead_letters_topic)
    detector, truncation = _notes(settings, section.journal_folder or journal_folder or folder)
    batcher = _batcher(section, reader, detector, groups)
    staging = folder / "staging"
    files = memory_files(settings, tokenizers, metrics, staging / "memory")
    hours = settings.log.retention_hours
    retention = RecordRetention(None if hours is None else hours * 3600)
    snapshots = attentive(registry(settings), lambda: made.meanwhile())
    made = Distiller(
        trace_source(settings, alignment, reader, dead_letters, metrics, retention.is_forgotten),
        batcher,
        learning,
        Publisher(snapshots, identity(settings, tokenizers), staging, files.cipher, files),
        load_cache=lambda arrays: ngram_cache(settings, tokenizers, arrays),
        load_base=lambda: base_serving_tensors(settings, tokenizers),
        held_out=HeldOut(learning, groups=groups, pinned=pinned),
        factor_judge=FactorJudge(learning, section.factor_tenants, groups),
        steps_per_snapshot=section.steps_per_snapshot,
        max_lag_records=section.max_lag_records,
        poison_detector=detector,
        truncation=truncation,
        forgetting=_forgetting(settings, tokenizers, retention, batcher, learning, files, metrics),
        memory=files.memory,
        metrics=metrics,
        control=TrainingControl(control_follower(settings, metrics, _HEEDED)),
        compare_earlier=snapshot_comparison(settings, snapshots, tokenizers, learning, folder).compare,
        progress=progress,
        on_empty_poll=on_empty_poll,
        spans=LearningSpans(tracing or NoopTracing(), settings.models.target),
    )
    return made


def _batcher(
    section: LearnerSettings, reader: LogReader, detector: "PoisonDetector", groups: "TenantGroups"
) -> "Batcher":
    from omnidraft.distill.ingest.batcher import Batcher
    from omnidraft.distill.ingest.tenant_shares import TENANT_SHARE

    return Batcher(
        reader.partitions(),
        records_per_step=section.records_per_step,
        held_out_every=section.held_out_every,
        poison=detector.poison,
        tenant_share=TENANT_SHARE,
        groups=groups,
    )


def _forgetting(
    settings: Settings,
    tokenizers: Vocabularies,
    retention: "RecordRetention",
    batcher: "Batcher",
    learning: "Learner",
    files: "MemoryFiles",
    metrics: Metrics,
) -> "Forgetting":
    """Return what drops records that the log no longer keeps, and those of tenants who are forgotten."""
    from omnidraft.distill.forgetting import Forgetting

    return Forgetting(
        retention,
        batcher,
        learning,
        metrics,
        new_cache=lambda: ngram_cache(settings, tokenizers, None),
        learned_records=recent_records(settings, tokenizers.alignment.fingerprint).before,
        memory=files.memory,
        cipher=files.cipher,
    )


def _notes(settings: Settings, folder: Path) -> "tuple[PoisonDetector, TruncationMark]":
    """Return the notes for later processes: what crashed earlier ones, and what the log lost."""
    from omnidraft.distill.ingest.log_position import TruncationMark
    from omnidraft.distill.ingest.poison_detector import TRIES, PoisonDetector

    name = _name_of_notes(settings)
    detector = PoisonDetector(folder / f"trying-{name}.json", tries=TRIES)
    return detector, TruncationMark(folder / f"truncated-{name}.txt")


def _name_of_notes(settings: Settings) -> str:
    """Return a name that is unique to log, registry and pair, so that distillers may share a folder."""
    models = settings.models
    about = (settings.log.url, settings.log.traces_topic, settings.registry.url, models.target, models.drafter)
    return hashlib.sha256("\n".join(map(str, about)).encode()).hexdigest()[:16]


def learner(settings: Settings, tokenizers: Vocabularies) -> "Learner":
    """Return a learner of the base drafter with a fresh n-gram cache and head. Raises ConfigError, VocabularyError."""
    from omnidraft.distill.training.learner import SEED, Learner
    from omnidraft.models.acceptance_head import AcceptanceHead
    from omnidraft.models.hf.trainable_drafter import load_trainable

    section = settings.learner
    model = load_trainable(
        tokenizers.drafter_folder,
        train=section.train,
        rank=section.lora_rank,
        seed=SEED,
        precision=section.precision,
    )
    cache = ngram_cache(settings, tokenizers, None)
    head = AcceptanceHead(model.hidden_size, seed=SEED) if settings.decode.policy == "acceptance" else None
    return Learner(model, tokenizers.drafter, tokenizers.target.vocabulary, tokenizers.alignment, cache, section, head)


def learner_from_snapshot(
    settings: Settings, tokenizers: Vocabularies, manifest: "Manifest", folder: Path
) -> "Learner":
    """Return a learner with the serving weights and the cache of a snapshot folder.

    Raises:
        ConfigError, SnapshotError, VocabularyError: the snapshot is of another pair or drafter.
    """
    from omnidraft.snapshots import bundle

    tensors = bundle.serving_tensors(folder)
    kind: dict[str, Any] = {} if manifest.train == "base" else {"train": manifest.train}
    if manifest.train == "lora" and tensors:
        kind["lora_rank"] = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
    section = settings.learner.model_copy(update=kind)
    made = learner(settings.model_copy(update={"learner": section}), tokenizers)
    if tensors is not None:
        made.start_from(tensors)
    made.cache = ngram_cache(settings, tokenizers, bundle.ngrams(folder))
    return made


def identity(settings: Settings, tokenizers: Vocabularies) -> "Identity":
    """Return the manifest fields that all snapshots of `models.target` and its drafter share."""
    from omnidraft import __version__
    from omnidraft.distill.publisher import Identity

    return Identity(
        target=settings.models.target,
        drafter=settings.models.drafter,
        drafter_hash=drafter_hash(tokenizers.drafter_folder, tokenizers.drafter),
        alignment=tokenizers.alignment.fingerprint,
        train=settings.learner.train,
        code_version=__version__,
        settings={name: str(value) for name, value in settings.learner.model_dump(exclude={"tenants"}).items()},
    )
