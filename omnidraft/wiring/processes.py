"""What each process runs: worker, controller, distillation."""

import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.errors import BusError
from omnidraft.ports import Metrics, Registry, SnapshotVersion, Target
from omnidraft.wiring.logs import log_reader, log_writer, registry
from omnidraft.wiring.models import SnapshotLoader, ngram_cache, snapshot_loader, target, vocabularies
from omnidraft.wiring.snapshots import named_snapshot

if TYPE_CHECKING:
    from rich.progress import Progress

    from omnidraft.decode.engine import Engine
    from omnidraft.decode.recorder import Recorder
    from omnidraft.decode.refresh import Refresher
    from omnidraft.decode.slot import LoadedSnapshot, SnapshotSlot
    from omnidraft.distill.loop import Distillation
    from omnidraft.fleet.promotion import Controller


_LOAD_NICE = 10
"""Priority of a snapshot's load beside decoding."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What a decoding worker runs. Without a recorder nothing is learned from it, without a refresher it stays."""

    engine: "Engine"
    target: Target
    recorder: "Recorder | None"
    refresher: "Refresher | None"


def engine(
    settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None, snapshot: str | None = None
) -> Worker:
    """An engine alone, without traces or refreshing.

    Args:
        snapshot: a folder, a version or an alias; None is the base drafter.

    Raises:
        ModelError, SnapshotError, VocabularyError: models or snapshot cannot be had, or do not belong together.
    """
    return _worker(settings, metrics, None, progress, snapshot=snapshot)


def worker(settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None) -> Worker:
    """Engine, recorder and refresher of one worker process.

    Raises:
        BusError, RegistryError: log or registry cannot be reached at the start; later they may come and go.
    """
    from omnidraft.decode.recorder import Recorder
    from omnidraft.models.loading import apart

    recorder = None
    if settings.recorder.enabled:
        topic = settings.log.traces_topic
        log_reader(settings, topic).close()
        recorder = Recorder(lambda: log_writer(settings, topic), settings.recorder, metrics)
    return apart(lambda: _worker(settings, metrics, recorder, progress, follows=True))


def _worker(
    settings: Settings,
    metrics: Metrics,
    recorder: "Recorder | None",
    progress: "Progress | None",
    *,
    follows: bool = False,
    snapshot: str | None = None,
) -> Worker:
    from omnidraft.decode.engine import Engine, Pair
    from omnidraft.decode.loop import Decoder
    from omnidraft.decode.slot import SnapshotSlot

    snapshots = registry(settings) if follows else None
    words = vocabularies(settings, progress)
    load = snapshot_loader(settings, words)
    loaded_target = target(settings, words)
    slot = SnapshotSlot(load(None, None) if snapshot is None else named_snapshot(settings, load, snapshot))
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


def _refresher(
    settings: Settings, metrics: Metrics, snapshots: Registry, slot: "SnapshotSlot", load: SnapshotLoader
) -> "Refresher":
    from omnidraft.decode.refresh import Refresher
    from omnidraft.fleet.announcements import ControlFollower
    from omnidraft.models.loading import apart

    def load_beside(version: SnapshotVersion, folder: Path) -> "LoadedSnapshot":
        return apart(lambda: load(version, folder), nice=_LOAD_NICE)

    follower = ControlFollower(log_reader(settings, settings.log.control_topic), metrics)
    staging = Path(tempfile.mkdtemp(prefix="omnidraft-snapshots-"))
    return Refresher(snapshots, slot, load_beside, follower, settings.worker, metrics, staging=staging)


def controller(settings: Settings, metrics: Metrics) -> "Controller":
    """Of the drafter for `models.target`. Raises BusError, RegistryError."""
    from omnidraft.fleet.promotion import Controller

    control = log_writer(settings, settings.log.control_topic)
    pair = {"target": settings.models.target, "drafter": settings.models.drafter}
    return Controller(registry(settings), control, settings.controller, metrics, **pair)


def distillation(settings: Settings, metrics: Metrics, *, folder: Path) -> "Distillation":
    """The loop in which the drafter learns for `models.target`; `folder` is its own, snapshots are staged there.

    Raises:
        BusError, RegistryError, ModelError: log, registry or drafter cannot be used.
    """
    from omnidraft import __version__
    from omnidraft.distill.intake import Intake
    from omnidraft.distill.learner import Learner
    from omnidraft.distill.loop import Distillation
    from omnidraft.distill.publisher import Identity, Publisher
    from omnidraft.distill.source import TraceSource
    from omnidraft.models.folders import origin
    from omnidraft.models.trainable_drafter import load_trainable

    words, learner, log = vocabularies(settings), settings.learner, settings.log
    model = load_trainable(words.drafter_folder, train=learner.train, rank=learner.lora_rank, seed=learner.seed)
    cache = ngram_cache(settings, words, None)
    reader = log_reader(settings, log.traces_topic)
    dead_letters = log_writer(settings, log.dead_letters_topic)
    made = origin(words.drafter_folder)
    identity = Identity(
        target=settings.models.target,
        drafter=settings.models.drafter,
        drafter_hash=made.fingerprint if made else words.drafter.fingerprint,
        alignment=words.alignment.fingerprint,
        train=learner.train,
        code_version=__version__,
    )
    return Distillation(
        TraceSource(
            reader,
            dead_letters,
            words.alignment.fingerprint,
            metrics,
            topic=log.traces_topic,
            target=settings.models.target,
            drafter=settings.models.drafter,
        ),
        Intake(
            reader.partitions(),
            records_per_step=learner.records_per_step,
            held_out_every=learner.held_out_every,
            held_out_records=learner.held_out_records,
        ),
        Learner(model, words.drafter, words.target.vocabulary, words.alignment, cache, learner),
        Publisher(registry(settings), identity, folder),
        load_cache=lambda arrays: ngram_cache(settings, words, arrays),
        train=learner.train,
        steps_per_snapshot=learner.steps_per_snapshot,
        metrics=metrics,
        paused=_paused(settings, metrics),
    )


def _paused(settings: Settings, metrics: Metrics) -> Callable[[], bool]:
    """Whether the newest pause or resume for this pair is a pause; as last heard while the log is down."""
    from omnidraft.fleet.announcements import ControlFollower

    reader, models = log_reader(settings, settings.log.control_topic), settings.models
    kinds = ("pause", "resume")
    follower = ControlFollower(reader, metrics, kinds=kinds, target=models.target, drafter=models.drafter)
    heard = "resume"

    def paused() -> bool:
        nonlocal heard
        try:
            told = follower.poll(0.0)
        except BusError:
            return heard == "pause"
        heard = told.kind if told else heard
        return heard == "pause"

    return paused
