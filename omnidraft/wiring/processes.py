"""What controller and distiller run, for one pair each; serving.py has the worker."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft.config import Settings
from omnidraft.errors import BusError
from omnidraft.ports import AnnouncementKind, LogReader, LogWriter, Metrics
from omnidraft.wiring.logs import log_reader, log_writer, registry
from omnidraft.wiring.models import Vocabularies, ngram_cache, vocabularies

if TYPE_CHECKING:
    from omnidraft.distill.learner import Learner
    from omnidraft.distill.loop import Distillation
    from omnidraft.distill.publisher import Identity
    from omnidraft.distill.source import TraceSource
    from omnidraft.fleet.controller import Controller
    from omnidraft.snapshots.manifest import Manifest


_TO_CONTROLLERS: tuple[AnnouncementKind, ...] = ("best",)


def controller(settings: Settings, metrics: Metrics) -> "Controller":
    """Of the drafter for `models.target`. Raises BusError, RegistryError."""
    from omnidraft.fleet.controller import Controller, teller
    from omnidraft.fleet.drift import DriftWatch
    from omnidraft.fleet.follower import ControlFollower
    from omnidraft.fleet.recovery import Recovery
    from omnidraft.fleet.traffic import Traffic

    topic, snapshots = settings.log.control_topic, registry(settings)
    target, drafter = settings.models.target, settings.models.drafter
    tell = teller(log_writer(settings, topic), target=target, drafter=drafter)
    is_watched = settings.drift.enabled
    return Controller(
        snapshots,
        tell,
        settings.controller,
        metrics,
        target=target,
        traffic=Traffic(log_reader(settings, settings.log.traces_topic), target=target, drafter=drafter),
        recovery=Recovery(snapshots, tell, DriftWatch(settings.drift), metrics, target=target) if is_watched else None,
        follower=ControlFollower(
            log_reader(settings, topic), metrics, kinds=_TO_CONTROLLERS, target=target, drafter=drafter
        ),
    )


def distillation(settings: Settings, metrics: Metrics, *, folder: Path) -> "Distillation":
    """The loop in which the drafter learns for `models.target`; `folder` is its own, snapshots are staged there.

    Raises:
        BusError, RegistryError, ModelError: log, registry or drafter cannot be used.
    """
    from omnidraft.distill.intake import Intake
    from omnidraft.distill.loop import Distillation
    from omnidraft.distill.publisher import Publisher

    words, section = vocabularies(settings), settings.learner
    learning = learner(settings, words)
    reader = log_reader(settings, settings.log.traces_topic)
    return Distillation(
        trace_source(settings, words, reader, log_writer(settings, settings.log.dead_letters_topic), metrics),
        Intake(
            reader.partitions(),
            records_per_step=section.records_per_step,
            held_out_every=section.held_out_every,
            held_out_records=section.held_out_records,
        ),
        learning,
        Publisher(registry(settings), identity(settings, words), folder),
        load_cache=lambda arrays: ngram_cache(settings, words, arrays),
        steps_per_snapshot=section.steps_per_snapshot,
        metrics=metrics,
        paused=_paused(settings, metrics),
    )


def learner(settings: Settings, words: Vocabularies) -> "Learner":
    """The base drafter, ready to learn, with a fresh n-gram cache and head. Raises ConfigError, VocabularyError."""
    from omnidraft.distill.learner import Learner
    from omnidraft.models.acceptance_head import AcceptanceHead
    from omnidraft.models.trainable_drafter import load_trainable

    section = settings.learner
    model = load_trainable(words.drafter_folder, train=section.train, rank=section.lora_rank, seed=section.seed)
    cache = ngram_cache(settings, words, None)
    has_head = section.head != "off"
    head = AcceptanceHead(model.hidden_size, num_blocks=section.head_blocks, seed=section.seed) if has_head else None
    return Learner(model, words.drafter, words.target.vocabulary, words.alignment, cache, section, head)


def learner_of(settings: Settings, words: Vocabularies, manifest: "Manifest", folder: Path) -> "Learner":
    """A learner with the serving weights and the cache of a snapshot folder.

    Raises:
        ConfigError, SnapshotError, VocabularyError: the snapshot is of another pair or drafter.
    """
    from omnidraft.snapshots import bundle

    tensors = bundle.serving_tensors(folder)
    kind: dict[str, Any] = {} if manifest.train == "base" else {"train": manifest.train}
    if manifest.train == "lora" and tensors:
        kind["lora_rank"] = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
    section = settings.learner.model_copy(update=kind)
    made = learner(settings.model_copy(update={"learner": section}), words)
    if tensors is not None:
        made.start_from(tensors)
    made.cache = ngram_cache(settings, words, bundle.ngrams(folder))
    return made


def identity(settings: Settings, words: Vocabularies) -> "Identity":
    """What all snapshots of `models.target` and its drafter have in common."""
    from omnidraft import __version__
    from omnidraft.distill.publisher import Identity
    from omnidraft.models.folders import origin

    made = origin(words.drafter_folder)
    return Identity(
        target=settings.models.target,
        drafter=settings.models.drafter,
        drafter_hash=made.fingerprint if made else words.drafter.fingerprint,
        alignment=words.alignment.fingerprint,
        train=settings.learner.train,
        code_version=__version__,
    )


def trace_source(
    settings: Settings, words: Vocabularies, reader: LogReader, dead_letters: LogWriter, metrics: Metrics
) -> "TraceSource":
    """The records of this pair in the trace topic."""
    from omnidraft.distill.source import TraceSource

    return TraceSource(
        reader,
        dead_letters,
        words.alignment.fingerprint,
        metrics,
        topic=settings.log.traces_topic,
        target=settings.models.target,
        drafter=settings.models.drafter,
    )


def _paused(settings: Settings, metrics: Metrics) -> Callable[[], bool]:
    """Whether the newest pause or resume for this pair is a pause; as last heard while the log is down."""
    from omnidraft.fleet.follower import ControlFollower

    reader, models = log_reader(settings, settings.log.control_topic), settings.models
    follower = ControlFollower(reader, metrics, kinds=("pause", "resume"), target=models.target, drafter=models.drafter)
    is_paused = False

    def paused() -> bool:
        nonlocal is_paused
        with suppress(BusError):
            for told in follower.poll(0.0):
                is_paused = told.kind == "pause"
        return is_paused

    return paused
