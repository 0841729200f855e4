"""What a decoding worker runs: an engine for each target, one drafter for all, one recorder."""

import os
import socket
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.ports import Metrics, NoopTracing, Registry, Target, Tracing
from omnidraft.wiring.controller import control_follower
from omnidraft.wiring.logs import log_reader, log_writer, registry
from omnidraft.wiring.models import (
    SnapshotLoader,
    Vocabularies,
    base_drafter,
    named_snapshot,
    snapshot_loader,
    target,
    vocabularies,
)
from omnidraft.wiring.recording import redactor

if TYPE_CHECKING:
    from rich.progress import Progress

    from omnidraft.decode.engine import Engine
    from omnidraft.decode.policy.cost_model import MeasuredCosts
    from omnidraft.decode.recording.trace_producer import TraceProducer
    from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
    from omnidraft.decode.snapshot.updater import SnapshotUpdater
    from omnidraft.models.shared_drafter import SharedDrafter


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """One target with its alignment, cache and snapshot slot. Without a refresher its snapshot stays."""

    engine: "Engine"
    target: Target
    refresher: "SnapshotUpdater | None"


@dataclass(frozen=True, slots=True)
class Worker:
    """What a decoding worker runs. Without a recorder nothing is learned from it."""

    served: tuple[ServedTarget, ...]
    """In the order of `models.targets`."""
    recorder: "TraceProducer | None"

    @property
    def engine(self) -> "Engine":
        """Of `models.target`."""
        return self.served[0].engine

    @property
    def target(self) -> Target:
        """The loaded `models.target`."""
        return self.served[0].target


def engine(
    settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None, snapshot: str | None = None
) -> Worker:
    """The engine of `models.target` alone, without traces or refreshing.

    Args:
        snapshot: a folder, a version or an alias; None is the base drafter.

    Raises:
        ModelError, SnapshotError, VocabularyError: models or snapshot cannot be had, or do not belong together.
    """
    from omnidraft.decode.snapshot.slot import SnapshotSlot

    words = vocabularies(settings, progress)
    loaded_target = target(settings, words)
    costs = _costs(settings, loaded_target)
    load = snapshot_loader(settings, words, costs)
    slot = SnapshotSlot(_first(settings, load, snapshot))
    made = _engine(settings, words, loaded_target, costs, metrics, None, slot)
    return Worker((ServedTarget(made, loaded_target, None),), None)


def worker(
    settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None, tracing: Tracing | None = None
) -> Worker:
    """Engines, refreshers and the recorder of one worker process.

    Raises:
        BusError, RegistryError: log or registry cannot be reached at the start; later they may come and go.
        ConfigError: there is no such redactor.
    """
    from omnidraft.decode.recording.trace_producer import TraceProducer
    from omnidraft.models.threads import in_own_thread

    recorder, tracing = None, tracing or NoopTracing()
    if settings.recorder.enabled:
        redact = redactor(settings)
        topic = settings.log.traces_topic
        log_reader(settings, topic).close()
        recorder = TraceProducer(lambda: log_writer(settings, topic), settings.recorder, metrics, redact, tracing)
    return Worker(in_own_thread(lambda: _all_served(settings, metrics, tracing, recorder, progress)), recorder)


def _all_served(
    settings: Settings,
    metrics: Metrics,
    tracing: Tracing,
    recorder: "TraceProducer | None",
    progress: "Progress | None",
) -> tuple[ServedTarget, ...]:
    pairs = [settings.for_target(name) for name in settings.models.targets]
    registries = [registry(pair) for pair in pairs]  # asked before anything large is loaded
    words = [vocabularies(pair, progress) for pair in pairs]
    drafter = base_drafter(settings, words[0])
    return tuple(
        _served(pair, its_words, metrics, tracing, recorder, drafter, snapshots, is_alone=len(pairs) == 1)
        for pair, its_words, snapshots in zip(pairs, words, registries, strict=True)
    )


