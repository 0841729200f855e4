"""An engine that learns from what it is asked in its own process: the settings of one device, and what they make."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from omnidraft.assembly.distiller import distillation, identity
from omnidraft.assembly.fleet import controller
from omnidraft.assembly.host import DecodingHost
from omnidraft.assembly.models import Vocabularies, served_vocabularies
from omnidraft.assembly.recording import trace_producer
from omnidraft.assembly.registries import registry, snapshot_reader
from omnidraft.bus.sqlite_log import delete_before
from omnidraft.config import Settings
from omnidraft.decode.engine import Engine
from omnidraft.decode.recording.trace_producer import TraceProducer
from omnidraft.device.home import DeviceHome
from omnidraft.device.learning import IdleLearning, LearningParts, Tidier
from omnidraft.errors import ConfigError
from omnidraft.ports import Metrics

LOG, SNAPSHOTS = "log.db", "snapshots"
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "learner": {"train": "lora", "lora_rank": 64, "steps_per_snapshot": 4, "held_out_every": 8},
}
"""Settings of a device where the user has none: one user asks less than a fleet, and has less memory and disk. Factors
of rank 64 learn what full weights do in a seventh of the state."""


def device_settings(settings: Settings, home: Path) -> Settings:
    """Return the settings of one pair that learns in this folder. Raises ConfigError when they cannot do that."""
    if not settings.models.has_drafter:
        raise ConfigError("learn=True needs a drafter that can learn, and models.drafter is 'none'")
    if settings.worker.snapshot is not None:
        raise ConfigError("worker.snapshot names a snapshot that stays; learn=True serves what its home has learned")
    folder = home.expanduser().absolute()
    fixed: dict[str, dict[str, Any]] = {
        "log": {"url": f"sqlite:///{folder / LOG}"},
        "registry": {"url": f"directory:///{folder / SNAPSHOTS}"},
        "recorder": {"enabled": True},
        "worker": {"poll_s": 0.05},  # the controller announces in the same thread, before the updater polls
    }
    sections = {}
    for name in fixed.keys() | DEFAULTS.keys():
        section = getattr(settings, name)
        chosen = {key: value for key, value in DEFAULTS.get(name, {}).items() if key not in section.model_fields_set}
        sections[name] = section.model_copy(update=chosen | fixed.get(name, {}))
    return settings.for_target(settings.models.target).model_copy(update=sections)


def learning_engine(settings: Settings, metrics: Metrics, home: Path) -> tuple[Engine, IdleLearning]:
    """Return an engine of `models.target` that serves what was learned in this folder, and its learning, which has
    begun.

    Raises:
        ConfigError: the folder is in use, or the home of another pair.
        BusError, ModelError, SnapshotError, VocabularyError: models, log or snapshots cannot be used.
    """
    own = device_settings(settings, home)
    with ExitStack() as undo:
        held = DeviceHome(home.expanduser().absolute())
        undo.callback(held.close)
        tokenizers = served_vocabularies(own)
        assert isinstance(tokenizers, Vocabularies)
        held.claim(_pair(own, tokenizers))
        producer = trace_producer(own, metrics)
        assert producer is not None
        undo.callback(producer.close, 0.0)
        started = _started(own, metrics, held, tokenizers, producer)
        undo.pop_all()
    return started


def _pair(settings: Settings, tokenizers: Vocabularies) -> dict[str, str]:
    """Return what a home holds for one pair alone."""
    own = identity(settings, tokenizers)
    facts = {"target": own.target, "drafter": own.drafter, "drafter_hash": own.drafter_hash}
    facts |= {"alignment": own.alignment, "learner.train": own.train}
    return facts | ({"learner.lora_rank": str(settings.learner.lora_rank)} if own.train == "lora" else {})


def _started(
    settings: Settings, metrics: Metrics, home: DeviceHome, tokenizers: Vocabularies, producer: TraceProducer
) -> tuple[Engine, IdleLearning]:
    topic, log = settings.log.traces_topic, settings.log.path
    assert log is not None
    snapshots, host = registry(settings), DecodingHost(settings, metrics, tokenizers, producer=producer)
    served = host.serve(snapshot_reader(settings), begins_with_champion=True)
    assert served.updater is not None
    parts = LearningParts(
        home=home,
        producer=producer,
        slot=served.engine.slot,
        updater=served.updater,
        controller=controller(settings, metrics),
        tidier=Tidier(snapshots, partial(delete_before, log, topic), keep=settings.registry.keep_resume),
        make_distiller=partial(distillation, settings, metrics, folder=home.folder, tokenizers=tokenizers),
        settings=settings.learner,
    )
    return served.engine, IdleLearning(parts)
