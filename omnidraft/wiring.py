"""From settings to objects: the only module that knows every implementation. Heavy imports stay inside functions."""

import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from omnidraft.config import Settings
from omnidraft.errors import ConfigError
from omnidraft.ports import LogReader, LogWriter, Metrics, Registry, SnapshotVersion, Target

if TYPE_CHECKING:
    from rich.progress import Progress

    from omnidraft.decode.engine import Engine
    from omnidraft.decode.recorder import Recorder
    from omnidraft.decode.refresh import Refresher
    from omnidraft.decode.slot import LoadedSnapshot
    from omnidraft.fleet.promotion import Controller
    from omnidraft.models.hf_tokenizer import HfTokenizer
    from omnidraft.vocab.alignment import Alignment


# ---------------------------------------------------------------- logs


def log_writer(settings: Settings, topic: str) -> LogWriter:
    """Raises BusError when the log cannot be reached."""
    log, where = settings.log, urlsplit(settings.log.url)
    partitions = log.partitions if topic == log.traces_topic else 1
    match where.scheme:
        case "sqlite":
            from omnidraft.bus.sqlite_log import SqliteWriter

            return SqliteWriter(_path(log.url), topic, partitions=partitions, timeout_s=log.request_timeout_s)
        case "kafka":
            from omnidraft.bus.kafka_log import KafkaWriter

            return KafkaWriter(
                where.netloc,
                topic,
                partitions=partitions,
                linger_ms=log.linger_ms,
                request_timeout_s=log.request_timeout_s,
            )
    raise ConfigError(f"log.url must be sqlite:///path or kafka://host:port, got {log.url!r}")


def log_reader(settings: Settings, topic: str) -> LogReader:
    """Raises BusError when the log cannot be reached."""
    log, where = settings.log, urlsplit(settings.log.url)
    partitions = log.partitions if topic == log.traces_topic else 1
    match where.scheme:
        case "sqlite":
            from omnidraft.bus.sqlite_log import SqliteReader

            return SqliteReader(_path(log.url), topic, partitions=partitions, timeout_s=log.request_timeout_s)
        case "kafka":
            from omnidraft.bus.kafka_log import KafkaReader

            return KafkaReader(where.netloc, topic, partitions=partitions, request_timeout_s=log.request_timeout_s)
    raise ConfigError(f"log.url must be sqlite:///path or kafka://host:port, got {log.url!r}")


def registry(settings: Settings) -> Registry:
    """Raises RegistryError when it cannot be reached."""
    section, pair = settings.registry, (settings.models.drafter, settings.models.target)
    if section.url.startswith("directory://"):
        from omnidraft.registry.directory_registry import DirectoryRegistry

        return DirectoryRegistry(_path(section.url), *pair, keep_resume=section.keep_resume)
    from omnidraft.registry.mlflow_registry import MlflowRegistry

    return MlflowRegistry(section.url, *pair, artifacts=section.artifacts, keep_resume=section.keep_resume)


def _path(url: str) -> Path:
    """sqlite:///relative/path and sqlite:////absolute/path, as SQLAlchemy and MLflow read them."""
    return Path(url.split(":///", 1)[1])


# ---------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """Both folders, both tokenizers, and what connects them."""

    target_folder: Path
    drafter_folder: Path
    target: "HfTokenizer"
    drafter: "HfTokenizer"
    alignment: "Alignment"


def vocabularies(settings: Settings, progress: "Progress | None" = None) -> Vocabularies:
    """Raises ModelError when a model cannot be had."""
    from omnidraft.models import store
    from omnidraft.models.hf_tokenizer import load_tokenizer
    from omnidraft.vocab.alignment import align_cached

    target_folder = store.resolve(settings.models.target, progress=progress)
    drafter_folder = store.resolve(settings.models.drafter, progress=progress)
    target, drafter = load_tokenizer(target_folder), load_tokenizer(drafter_folder)
    alignment = align_cached(drafter, target, store.default_home() / "alignments")
    return Vocabularies(target_folder, drafter_folder, target, drafter, alignment)


def target(settings: Settings, words: Vocabularies) -> Target:
    """The target, ready to decode."""
    from omnidraft.models.transformers_target import load_target

    name, precision = settings.models.target, settings.models.precision
    return load_target(words.target_folder, settings.decode, name=name, precision=precision)


