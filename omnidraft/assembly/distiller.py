"""The distiller of one pair and its learner."""

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from omnidraft import __version__
from omnidraft.assembly.fleet import base_weights, control_log, recent_records, snapshot_comparison
from omnidraft.assembly.logs import log_reader, log_writer, record_cipher, trace_source
from omnidraft.assembly.models import TargetVocabulary, Vocabularies, drafter_hash, vocabularies
from omnidraft.assembly.registries import registry
from omnidraft.assembly.signing import require_signer
from omnidraft.assembly.snapshot_loading import ngram_cache
from omnidraft.config import MemorySettings, Settings
from omnidraft.distill.control import Status, TrainingControl
from omnidraft.distill.distiller import Distiller
from omnidraft.distill.evaluation.held_out import HeldOut, read_pinned
from omnidraft.distill.evaluation.tenant_factors import FactorJudge
from omnidraft.distill.forgetting import Forgetting, RecordRetention
from omnidraft.distill.identity import Identity
from omnidraft.distill.ingest.batcher import Batcher
from omnidraft.distill.ingest.ingest import Ingest
from omnidraft.distill.ingest.poison_detector import TRIES, PoisonDetector
from omnidraft.distill.ingest.tenant_shares import TENANT_SHARE, TenantGroups
from omnidraft.distill.ingest.truncation_mark import TruncationMark
from omnidraft.distill.learning import Learning
from omnidraft.distill.memory.memory_files import MemoryFiles
from omnidraft.distill.memory.text_memory import TextMemory
from omnidraft.distill.publisher import Publisher
from omnidraft.distill.training.learner import SEED, Learner
from omnidraft.distill.training.step_report import LearningSpans
from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.ports import Metrics, NoopTracing, Tracing
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest
from omnidraft.system import keep_freed_memory
from omnidraft.telemetry.metrics import LabelledMetrics
from omnidraft.threads import attentive

logger = logging.getLogger(__name__)


def distillation(
    settings: Settings,
    metrics: Metrics,
    *,
    folder: Path,
    journal_folder: Path | None = None,
    tracing: Tracing | None = None,
    tokenizers: Vocabularies | None = None,
    progress: Callable[[Status], None] = lambda status: None,
    on_empty_poll: Callable[[], None] = lambda: None,
) -> Distiller:
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
    require_signer(settings, ("distiller", "operator"))
    keep_freed_memory()
    notes = settings.learner.journal_folder or journal_folder or folder
    parts = _Parts(settings, metrics, tokenizers or vocabularies(settings), folder, notes)
    spans = LearningSpans(tracing or NoopTracing(), settings.models.target)
    return parts.distiller(progress, on_empty_poll, spans)


