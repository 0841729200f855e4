"""What controller and distiller run, for one pair each; serving.py has the worker."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.errors import BusError
from omnidraft.ports import Metrics
from omnidraft.wiring.logs import log_reader, log_writer, registry
from omnidraft.wiring.models import ngram_cache, vocabularies

if TYPE_CHECKING:
    from omnidraft.distill.loop import Distillation
    from omnidraft.fleet.promotion import Controller


def controller(settings: Settings, metrics: Metrics) -> "Controller":
    """Of the drafter for `models.target`. Raises BusError, RegistryError."""
    from omnidraft.fleet.promotion import Controller

    control = log_writer(settings, settings.log.control_topic)
    models = settings.models
    return Controller(
        registry(settings), control, settings.controller, metrics, target=models.target, drafter=models.drafter
    )


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