def snapshot_loader(
    settings: Settings, words: Vocabularies
) -> "Callable[[SnapshotVersion | None, Path | None], LoadedSnapshot]":
    """Loads a verified snapshot folder; without one, the base drafter as it is."""
    from omnidraft.decode.proposers.drafter import DrafterProposer
    from omnidraft.decode.slot import LoadedSnapshot
    from omnidraft.models.torch_drafter import load_drafter
    from omnidraft.snapshots import bundle
    from omnidraft.vocab.ngram_cache import NgramCache

    def load(version: SnapshotVersion | None, folder: Path | None) -> LoadedSnapshot:
        manifest = version.manifest if version else None
        tensors = bundle.serving_tensors(folder) if folder else None
        train: Literal["full", "lora"] = "lora" if manifest and manifest.train == "lora" else "full"
        model = load_drafter(
            words.drafter_folder, settings.models.drafter_precision, tensors, train, settings.learner.lora_rank
        )
        vocabs = (words.alignment.fingerprint, words.drafter.vocabulary, words.target.vocabulary)
        if folder:
            arrays = bundle.ngrams(folder)
            cache = NgramCache.from_arrays(arrays, *vocabs, settings.cache.capacity, settings.cache.eviction)
        else:
            cache = NgramCache(*vocabs, settings.cache.capacity, settings.cache.eviction)
            if settings.cache.warm:
                cache.warm(words.alignment)
        proposer = DrafterProposer(
            model,
            words.drafter,
            words.target.vocabulary,
            words.alignment,
            cache,
            noise_weight=settings.decode.noise_weight,
            min_path_probability=settings.decode.min_path_probability,
        )
        name = manifest.snapshot_id if manifest else "base"
        return LoadedSnapshot(version.version if version else None, name, proposer, cache, manifest)

    return load


# ---------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class Worker:
    """What a decoding worker runs. Without a recorder nothing is learned from it, without a refresher it stays."""

    engine: "Engine"
    target: Target
    recorder: "Recorder | None"
    refresher: "Refresher | None"


def engine(settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None) -> Worker:
    """An engine alone: the base drafter or the champion as it is now, no traces, no refreshing."""
    return _worker(settings, metrics, None, progress)


def worker(settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None) -> Worker:
    """Engine, recorder and refresher of one worker process.

    Raises:
        BusError, RegistryError: log or registry cannot be reached at the start; later they may come and go.
    """
    from omnidraft.decode.recorder import Recorder

    recorder = None
    if settings.recorder.enabled:
        topic = settings.log.traces_topic
        log_reader(settings, topic).close()
        recorder = Recorder(lambda: log_writer(settings, topic), settings.recorder, metrics)
    return _worker(settings, metrics, recorder, progress, follows=True)


def _worker(
    settings: Settings,
    metrics: Metrics,
    recorder: "Recorder | None",
    progress: "Progress | None",
    *,
    follows: bool = False,
) -> Worker:
    from omnidraft.decode.engine import Engine, Pair
    from omnidraft.decode.loop import Decoder
    from omnidraft.decode.slot import SnapshotSlot

    snapshots = registry(settings) if follows else None
    words = vocabularies(settings, progress)
    load = snapshot_loader(settings, words)
    loaded_target = target(settings, words)
    slot = SnapshotSlot(load(None, None))
    pair = Pair(
        settings.models.target,
        settings.models.drafter,
        f"{socket.gethostname()}-{os.getpid()}",
        words.alignment.fingerprint,
        words.target,
        words.drafter,
    )
    decoder = Decoder(loaded_target, words.target.vocabulary, trace_top_k=settings.recorder.top_k if recorder else None)
    made = Engine(decoder, pair, slot, recorder, metrics, decode=settings.decode, recording=settings.recorder)
    if snapshots is None:
        return Worker(made, loaded_target, recorder, None)
    return Worker(made, loaded_target, recorder, _refresher(settings, metrics, snapshots, slot, load))


def _refresher(settings, metrics, snapshots, slot, load):  # type: ignore[no-untyped-def]
    from omnidraft.decode.refresh import Refresher
    from omnidraft.fleet.announcements import ControlFollower

    follower = ControlFollower(log_reader(settings, settings.log.control_topic), metrics)
    staging = Path(tempfile.mkdtemp(prefix="omnidraft-snapshots-"))
    return Refresher(snapshots, slot, load, follower, settings.worker, metrics, staging=staging)


def controller(settings: Settings, metrics: Metrics) -> "Controller":
    """Raises BusError, RegistryError."""
    from omnidraft.fleet.promotion import Controller

    control = log_writer(settings, settings.log.control_topic)
    return Controller(registry(settings), control, settings.controller, metrics)
