"""The decoding worker: an engine for each target, one drafter for all, one trace producer."""

import os
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from omnidraft.config import NO_DRAFTER, Settings
from omnidraft.ports import Announcement, AnnouncementKind, Metrics, NoopTracing, SnapshotReader, Target, Tracing
from omnidraft.progress import stages
from omnidraft.wiring.controller import control_follower
from omnidraft.wiring.costs import measured_costs
from omnidraft.wiring.drafting import drafter_memory
from omnidraft.wiring.logs import snapshot_reader
from omnidraft.wiring.memory import memory_loader
from omnidraft.wiring.models import target
from omnidraft.wiring.named_snapshots import champion_or_base, named_or_base, require_named
from omnidraft.wiring.recording import trace_producer
from omnidraft.wiring.signing import champion_statements
from omnidraft.wiring.snapshot_loading import SnapshotLoader, base_drafter, snapshot_loader
from omnidraft.wiring.vocabularies import TargetVocabulary, Vocabularies, served_vocabularies

if TYPE_CHECKING:
    from rich.progress import Progress

    from omnidraft.decode.drafting.session_pool import DrafterMemory
    from omnidraft.decode.engine import Engine
    from omnidraft.decode.policy.cost_model import MeasuredCosts
    from omnidraft.decode.recording.trace_producer import TraceProducer
    from omnidraft.decode.snapshot.fleet_memory import MemoryLoader
    from omnidraft.decode.snapshot.slot import SnapshotSlot
    from omnidraft.decode.snapshot.updater import SnapshotUpdater
    from omnidraft.memory.recent_texts import RecentTexts
    from omnidraft.models.hf.tokenizer import HfTokenizer
    from omnidraft.models.loading import SharedDrafter
    from omnidraft.tools.formats import ToolFormat


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """One target with its alignment, cache and snapshot slot. Without an updater its snapshot stays."""

    engine: "Engine"
    target: Target
    updater: "SnapshotUpdater | None"


@dataclass(frozen=True, slots=True)
class Worker:
    """The engines and the trace producer of a worker. Without a producer no traces are recorded."""

    served: tuple[ServedTarget, ...]
    """In the order of `models.targets`."""
    producer: "TraceProducer | None"

    @property
    def engine(self) -> "Engine":
        """The engine of `models.target`."""
        return self.served[0].engine

    @property
    def target(self) -> Target:
        """The loaded `models.target`."""
        return self.served[0].target


def engine(
    settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None, snapshot: str | None = None
) -> Worker:
    """Return a worker of `models.target` alone, without traces or snapshot updates.

    Args:
        snapshot: a folder, a version or an alias; None is the base drafter.

    Raises:
        ModelError, SnapshotError, VocabularyError: models or snapshot cannot be loaded, or do not belong together.
    """
    from omnidraft.decode.snapshot.slot import FactorSwitch, SnapshotSlot
    from omnidraft.memory.recent_texts import RecentTexts

    require_named(settings, snapshot)
    tokenizers = served_vocabularies(settings, progress)
    loaded_target = target(settings, tokenizers)
    costs = measured_costs(settings, loaded_target)
    recent, memories = RecentTexts(), memory_loader(settings, metrics)
    keys = drafter_memory()
    load = snapshot_loader(settings, tokenizers, costs, None, recent, memories, FactorSwitch(), keys)
    slot = SnapshotSlot(named_or_base(settings, load, snapshot))
    made = _engine(settings, tokenizers, loaded_target, costs, metrics, None, slot, recent, keys)
    return Worker((ServedTarget(made, loaded_target, None),), None)


def worker(
    settings: Settings, metrics: Metrics, *, progress: "Progress | None" = None, tracing: Tracing | None = None
) -> Worker:
    """Return the engines, snapshot updaters and trace producer of one worker process.

    Raises:
        BusError, RegistryError: log or registry cannot be reached at the start; later they may come and go.
        ConfigError: there is no such redactor.
    """
    from omnidraft.models.loading import in_own_thread

    tracing = tracing or NoopTracing()
    stages.info("opening the log and the registry")
    producer = trace_producer(settings, metrics, tracing)
    return Worker(in_own_thread(lambda: _all_served(settings, metrics, tracing, producer, progress)), producer)


def _all_served(
    settings: Settings,
    metrics: Metrics,
    tracing: Tracing,
    producer: "TraceProducer | None",
    progress: "Progress | None",
) -> tuple[ServedTarget, ...]:
    pairs = [settings.for_target(name) for name in settings.models.targets]
    readers = [snapshot_reader(pair) for pair in pairs]  # a wrong address is known before anything large is loaded
    for pair in pairs:
        require_named(pair, pair.worker.snapshot)
    tokenizers = [served_vocabularies(pair, progress) for pair in pairs]
    first = tokenizers[0]
    drafter = base_drafter(settings, first) if isinstance(first, Vocabularies) else None
    return tuple(
        served_target(pair, its_tokenizers, metrics, tracing, producer, drafter, snapshots, is_alone=len(pairs) == 1)
        for pair, its_tokenizers, snapshots in zip(pairs, tokenizers, readers, strict=True)
    )