class _Parts:
    """The parts of a distiller of one pair."""

    def __init__(
        self, settings: Settings, metrics: Metrics, tokenizers: Vocabularies, folder: Path, notes: Path
    ) -> None:
        section, log = settings.learner, settings.log
        self._settings, self._tokenizers, self._folder = settings, tokenizers, folder
        self._metrics = LabelledMetrics(metrics, target=settings.models.target)
        self._groups = TenantGroups(section.tenants)
        self._learner, alignment = learner(settings, tokenizers), tokenizers.alignment.fingerprint
        self._pinned = None if section.pinned_held_out is None else read_pinned(section.pinned_held_out, alignment)
        self._meanwhile: Callable[[], None] = lambda: None
        reader = attentive(log_reader(settings, log.traces_topic), lambda: self._meanwhile())
        dead_letters = attentive(log_writer(settings, log.dead_letters_topic), lambda: self._meanwhile())
        self._detector, self._truncation = _notes(settings, notes)
        self._batcher = Batcher(
            reader.partitions(),
            records_per_step=section.records_per_step,
            held_out_every=section.held_out_every,
            poison=self._detector.poison,
            tenant_share=TENANT_SHARE,
            groups=self._groups,
        )
        self._files = memory_files(settings, tokenizers, self._metrics, folder / "staging" / "memory")
        hours = log.retention_hours
        self._retention = RecordRetention(None if hours is None else hours * 3600)
        is_forgotten = self._retention.is_forgotten
        self._source = trace_source(settings, alignment, reader, dead_letters, self._metrics, is_forgotten)

    def distiller(
        self, progress: Callable[[Status], None], on_empty_poll: Callable[[], None], spans: LearningSpans
    ) -> Distiller:
        settings, tokenizers, files, section = self._settings, self._tokenizers, self._files, self._settings.learner
        snapshots = attentive(registry(settings), lambda: self._meanwhile())
        control = control_log(settings, self._metrics)
        comparison = snapshot_comparison(settings, snapshots, control, tokenizers, self._learner, self._folder)
        lag = section.max_lag_records
        ingest = Ingest(self._source, self._batcher, self._metrics, self._truncation, max_lag_records=lag)
        learning = Learning(
            self._learner,
            self._batcher,
            load_cache=partial(ngram_cache, settings, tokenizers),
            load_base=partial(base_weights, settings, tokenizers),
            held_out=HeldOut(self._learner, groups=self._groups, pinned=self._pinned),
            factor_judge=FactorJudge(self._learner, section.factor_tenants, self._groups),
            detector=self._detector,
            memory=files.memory,
        )
        made = Distiller(
            ingest,
            learning,
            Publisher(snapshots, identity(settings, tokenizers), self._folder / "staging", files),
            self._forgetting(),
            steps_per_snapshot=section.steps_per_snapshot,
            metrics=self._metrics,
            control=TrainingControl(control),
            compare_earlier=comparison.compare,
            progress=progress,
            on_empty_poll=on_empty_poll,
            spans=spans,
        )
        self._meanwhile = made.meanwhile
        return made

    def _forgetting(self) -> Forgetting:
        """Return what drops records that the log no longer keeps, and those of tenants who are forgotten."""
        settings, tokenizers = self._settings, self._tokenizers
        return Forgetting(
            self._retention,
            self._batcher,
            self._learner,
            self._files,
            self._metrics,
            new_cache=partial(ngram_cache, settings, tokenizers, None),
            learned_records=recent_records(settings, tokenizers.alignment.fingerprint).before,
        )


def _notes(settings: Settings, folder: Path) -> tuple[PoisonDetector, TruncationMark]:
    """Return the notes for later processes: what crashed earlier ones, and what the log lost."""
    name = _name_of_notes(settings)
    detector = PoisonDetector(folder / f"trying-{name}.json", tries=TRIES)
    return detector, TruncationMark(folder / f"truncated-{name}.txt")


def _name_of_notes(settings: Settings) -> str:
    """Return a name that is unique to log, registry and pair, so that distillers may share a folder."""
    models = settings.models
    about = (settings.log.url, settings.log.traces_topic, settings.registry.url, models.target, models.drafter)
    return hashlib.sha256("\n".join(map(str, about)).encode()).hexdigest()[:16]


def learner(settings: Settings, tokenizers: Vocabularies) -> Learner:
    """Return a learner of the base drafter with a fresh n-gram cache and head. Raises ConfigError, VocabularyError."""
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


def learner_from_snapshot(settings: Settings, tokenizers: Vocabularies, manifest: Manifest, folder: Path) -> Learner:
    """Return a learner with the serving weights and the cache of a snapshot folder.

    Raises:
        ConfigError, SnapshotError, VocabularyError: the snapshot is of another pair or drafter.
    """
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


def identity(settings: Settings, tokenizers: Vocabularies) -> Identity:
    """Return the manifest fields that all snapshots of `models.target` and its drafter share."""
    return Identity(
        target=settings.models.target,
        drafter=settings.models.drafter,
        drafter_hash=drafter_hash(tokenizers.drafter_folder, tokenizers.drafter),
        alignment=tokenizers.alignment.fingerprint,
        train=settings.learner.train,
        code_version=__version__,
        settings={name: str(value) for name, value in settings.learner.model_dump(exclude={"tenants"}).items()},
    )


def memory_files(settings: Settings, tokenizers: TargetVocabulary, metrics: Metrics, folder: Path) -> MemoryFiles:
    """Return the memory of one learner and its files, staged in a folder of this learner alone."""
    memory = TextMemory(_kept(settings), vocabulary_size=len(tokenizers.target.vocabulary))
    return MemoryFiles(memory, folder, metrics, record_cipher(settings))


def _kept(settings: Settings) -> MemorySettings:
    """Return the settings of the memory, which is off where its files could not be encrypted as the log is."""
    section, log = settings.memory, settings.log
    if log.encryption_keys and log.key_store_url is None and section.tokens_per_tenant:
        logger.warning("the fleet's memory is off: log.encryption_keys without log.key_store gives tenants no keys")
        return section.model_copy(update={"tokens_per_tenant": 0})
    return section