def _served(
    settings: Settings,
    words: Vocabularies,
    metrics: Metrics,
    tracing: Tracing,
    recorder: "TraceProducer | None",
    drafter: "SharedDrafter",
    snapshots: Registry,
    *,
    is_alone: bool,
) -> ServedTarget:
    """One pair, which follows its champion unless the settings name its snapshot."""
    from omnidraft.decode.snapshot.slot import SnapshotSlot

    loaded_target = target(settings, words)
    costs = _costs(settings, loaded_target)
    costs.passes(settings.decode.mode)  # whatever the policy: metrics compare with plain decoding
    load = snapshot_loader(settings, words, costs, drafter)
    pinned = settings.worker.snapshot
    slot = SnapshotSlot(_first(settings, load, pinned))
    made = _engine(settings, words, loaded_target, costs, metrics, recorder, slot, tracing)
    made.decoder.grammars.prepare()
    if pinned is not None:
        return ServedTarget(made, loaded_target, None)
    refresher = _refresher(settings, metrics, tracing, snapshots, made, load, is_alone=is_alone)
    return ServedTarget(made, loaded_target, refresher)


def _first(settings: Settings, load: SnapshotLoader, name: str | None) -> "LoadedSnapshot":
    """What serves at the start: the named snapshot, or the base drafter."""
    return load(None, None) if name is None else named_snapshot(settings, load, name)


def _costs(settings: Settings, loaded_target: Target) -> "MeasuredCosts":
    """Measured now for the mode that requests have unless they say otherwise."""
    from omnidraft.decode.policy.cost_model import MeasuredCosts

    costs = MeasuredCosts(loaded_target)
    if settings.decode.policy == "cost":
        costs.passes(settings.decode.mode)
    return costs


def _engine(
    settings: Settings,
    words: Vocabularies,
    loaded_target: Target,
    costs: "MeasuredCosts",
    metrics: Metrics,
    recorder: "TraceProducer | None",
    slot: "SnapshotSlot",
    tracing: Tracing | None = None,
) -> "Engine":
    from omnidraft.decode.drafting.safe_drafting import DraftingFailures
    from omnidraft.decode.engine import Engine, Pair
    from omnidraft.decode.loop import Decoder
    from omnidraft.decode.sampling.grammar import Grammars
    from omnidraft.decode.sampling.grammar_trial import GrammarTrial

    pair = Pair(
        settings.models.target,
        settings.models.drafter,
        f"{socket.gethostname()}-{os.getpid()}",
        words.alignment.fingerprint,
        words.target,
        words.drafter,
    )
    top_k = settings.recorder.top_k if recorder else None
    vocabulary = words.target.vocabulary
    grammars = Grammars(vocabulary, GrammarTrial(vocabulary))
    decoder = Decoder(
        loaded_target,
        vocabulary,
        trace_top_k=top_k,
        costs=costs,
        failures=DraftingFailures(metrics, settings.models.target),
        grammars=grammars,
    )
    return Engine(
        decoder,
        pair,
        slot,
        recorder,
        metrics,
        decode=settings.decode,
        recording=settings.recorder,
        tracing=tracing,
        has_pass_spans=settings.tracing.passes,
    )


def _refresher(
    settings: Settings,
    metrics: Metrics,
    tracing: Tracing,
    snapshots: Registry,
    made: "Engine",
    load: SnapshotLoader,
    *,
    is_alone: bool,
) -> "SnapshotUpdater":
    from omnidraft.decode.snapshot.updater import SnapshotUpdater
    from omnidraft.models.threads import beside_decoding

    follower = control_follower(
        settings, metrics, ("champion", "canary", "drift", "drift_over"), must_be_named=not is_alone
    )
    staging = Path(tempfile.mkdtemp(prefix="omnidraft-snapshots-"))
    return SnapshotUpdater(
        snapshots,
        made.slot,
        partial(beside_decoding, load),
        follower,
        made.caution,
        settings.worker,
        metrics,
        target=settings.models.target,
        staging=staging,
        tracing=tracing,
    )