def served_target(
    settings: Settings,
    tokenizers: TargetVocabulary,
    metrics: Metrics,
    tracing: Tracing,
    producer: "TraceProducer | None",
    drafter: "SharedDrafter | None",
    snapshots: SnapshotReader,
    *,
    is_alone: bool,
    begins_with_champion: bool = False,
) -> ServedTarget:
    """Return one pair, which follows its champion unless `worker.snapshot` names a snapshot. It begins with the base
    drafter, or with the champion, which takes longer."""
    from omnidraft.decode.snapshot.slot import FactorSwitch, SnapshotSlot
    from omnidraft.memory.recent_texts import RecentTexts

    loaded_target = target(settings, tokenizers)
    costs = measured_costs(settings, loaded_target)
    costs.passes(settings.decode.mode)  # whatever the policy: metrics compare with plain decoding
    recent, memories = RecentTexts(), memory_loader(settings, metrics)
    switch, keys = FactorSwitch(), drafter_memory()
    load = snapshot_loader(settings, tokenizers, costs, drafter, recent, memories, switch, keys)
    pinned = settings.worker.snapshot
    first = champion_or_base(settings, load) if begins_with_champion else named_or_base(settings, load, pinned)
    slot = SnapshotSlot(first, switch)
    made = _engine(settings, tokenizers, loaded_target, costs, metrics, producer, slot, recent, keys, tracing)
    stages.info("preparing grammars and chats")
    made.decoder.grammars.prepare()
    tokenizers.target.prepare_chats()
    if pinned is not None:
        return ServedTarget(made, loaded_target, None)
    updater = _updater(settings, metrics, tracing, snapshots, made, load, memories, is_alone=is_alone)
    return ServedTarget(made, loaded_target, updater)


def _engine(
    settings: Settings,
    tokenizers: TargetVocabulary,
    loaded_target: Target,
    costs: "MeasuredCosts",
    metrics: Metrics,
    producer: "TraceProducer | None",
    slot: "SnapshotSlot",
    recent: "RecentTexts",
    keys: "DrafterMemory",
    tracing: Tracing | None = None,
) -> "Engine":
    from omnidraft.decode.decoder import Decoder
    from omnidraft.decode.drafting.safe_drafting import DraftingFailures
    from omnidraft.decode.engine import Engine
    from omnidraft.decode.prompting import Pair
    from omnidraft.decode.sampling.grammar import Grammars
    from omnidraft.decode.sampling.grammar_trial import GrammarTrial

    drafting = tokenizers if isinstance(tokenizers, Vocabularies) else None
    pair = Pair(
        settings.models.target,
        settings.models.drafter,
        f"{socket.gethostname()}-{os.getpid()}",
        drafting.alignment.fingerprint if drafting else NO_DRAFTER,
        tokenizers.target,
        drafting.drafter if drafting else None,
        _tool_format(settings, tokenizers.target),
    )
    top_k = settings.recorder.top_k if producer else None
    vocabulary = tokenizers.target.vocabulary
    grammars = Grammars(vocabulary, GrammarTrial(vocabulary))
    decoder = Decoder(
        loaded_target,
        vocabulary,
        trace_top_k=top_k,
        costs=costs,
        failures=DraftingFailures(metrics, settings.models.target),
        grammars=grammars,
        scheduling=settings.scheduler,
    )
    return Engine(
        decoder,
        pair,
        slot,
        producer,
        metrics,
        decode=settings.decode,
        opted_out=settings.recorder.opted_out,
        tracing=tracing,
        recent=recent if settings.decode.suffix_memory else None,
        drafter_memory=keys,
    )


def _tool_format(settings: Settings, tokenizer: "HfTokenizer") -> "ToolFormat":
    """Return the format that the settings name for the target, else that of its chat template."""
    from omnidraft.tools.formats import FORMATS

    named = settings.models.tool_formats.get(settings.models.target)
    return tokenizer.tool_format if named is None else FORMATS[named]


def _updater(
    settings: Settings,
    metrics: Metrics,
    tracing: Tracing,
    snapshots: SnapshotReader,
    made: "Engine",
    load: SnapshotLoader,
    memories: "MemoryLoader",
    *,
    is_alone: bool,
) -> "SnapshotUpdater":
    from omnidraft.decode.snapshot.updater import SnapshotUpdater
    from omnidraft.fleet.control_log import FOR_ALL_PAIRS
    from omnidraft.models.loading import in_background_thread
    from omnidraft.registry.staging import own_folder, remove_abandoned

    def forget(order: Announcement) -> None:
        memories.forget(order)
        made.forget_texts()
        remove_abandoned()

    kinds: tuple[AnnouncementKind, ...] = ("champion", "canary", "drift", "drift_over", *FOR_ALL_PAIRS)
    follower = control_follower(settings, metrics, kinds, must_be_named=not is_alone)
    return SnapshotUpdater(
        snapshots,
        made.slot,
        partial(in_background_thread, load),
        follower,
        made.drift_throttle,
        settings.worker,
        metrics,
        target=settings.models.target,
        staging=own_folder(),
        tracing=tracing,
        forget=forget,
        statements=champion_statements(settings),
    )
